"""The episodic loop: its scores by hand, its tasks, the weights it keeps, and what it refuses."""

import json
import math

import pytest
import torch

from fastweights import few_shot
from fastweights.errors import RunError, TrainingError
from fastweights.tasks.episodes import Episodes, EpisodeSampler
from fastweights.training import EpisodeSchedule, RunFolder, evaluate_episodes, held_out_episodes, train_episodes
from fastweights.training.episodes import _VALIDATION as VALIDATION
from fastweights.training.episodes import task_generator

LABELS = torch.arange(12).repeat_interleave(6)
SCHEDULE = EpisodeSchedule(tasks=12, tasks_per_step=2, validate_every=4, validation_tasks=5, test_tasks=7)


def sampler(labels=LABELS, **options):
    generator = torch.Generator().manual_seed(0)
    examples = torch.eye(12)[labels] + 0.3 * torch.randn(len(labels), 12, generator=generator)
    return EpisodeSampler(examples, labels, **{"ways": 3, "shots": 2, "queries": 2, **options})


def samplers():
    return dict.fromkeys(("train", "validation", "test"), sampler())


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return few_shot.FewShotNetwork(torch.nn.Linear(12, 4), few_shot.FastWeightsHead(4, 3, hidden_size=8))


class Fixed(torch.nn.Module):
    """Answers a class at a time, whatever it is asked."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, examples, description, labels, queries):
        return self.logits


def test_scores_are_those_counted_by_hand():
    targets = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    logits = torch.zeros(3, 4, 2)
    logits[..., 0] = 2.0  # the answer is always 0: 2, 2 and 4 of 4 are right
    nothing = torch.zeros(3, 2, dtype=torch.long)
    scores = evaluate_episodes(Fixed(logits), Episodes(torch.zeros(1, 1), nothing, nothing, targets, targets, nothing))
    assert scores.tasks == 3
    assert scores.accuracy == pytest.approx(100 * (0.5 + 0.5 + 1) / 3)
    spread = math.sqrt((2 * (0.5 - 2 / 3) ** 2 + (1 - 2 / 3) ** 2) / 2)
    assert scores.interval == pytest.approx(100 * 1.96 * spread / math.sqrt(3))
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert scores.cross_entropy == pytest.approx((8 * right + 4 * wrong) / 12, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_half_precision_is_scored_in_single_precision(dtype):
    tasks = sampler().draw(50, torch.Generator().manual_seed(0))
    logits = torch.randn(50, 6, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    shares = logits.double().log_softmax(2).gather(2, tasks.targets.unsqueeze(2))
    assert evaluate_episodes(Fixed(logits), tasks).cross_entropy == pytest.approx(-float(shares.mean()), rel=1e-6)


def test_a_column_that_no_class_of_the_tasks_has_is_no_answer():
    labels = torch.arange(6).repeat_interleave(4)
    tasks = EpisodeSampler(torch.eye(6)[labels], labels, ways=3, shots=1, queries=2).draw(
        10, torch.Generator().manual_seed(0)
    )

    class More(torch.nn.Module):
        def forward(self, examples, description, labels, queries):
            logits = few_shot.FewShotNetwork(torch.nn.Identity(), few_shot.PrototypeHead(3))(
                examples, description, labels, queries
            )
            return torch.cat([logits, torch.full_like(logits, 1e4)], dim=-1)

    known = evaluate_episodes(few_shot.FewShotNetwork(torch.nn.Identity(), few_shot.PrototypeHead(3)), tasks)
    assert evaluate_episodes(More(), tasks) == known


def test_nor_does_it_count_in_training(tmp_path):
    """Five columns and tasks of three classes: the columns of none are not told to be never answered."""
    model = few_shot.FewShotNetwork(torch.nn.Linear(12, 4), few_shot.FastWeightsHead(4, 5, hidden_size=8))
    unused = {name: p.detach().clone()[3:] for name, p in model.head.named_parameters() if name.startswith("softmax")}
    assert unused
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(model, samplers(), SCHEDULE, folder, seed=1)
    after = {name: p.detach()[3:] for name, p in model.head.named_parameters() if name in unused}
    torch.testing.assert_close(after, unused, rtol=0, atol=0)


class Encoder(torch.nn.Linear):
    features = 4


class Own(torch.nn.Module):
    """A network of the caller's own, with columns and no head."""

    num_classes = 5

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *task):
        return self.network(*task)


