import dataclasses

import pytest
import torch

from fastweights.errors import RunError, TrainingError
from fastweights.reproduce.recall import _bench, mqar, state_tracking
from fastweights.reproduce.recall.frame import Frame
from fastweights.runs import Member, load_run
from fastweights.tasks import recall
from fastweights.tasks import state_tracking as words
from fastweights.tasks.recall import IGNORED

from .helpers import TINY, members_of, records, result

MQAR: mqar.Settings = TINY["recall/mqar"].settings
WORDS: state_tracking.Settings = TINY["recall/state-tracking"].settings
every_model = pytest.mark.parametrize("model", mqar.TITLES)


def make_frame(model, settings=MQAR, *, positions=0, vocabulary_size=20):
    torch.manual_seed(0)
    return Frame(
        lambda: _bench.make_mixer(model, 8, settings),
        vocabulary_size=vocabulary_size,
        embedding_size=8,
        positions=positions,
    )


@every_model
@pytest.mark.parametrize("convolution", [0, 4])
def test_an_answer_depends_on_all_steps_before_it_and_on_none_after_it(model, convolution):
    frame = make_frame(model, dataclasses.replace(MQAR, convolution=convolution), positions=7)
    for parameter in frame.parameters():  # as they start, two blocks of small weights pass on little
        parameter.data.mul_(3)
    inputs = torch.arange(7).unsqueeze(0) + 1
    logits = frame(inputs)
    assert logits.shape == (1, 7, 20)
    for step in range(7):
        changed = inputs.clone()
        changed[0, step] = 19
        same = (frame(changed) - logits)[0].abs().amax(1) < 1e-5
        assert same[:step].all()
        assert not same[step:].any()


@every_model
def test_numbers_are_embedded_and_answered_by_one(model):
    torch.manual_seed(0)
    frame = Frame(lambda: _bench.make_mixer(model, 8, MQAR), numbers=2, embedding_size=8)
    x = torch.randn(3, 6, 2)
    marked = torch.rand(3, 6) < 0.4
    assert frame(x).shape == (3, 6, 1)
    assert torch.allclose(frame(x, marked), frame(x)[marked], atol=1e-6)
    # A number's size counts, though every block normalises its features.
    assert not torch.allclose(frame(x), frame(2 * x), atol=1e-4)


def test_the_error_of_numbers_is_counted_in_that_of_their_mean():
    x, answers = torch.randn(40, 5, 2), torch.randn(40, 5)
    frame = Frame(lambda: _bench.make_mixer("gru", 8, MQAR), numbers=2, embedding_size=8)
    splits = dict.fromkeys(("train", "validation", "test"), (x, answers))
    problem = _bench.Problem(splits, {}, numbers=2, variance=0.5)
    scores = _bench._Recaller(frame, problem, MQAR, 1e-3, 1).test(0)
    loss = (frame(x)[..., 0] - answers).square().mean().item()
    assert scores["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["test_accuracy"] == pytest.approx(1 - loss / 0.5, rel=1e-5)
    assert scores["milliseconds"] > 0


@every_model
def test_marked_steps_have_the_logits_of_all(model):
    frame = make_frame(model)
    inputs = torch.randint(20, (3, 6))
    marked = torch.rand(3, 6) < 0.4
    assert torch.allclose(frame(inputs, marked), frame(inputs)[marked], atol=1e-6)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("attention", 2 * 30 * 8 + 3 * 8 * 3),  # keys and values of 30 steps, and what the convolutions read again
        ("lstm", 2 * 8),
        ("gru", 8),
        ("irnn", 8),
        ("fast-weights", 8 + 8 * 8),
        ("gated", 2 * 8 + 8 * 17 + 8 * 9),
        ("sum", 2 * 4 * 4 + 3 * 8 * 3),
        ("gated-delta", 2 * 4 * 4 + 3 * 8 * 3),
        ("kda", 2 * 4 * 4 + 3 * 8 * 3),
        ("gated-delta-2", 2 * 4 * 4 + 3 * 8 * 3),
        ("rwkv7", 2 * 4 * 4 + 3 * 8 * 3),
        ("delta-lstm", 2 * 4 * 4 + 3 * 8 * 3 + 2 * 8),
        ("delta-fast-weights", 2 * 4 * 4 + 3 * 8 * 3 + 8 + 8 * 8),
        ("hidden-delta", 8 + 2 * 4 * 4 + 3 * (4 * 8 + 2 * 2)),
    ],
)
def test_the_size_of_the_state_is_what_a_step_hands_to_the_next(model, size):
    assert make_frame(model).state_size(30) == 2 * size