def test_a_head_is_not_tested_on_columns_that_it_never_learnt(tmp_path):
    given = samplers() | {"test": sampler(ways=4)}
    encoder = Encoder(12, 4)
    message = "the test tasks have 4 classes, and those to train on 3: the network would never have learnt"
    for learnt in (
        few_shot.FewShotNetwork(encoder, few_shot.FastWeightsHead(4, 5, hidden_size=8)),
        few_shot.MAML(encoder, 5, hidden_size=8),
    ):
        with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(ValueError, match=message):
            train_episodes(learnt, given, SCHEDULE, folder, seed=1)
    compares = few_shot.FewShotNetwork(torch.nn.Linear(12, 4), few_shot.PrototypeHead(5))
    for number, free in enumerate((compares, Own(compares))):
        with RunFolder(tmp_path / f"other{number}", {}) as folder:
            assert "4-way_2-shot_test_accuracy" in train_episodes(free, given, SCHEDULE, folder, seed=1)


def test_one_task_has_no_interval():
    assert math.isnan(evaluate_episodes(network(), sampler().draw(1, torch.Generator().manual_seed(0))).interval)


def test_it_evaluates_without_gradients_and_leaves_the_mode_as_it_was():
    model = network()
    model.encoder.eval()
    model.head.train()
    evaluate_episodes(model, sampler().draw(60, torch.Generator().manual_seed(0)))
    assert (model.training, model.encoder.training, model.head.training) == (True, False, True)


def test_tasks_of_a_test_are_the_same_in_pieces_as_at_once():
    model, tasks = network(), sampler().draw(120, torch.Generator().manual_seed(0))
    with torch.no_grad():
        pieces = model(tasks.examples, tasks.description, tasks.labels, tasks.queries)
    whole = model(tasks.examples, tasks.description, tasks.labels, tasks.queries)
    assert torch.allclose(pieces, whole, atol=1e-6)


def test_what_a_run_tells(tmp_path):
    further = {"all": sampler().partition(torch.Generator().manual_seed(0))}
    with RunFolder(tmp_path / "run", {}) as folder:
        result = train_episodes(network(), samplers(), SCHEDULE, folder, seed=1, further=further)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tasks"] for line in lines] == [4, 8, 12, 12]
    assert lines[-1] == result
    assert result["3-way_2-shot_test_accuracy"] == result["test_accuracy"] == pytest.approx(100 - result["test_error"])
    assert 0 <= result["all_accuracy"] == pytest.approx(100 - result["all_error"])
    best = min(lines[:3], key=lambda line: (line["validation_error"], line["validation_loss"]))
    assert (result["epoch"], result["validation_error"]) == (best["epoch"], best["validation_error"])


def test_the_weights_left_are_those_that_the_test_scored(tmp_path):
    model = network()
    with RunFolder(tmp_path / "run", {}) as folder:
        result = train_episodes(model, samplers(), SCHEDULE, folder, seed=1)
    again = evaluate_episodes(model, held_out_episodes(sampler(), 7, seed=1))
    assert again.accuracy == result["test_accuracy"]
    assert again.interval == result["test_interval"] == result["3-way_2-shot_test_interval"]


def weights_after(steps, path, **options):
    """Those that a run of so many steps leaves, which is validated at its end alone."""
    model, tasks = network(), 2 * steps
    schedule = EpisodeSchedule(tasks=tasks, tasks_per_step=2, validate_every=tasks, validation_tasks=5, **options)
    with RunFolder(path / f"{steps}-{len(options)}", {}) as folder:
        train_episodes(model, samplers(), schedule, folder, seed=1)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("averaging", [0.3, 0.9])