def test_without_mlps_or_convolutions_the_frame_is_smaller():
    def count(**settings):
        chosen = dataclasses.replace(MQAR, **settings)
        mixers = lambda: _bench.make_mixer("attention", 8, chosen)  # noqa: E731
        frame = Frame(mixers, vocabulary_size=20, embedding_size=8, mlp_multiple=chosen.mlp_multiple)
        return sum(parameter.numel() for parameter in frame.parameters())

    blocks = 2 * (16 + 8 * 24 + 24 + 8 * 8 + 8)
    assert count(mlp_multiple=0, convolution=0) == 20 * 8 + blocks + 16
    assert count(mlp_multiple=2, convolution=0) == 20 * 8 + blocks + 16 + 2 * (16 + 8 * 16 + 16 + 16 * 8 + 8)
    assert count(mlp_multiple=0, convolution=4) == 20 * 8 + blocks + 16 + 2 * (24 * 4 + 24)


def scores(members: list[Member], key: str) -> list[float]:
    return [(member.result or {})[key] for member in members]


def test_a_sweep_has_a_row_a_learning_rate_and_one_of_the_best_on_validation(tmp_path):
    settings = dataclasses.replace(MQAR, models=("lstm", "sum"), learning_rates=(1e-5, 1e-2), seeds=(1, 2), epochs=1)
    mqar.run(settings, tmp_path)
    assert len(members_of(tmp_path)) == 8
    rows = result(tmp_path)["rows"]
    floor = recall.floor(16, 2).accuracy
    assert {row["floor"] for row in rows} == {floor}
    swept = [f"{name}, learning rate {rate}" for name in ("LSTM", "Linear attention") for rate in ("1e-05", "0.01")]
    assert [row["model"] for row in rows] == [*swept, "LSTM", "Linear attention"]
    members = load_run(tmp_path).members
    for row in rows[4:]:
        rates = {
            rate: [m for m in members if m.model == f"{row['model']}, learning rate {rate:g}"] for rate in (1e-5, 1e-2)
        }
        errors = {rate: sum(scores(each, "validation_error")) for rate, each in rates.items()}
        losses = {rate: sum(scores(each, "validation_loss")) for rate, each in rates.items()}
        best = min((errors[rate], losses[rate], rate) for rate in rates)[2]
        assert row["metric"].endswith(f"at the best learning rate on validation, {best:g}")
        assert row["ours"] == scores(rates[best], "test_accuracy")
    state, swept_rates = load_run(tmp_path).lines
    assert [[point[0] for point in points] for points in state.series.values()] == [[32], [2 * (2 * 16 + 72)]]
    assert [[point[0] for point in points] for points in swept_rates.series.values()] == [[1e-5, 1e-2]] * 2


def test_a_learning_rate_that_is_too_high_costs_a_sweep_no_other_member(tmp_path):
    settings = dataclasses.replace(MQAR, models=("irnn",), learning_rates=(1e30, 1e-3))
    mqar.run(settings, tmp_path)
    assert [len(row["ours"]) for row in result(tmp_path)["rows"]] == [0, 1, 1]
    with pytest.raises(TrainingError, match="learning rate 1e"):
        mqar.run(dataclasses.replace(settings, learning_rates=(1e30,)), tmp_path / "alone")