def test_a_running_mean_of_the_weights_is_what_is_scored_and_left(tmp_path, averaging):
    steps = [weights_after(count, tmp_path, learning_rate=0.03) for count in range(1, 8)]
    mean = steps[0]
    for count, weights in enumerate(steps[1:], 1):
        kept = min(averaging, (1 + count) / (10 + count))
        mean = kept * mean + (1 - kept) * weights
    left = weights_after(7, tmp_path, learning_rate=0.03, averaging=averaging)
    assert torch.allclose(left, mean, atol=1e-6)
    assert not torch.allclose(left, steps[-1], atol=1e-3)


def test_it_is_the_running_mean_that_is_validated(tmp_path):
    first, last = (
        EpisodeSchedule(
            tasks=6, tasks_per_step=2, validate_every=6, test_tasks=5, averaging=averaging, learning_rate=0.1
        )
        for averaging in (0.9, 0.0)
    )
    losses, tests = [], []
    for schedule in (first, last):
        model = network()
        with RunFolder(tmp_path / str(schedule.averaging), {}) as folder:
            result = train_episodes(model, samplers(), schedule, folder, seed=1)
        losses.append(result["validation_loss"])
        tasks = sampler().draw(400, task_generator(1, VALIDATION))
        tests.append(evaluate_episodes(model, tasks).cross_entropy)
    assert losses == pytest.approx(tests)
    assert losses[0] != pytest.approx(losses[1])


def test_statistics_that_a_network_keeps_are_averaged_with_its_weights(tmp_path):
    model = network()
    model.encoder = torch.nn.Sequential(model.encoder, torch.nn.BatchNorm1d(4))
    schedule = EpisodeSchedule(tasks=12, tasks_per_step=2, validate_every=12, averaging=0.9, learning_rate=0.03)
    seen = []
    model.encoder[1].register_forward_hook(
        lambda norm, *_: seen.append(norm.running_mean.clone()) if norm.training else None
    )
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(model, samplers(), schedule, folder, seed=1)
    mean = seen[0]
    for count, statistics in enumerate(seen[1:], 1):
        kept = min(0.9, (1 + count) / (10 + count))
        mean = kept * mean + (1 - kept) * statistics
    assert torch.allclose(model.encoder[1].running_mean, mean, atol=1e-6)
    assert int(model.encoder[1].num_batches_tracked) == len(seen) == 6


def test_weights_decay_by_the_learning_rate_where_nothing_else_moves_them(tmp_path):
    model = network()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    model.loss = lambda episodes: 0 * sum(parameter.sum() for parameter in model.parameters())
    schedule = EpisodeSchedule(tasks=6, validate_every=6, learning_rate=0.1, weight_decay=0.5)
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(model, samplers(), schedule, folder, seed=1)
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.allclose(after, before * (1 - 0.1 * 0.5) ** 6)


def test_tasks_differ_by_seed_and_stay_for_a_seed():
    first, again, other = (held_out_episodes(sampler(), 20, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first.classes, other.classes)


def test_a_loss_of_its_own_is_what_is_trained_on(tmp_path):
    model, asked = network(), []

    def loss(episodes):
        asked.append(episodes)
        return model.encoder.weight.square().sum()

    model.loss = loss
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(model, samplers(), SCHEDULE, folder, seed=1)
    assert [len(episodes.labels) for episodes in asked] == [2] * 6


def test_what_the_test_would_be_refused_for_is_found_before_training(tmp_path):
    few = {name: sampler for name, sampler in samplers().items() if name != "test"}
    for given, message in (
        (few, "samplers must have train, validation and test; test is missing"),
        (few | {"test": None}, "test is missing"),
        (few | {"test": sampler(ways=4)}, "the test tasks have 4 classes, and the network has columns for 3 at most"),
    ):
        with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(ValueError, match=message):
            train_episodes(network(), given, SCHEDULE, folder, seed=1)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    tasks = [held_out_episodes(sampler(ways=ways), 3, seed=1) for ways in (3, 4)]
    for further, message in (
        ({"test": tasks[0]}, "further has 'test', a name that the loop uses itself: give those tasks another"),
        ({"3-way_2-shot_validation": tasks[0]}, "further has '3-way_2-shot_validation', a name that the loop uses"),
        ({"more": tasks[1]}, "the further 'more' tasks have 4 classes, and the network has columns for 3 at most"),
    ):
        with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(ValueError, match=message):
            train_episodes(network(), samplers(), SCHEDULE, folder, seed=1, further=further)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_example_that_is_not_finite_is_named_before_training(tmp_path):
    broken = sampler()
    broken.examples = broken.examples.clone()
    broken.examples[7, 2] = math.inf
    with (
        RunFolder(tmp_path / "run", {}) as folder,
        pytest.raises(TrainingError, match=r"the train examples hold inf at \(7, 2\), and 1 such values in all"),
    ):
        train_episodes(network(), samplers() | {"train": broken}, SCHEDULE, folder, seed=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("seed", [-1, 2**70, 1.5, True])
def test_seeds_that_no_generator_takes_are_refused(tmp_path, seed):
    with (
        RunFolder(tmp_path / "run", {}) as folder,
        pytest.raises(ValueError, match=r"seed must be an integer of 0 to 2\^63 - 1, got"),
    ):
        train_episodes(network(), samplers(), SCHEDULE, folder, seed=seed)
    with pytest.raises(ValueError, match=r"seed must be an integer of 0 to 2\^63 - 1, got"):
        held_out_episodes(sampler(), 3, seed=seed)


def test_tasks_without_queries_have_no_score():
    tasks = held_out_episodes(sampler(), 3, seed=1)
    with pytest.raises(ValueError, match=r"there must be at least one query, got \[3, 0\]"):
        evaluate_episodes(network(), tasks._replace(queries=tasks.queries[:, :0], targets=tasks.targets[:, :0]))


def test_an_answer_that_is_no_number_is_no_score():
    broken = sampler()
    broken.examples = torch.full_like(broken.examples, torch.nan)
    with pytest.raises(TrainingError, match="the network returned NaN"):
        evaluate_episodes(network(), held_out_episodes(broken, 3, seed=1))


def test_other_tasks_in_the_same_folder_are_refused(tmp_path):
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(network(), samplers(), SCHEDULE, folder, seed=1)
    for other, changed in (
        (samplers() | {"test": sampler(ways=2)}, "test was 3-way 2-shot .*, now 2-way 2-shot tasks with 2 queries a"),
        (samplers() | {"train": sampler(shots=1)}, "train was 3-way 2-shot .*, now 3-way 1-shot"),
        (samplers() | {"train": sampler(labels=LABELS[:66])}, "12 classes and 72 examples, now .* 11 classes and 66"),
    ):
        with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(RunError, match=changed):
            train_episodes(network(), other, SCHEDULE, folder, seed=1)


def test_another_schedule_in_the_same_folder_is_refused(tmp_path):
    with RunFolder(tmp_path / "run", {}) as folder:
        train_episodes(network(), samplers(), SCHEDULE, folder, seed=1)
    other = EpisodeSchedule(tasks=12, tasks_per_step=2, validate_every=4, validation_tasks=6, test_tasks=7)
    with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(RunError, match="validation_tasks was 5, now 6"):
        train_episodes(network(), samplers(), other, folder, seed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": 0}, "tasks must be an integer of at least 1, got 0"),
        ({"tasks": 12.0}, "tasks must be an integer of at least 1, got 12.0"),
        ({"test_tasks": 4.5}, "test_tasks must be an integer of at least 1, got 4.5"),
        ({"pool": 0}, "pool must be an integer of at least 1, got 0"),
        ({"test_tasks": 1}, "test_tasks must be at least 2, for an interval; got 1"),
        ({"tasks_per_step": 3}, "validate_every must be a multiple of tasks_per_step, got 4 and 3: give another"),
        (
            {"validate_every": 8},
            "tasks must be a multiple of validate_every, got 12 and 8: give another validate_every",
        ),
        ({"tasks": 13}, "tasks must be a multiple of validate_every, got 13 and 4"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"averaging": 1.0}, "averaging must be at least 0 and less than 1, got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay times the learning rate must be at least 0 and less than 1, got -0.1"),
        ({"annealing": "linear"}, "annealing must be one of none, cosine, got 'linear'"),
    ],
)
def test_schedules_that_cannot_run_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSchedule(**{"tasks": 12, "tasks_per_step": 2, "validate_every": 4, **change})