def test_training_ends_where_the_accuracy_is_enough(tmp_path):
    mqar.run(dataclasses.replace(MQAR, models=("gru",), enough=0.0, epochs=5), tmp_path)
    kinds = [line["kind"] for line in records(tmp_path / "gru-8-0.005-seed1")]
    assert kinds == ["epoch", "result"]


def test_words_of_the_test_are_scored_by_their_lengths():
    splits = state_tracking.draw_splits(WORDS)
    assert [splits[name][0].shape for name in ("train", "validation")] == [(60, 5), (20, 5)]
    for name, (first, last) in state_tracking.SPANS.items():
        inputs, targets = splits[name]
        assert inputs.shape == targets.shape == (20, 5 * last)
        assert torch.equal(inputs, splits["four_times_test"][0][:, : 5 * last])
        assert (targets[:, : 5 * first] == IGNORED).all()
        assert torch.equal(targets[:, 5 * first :], (inputs.cumsum(1) % 2)[:, 5 * first :])


@pytest.mark.parametrize(("carried", "length"), [(None, 2), (0.4, 2), (0.5, 2), (0.625, 6), (0.75, 12), (1.0, 16)])
def test_words_that_grow_are_trained_on_half_as_far_again_as_they_are_followed(carried, length):
    drawn = words.sample(8, 16, generator=torch.Generator())
    problem = _bench.Problem({"train": drawn, "test": drawn}, {}, vocabulary_size=20, guess=0.5)
    learner = _bench._Recaller(make_frame("lstm", WORDS), problem, WORDS, 1e-3, 1)
    learner.carried = carried
    loss = learner.loss(0, 0)
    drawn.targets[:, length:] = 19
    assert learner.loss(0, 0) == loss
    drawn.targets[:, length - 1] = 19
    assert learner.loss(0, 0) != loss


@pytest.mark.parametrize("module", [mqar, state_tracking])
def test_with_renew_each_pass_has_sequences_of_its_own_the_same_in_every_process(module, monkeypatch, tmp_path):
    settings = dataclasses.replace(MQAR if module is mqar else WORDS, renew=True)
    problems = []
    monkeypatch.setattr(module, "prepare_bench", lambda settings, folder, problem: problems.append(problem))
    for change in ({}, {}, {"data_seed": 9}, {"renew": False}):
        module.prepare(dataclasses.replace(settings, **change), tmp_path)
    one, again, other, same = problems
    drawn = [one.splits["train"], one.redraw(1, 0.0), one.redraw(2, 0.0), other.redraw(1, 0.0)]
    for index, split in enumerate(drawn):
        assert split[0].shape == drawn[0][0].shape
        assert not any(torch.equal(split[0], earlier[0]) for earlier in drawn[:index])
    assert all(map(torch.equal, one.redraw(2, 0.0), again.redraw(2, 0.0)))
    assert same.redraw is None
    learner = _bench._Recaller(make_frame("lstm", settings), one, settings, 1e-3, 1)
    for epoch, split in enumerate(drawn[:3]):
        learner.loss(epoch, 0)
        assert all(map(torch.equal, learner.train, split))


@pytest.mark.parametrize(
    ("accuracy", "pairs", "steps"),
    [(0.0, 4, 64), (0.02, 4, 64), (4 / 64, 8, 64), (0.25, 32, 128), (0.3, 38, 152), (0.5, 64, 256), (1.0, 64, 256)],
)
def test_keys_that_grow_are_twice_as_many_as_are_recalled(accuracy, pairs, steps):
    settings = dataclasses.replace(MQAR, steps=256, pairs=64, vocabulary_size=512, growing=True)
    sequence = mqar._sequence(settings, mqar._pairs_of_pass(settings, accuracy))
    assert (sequence["pairs"], sequence["steps"]) == (pairs, steps)
    inputs, targets = recall.sample(3, generator=torch.Generator(), **sequence)
    assert inputs.shape == (3, steps)
    assert ((targets != IGNORED).sum(1) == pairs).all()


@pytest.mark.parametrize(("pairs", "steps", "updates"), [(1, 4, 0), (3, 64, 3), (5, 26, 2), (64, 384, 64)])
def test_keys_grow_from_and_to_any_number(pairs, steps, updates):
    sizes = {"pairs": pairs, "steps": steps, "updates": updates, "vocabulary_size": 1000}
    settings = dataclasses.replace(MQAR, **sizes, growing=True)
    for accuracy in (0.0, 0.2, 0.5, 1.0):
        sequence = mqar._sequence(settings, mqar._pairs_of_pass(settings, accuracy))
        recall.sample(3, generator=torch.Generator(), **sequence)  # which refuses what does not fit
    assert (sequence["pairs"], sequence["steps"], sequence["updates"]) == (pairs, steps, updates)


def test_a_pass_has_as_many_keys_as_the_one_before_calls_for(monkeypatch, tmp_path):
    problems = []
    monkeypatch.setattr(mqar, "prepare_bench", lambda settings, folder, problem: problems.append(problem))
    settings = dataclasses.replace(MQAR, steps=128, pairs=16, vocabulary_size=512, growing=True)
    mqar.prepare(settings, tmp_path)
    learner = _bench._Recaller(make_frame("lstm", vocabulary_size=512), problems[0], settings, 1e-3, 1)
    for epoch, (accuracy, pairs) in enumerate([(None, 4), (0.3, 10), (0.9, 16), (0.4, 13)]):
        learner.carried = accuracy
        learner.loss(epoch, 0)
        assert ((learner.train[1] != IGNORED).sum(1) == pairs).all()
    assert (problems[0].splits["validation"][1] != IGNORED).sum() == 16 * settings.validation_examples


def test_rows_of_longer_words_have_their_own_floors(tmp_path):
    state_tracking.run(dataclasses.replace(WORDS, models=("irnn",), group="S3", epochs=1), tmp_path)
    rows = result(tmp_path)["rows"]
    assert [row["metric"] for row in rows[:3]] == ["test accuracy", "twice test accuracy", "four times test accuracy"]
    assert [row["floor"] for row in rows[:3]] == [words.floor(5, "S3").accuracy, 1 / 6, 1 / 6]


@pytest.mark.parametrize(
    ("module", "change", "message"),
    [
        (mqar, {"steps": 7}, "steps must be even and at least 8"),
        (mqar, {"updates": 3}, "updates must be at most the 2 pairs, got 3"),
        (mqar, {"learning_rates": (0.0,)}, r"learning_rate must be positive and finite, got 0\.0"),
        (mqar, {"learning_rates": (1e-3, 1.0000001e-3)}, r"learning_rates must differ .* got \(0\.001, 0\.00100"),
        (mqar, {"embedding_sizes": (9,)}, "delta_heads must divide the 9 features, got 2"),
        (mqar, {"attention_heads": 3}, "attention_heads must divide the 8 features, got 3"),
        (mqar, {"enough": 1.5}, r"enough must lie between 0 and 1, got 1\.5"),
        (mqar, {"convolution": -1}, "convolution must be an integer of at least 0, got -1"),
        (mqar, {"models": ("associative-lstm",), "embedding_sizes": (9,)}, "hidden_size must be even"),
        (state_tracking, {"group": "S4"}, "group must be one of parity, S3, S5, got 'S4'"),
        (state_tracking, {"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_run_are_refused(module, change, message):
    settings = MQAR if module is mqar else WORDS
    with pytest.raises(RunError, match=message):
        module.check(dataclasses.replace(settings, **change))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["attention", "delta"])
def test_a_small_recall_is_learnt(model, tmp_path):
    settings = dataclasses.replace(
        MQAR, models=(model,), embedding_sizes=(32,), train_examples=4000, validation_examples=200, test_examples=200,
        epochs=15, batch_size=32, learning_rates=(1e-2,), dropout=0.0, checkpoint_seconds=60,
    )  # fmt: skip
    mqar.run(settings, tmp_path)
    assert result(tmp_path)["rows"][0]["ours"][0] > 0.9
