import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from fastweights.errors import TrainingError
from fastweights.nn import HebbianSoftmax
from fastweights.training import RunFolder, Schedule, epoch_order, evaluate, train

from .helpers import records


def make_splits(count=200):
    generator = torch.Generator().manual_seed(0)
    splits = {}
    for name in ("train", "validation", "test"):
        x = torch.randn(count, 5, generator=generator)
        splits[name] = (x, (x[:, 0] * x[:, 1] > 0).long())
    return splits


def make_model(dropout=0.3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


SCHEDULE = Schedule(epochs=4, batch_size=32, learning_rate=0.02, checkpoint_seconds=0)


def test_it_learns_and_reports_the_best_epoch(tmp_path):
    schedule = Schedule(epochs=40, batch_size=32, learning_rate=0.02, patience=40)
    model = make_model(dropout=0.0)
    with RunFolder(tmp_path, {}) as folder:
        result = train(model, make_splits(), schedule, folder, seed=1)
    epochs = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    assert [record["epoch"] for record in epochs] == list(range(1, 41))
    assert [record["step"] for record in epochs] == [7 * epoch for epoch in range(1, 41)]
    assert records(tmp_path)[-1] == result
    best = min(epochs, key=lambda record: (record["validation_error"], record["validation_loss"], record["epoch"]))
    assert result["epoch"] == best["epoch"]
    assert result["validation_error"] == best["validation_error"]
    assert result["test_error"] == best["test_error"] == evaluate(model, make_splits()["test"])[1]
    assert result["test_error"] < 15
    assert result["parameters"] == 5 * 16 + 16 + 16 * 2 + 2
    assert epochs[-1]["train_loss"] < 0.5 * epochs[0]["train_loss"]


def test_patience_stops_a_run_that_learns_nothing_more(tmp_path):
    schedule = Schedule(epochs=50, batch_size=32, learning_rate=1e-12, patience=3)
    with RunFolder(tmp_path, {}) as folder:
        result = train(make_model(dropout=0.0), make_splits(), schedule, folder, seed=1)
    # The loss of an all but frozen model can still creep by a last bit: the stop is counted from the best epoch.
    assert records(tmp_path)[-2]["epoch"] == result["epoch"] + 3 < 50


class Hebbian(nn.Module):
    """A head that smooths all through the four epochs, behind a body."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
            self.head = HebbianSoftmax(16, 2, gamma=0.1, limit=350, dropout=0.3)

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x, target):
        return self.head.loss(self.body(x), target)


def test_a_head_that_smooths_is_trained_as_by_hand_and_let_go(tmp_path):
    model, twin = Hebbian(), Hebbian()
    for each in (model, twin):
        each.head.dropout = 0.0
    schedule = Schedule(epochs=1, batch_size=50, learning_rate=0.02)
    with RunFolder(tmp_path, {}) as folder:
        train(model, make_splits(), schedule, folder, seed=1, loss=model.loss)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.02, fused=True)
    twin.head.attach(optimizer)
    inputs, targets = make_splits()["train"]
    for batch in epoch_order(200, 1, 0).split(50):
        optimizer.zero_grad()
        twin.loss(inputs[batch], targets[batch]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), schedule.clip_norm)
        optimizer.step()
    assert torch.equal(model.head.weight, twin.head.weight)
    assert model.head.counts.tolist() == torch.bincount(targets).tolist()
    model.head.attach(torch.optim.SGD(model.parameters(), lr=0.1))  # refused while it is attached


def test_a_head_that_smooths_without_its_loss_is_refused_before_anything_is_written(tmp_path):
    with RunFolder(tmp_path, {}) as folder, pytest.raises(ValueError, match="HebbianSoftmax in this Hebbian remembers"):
        train(Hebbian(), make_splits(), SCHEDULE, folder, seed=1)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_splits_of_other_names_are_scored_with_the_test(tmp_path):
    inputs, targets = make_splits()["test"]
    splits = make_splits() | {
        f"class_{label}": (inputs[targets == label], targets[targets == label]) for label in (0, 1)
    }
    model = make_model()
    with RunFolder(tmp_path, {}) as folder:
        result = train(model, splits, SCHEDULE, folder, seed=1)
    for label in (0, 1):
        scores = (result[f"class_{label}_loss"], result[f"class_{label}_error"])
        assert scores == evaluate(model, splits[f"class_{label}"])
    assert "class_0_error" not in records(tmp_path)[0]


def test_evaluation_leaves_a_part_that_its_owner_has_frozen_frozen():
    inputs, targets = make_splits()["test"]
    model = make_model().train()
    model[0].eval()
    for labels in (targets, targets + 5):  # also where it raises
        with pytest.raises(IndexError, match="out of bounds") if labels is not targets else nullcontext():
            evaluate(model, (inputs, labels))
        assert [part.training for part in model] == [False, True, True, True]
        assert model.training


@pytest.mark.parametrize(
    ("examples", "options", "error", "message"),
    [
        ((torch.zeros(0, 4), torch.zeros(0).long()), {}, TrainingError, r"the given split is empty: .* \(0, 4\)"),
        ((torch.tensor([[0.0, torch.nan]]), torch.tensor([0])), {}, TrainingError, "given inputs hold nan at"),
        ((torch.zeros(2, 4), torch.zeros(2).long()), {"batch_size": 0}, ValueError, "batch_size must be an integer of"),
        (torch.zeros(2, 4), {}, TypeError, "the given split must be a pair of inputs and targets"),
    ],
)
def test_an_evaluation_of_nothing_is_refused(examples, options, error, message):
    with pytest.raises(error, match=message):
        evaluate(nn.Identity(), examples, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_of_half_precision_is_scored_in_single_precision(dtype):
    """The sum over a batch may be larger than float16 can hold, and bfloat16 rounds it to three digits."""
    logits = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0)).mul(60).to(dtype)
    labels = torch.arange(2000) % 10
    shares = logits.double().log_softmax(1)
    loss, error = evaluate(nn.Identity(), (logits, labels), batch_size=2000)
    assert loss == pytest.approx(-float(shares[torch.arange(2000), labels].mean()), rel=1e-6)
    assert error == pytest.approx(100 * float((shares.argmax(1) != labels).double().mean()))


def test_an_own_loss_takes_the_place_of_cross_entropy(tmp_path):
    model = make_model()
    weights = [parameter.clone() for parameter in model.parameters()]
    with RunFolder(tmp_path, {}) as folder:
        train(model, make_splits(), SCHEDULE, folder, seed=1, loss=lambda x, y: 0 * model(x).sum())
    assert records(tmp_path)[0]["train_loss"] == 0
    assert all(map(torch.equal, model.parameters(), weights))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def test_an_own_optimizer_takes_the_place_of_adam(tmp_path):
    model, twin = make_model(dropout=0.0), make_model(dropout=0.0)
    schedule = Schedule(epochs=1, batch_size=200, learning_rate=0.02)
    with RunFolder(tmp_path, {}) as folder:
        train(model, make_splits(), schedule, folder, seed=1, optimizer=torch.optim.SGD(model.parameters(), lr=9.0))
    inputs, targets = (part[epoch_order(200, 1, 0)] for part in make_splits()["train"])
    nn.functional.cross_entropy(twin(inputs), targets).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs - 0.02 * theirs.grad)  # the learning rate is the schedule's


class Pairs(Dataset[Any]):
    """A map-style dataset of the examples of a split."""

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split[0])

    def __getitem__(self, index):
        inputs, targets = self.split
        return inputs[index].numpy(), int(targets[index])


class Ragged(Pairs):
    def __getitem__(self, index):
        return self.split[0][index, : 2 + index % 2], 0


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    "form",
    [
        lambda split: tuple(part.numpy() for part in split),
        Pairs,
        lambda split: DataLoader(Pairs(split), batch_size=7, shuffle=True),
        lambda split: DataLoader(
            TensorDataset(*split), collate_fn=lambda pairs: [torch.stack(part) for part in zip(*pairs, strict=True)]
        ),
    ],
    ids=["arrays", "dataset", "loader", "own collate"],
)
def test_arrays_datasets_and_loaders_are_trained_on_as_their_tensors(tmp_path, form):
    results = []
    for name, make in (("tensors", lambda split: split), ("form", form)):
        splits = {split: make(pair) for split, pair in make_splits().items()}
        with RunFolder(tmp_path / name, {}) as folder:
            results.append(train(make_model(), splits, SCHEDULE, folder, seed=1))
        assert evaluate(make_model(), splits["test"]) == evaluate(make_model(), make_splits()["test"])
    tensors, others = ({key: value for key, value in result.items() if key != "seconds"} for result in results)
    assert others == tensors


def test_splits_that_do_not_fit_together_are_refused_before_anything_is_written(tmp_path):
    x, y = make_splits()["train"]
    cases: list[tuple[Any, type[Exception], str]] = [
        ((x, y), TypeError, "splits must be a dict of train, validation and test, got a tuple"),
        ({"train": (x, y)}, ValueError, "splits lack validation and test: .*, got train"),
        (make_splits() | {"train": (x, y[:150])}, ValueError, "the train split has 200 inputs and 150 targets"),
        (make_splits() | {"test": (x[:9], y)}, ValueError, "the test split has 9 inputs and 200 targets"),
        (make_splits() | {"test": (x, ["a", "b"])}, TypeError, "the test targets must be a tensor, or .*, got a list"),
        (make_splits() | {"test": (x, 3)}, TypeError, "the test targets must be one for each example, got .* 3"),
        (
            make_splits() | {"train": (x, y.float())},
            TypeError,
            r"the train targets must be class indices \[N\], got .*32",
        ),
        (make_splits() | {"test": (x, y[:, None])}, TypeError, r"the test targets .* got torch.int64 \[200, 1\]: of"),
        (make_splits() | {"test": (x, y - 1)}, ValueError, "the test targets must be class indices from 0 on, got -1"),
        (make_splits() | {"test": (x, y, y)}, TypeError, "the test split must be a pair .*, got tuple of 3"),
        (make_splits() | {"test": x}, TypeError, "the test split must be a pair .*, got Tensor"),
        (make_splits() | {"test": Stream()}, TypeError, r"the test split is read in an order of its own \(Stream\)"),
        (make_splits() | {"test": DataLoader(Stream())}, TypeError, "the test split is read in an order of its own"),
        (make_splits() | {"test": Ragged((x, y))}, TypeError, "examples of the test split cannot be put side by side"),
        (make_splits() | {"test": TensorDataset(x[:0], y[:0])}, TrainingError, "the test split is empty"),
        (make_splits() | {"test": TensorDataset(x)}, TypeError, "the test split must be a pair .*, got list of 1"),
        (
            make_splits() | {"test": DataLoader(TensorDataset(x, y), sampler=SubsetRandomSampler([1, 2]))},
            ValueError,
            "the DataLoader of the test split has a sampler of its own",
        ),
    ]
    for splits, error, message in cases:
        with RunFolder(tmp_path, {}) as folder, pytest.raises(error, match=message):
            train(make_model(), splits, SCHEDULE, folder, seed=1)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_targets_of_training_are_for_its_own_loss_alone(tmp_path):
    x, y = make_splits()["train"]
    model = make_model()
    splits = make_splits() | {"train": (x, nn.functional.one_hot(y).float())}
    with RunFolder(tmp_path / "soft", {}) as folder:
        soft = train(
            model, splits, SCHEDULE, folder, seed=1, loss=lambda a, b: nn.functional.cross_entropy(model(a), b)
        )
    with RunFolder(tmp_path / "hard", {}) as folder:
        hard = train(make_model(), make_splits(), SCHEDULE, folder, seed=1)
    assert soft["test_loss"] == pytest.approx(hard["test_loss"], rel=1e-3)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    with RunFolder(tmp_path, {}) as folder, pytest.raises(ValueError, match="ReLU has no parameters to train"):
        train(nn.ReLU(), make_splits(), SCHEDULE, folder, seed=1)


def test_an_optimizer_of_several_groups_is_refused_before_anything_is_written(tmp_path):
    model = make_model()
    groups = [{"params": layer.parameters()} for layer in model if isinstance(layer, nn.Linear)]
    with RunFolder(tmp_path, {}) as folder, pytest.raises(ValueError, match="2 groups: give"):
        train(model, make_splits(), SCHEDULE, folder, seed=1, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_seeds_differ_and_epochs_differ():
    orders = [epoch_order(50, seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(50))
    assert len({tuple(order.tolist()) for order in orders}) == 4


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_data_that_is_not_finite_is_refused_before_anything_is_written(tmp_path, split, value):
    splits = make_splits()
    splits[split][0][17, 3] = value
    with RunFolder(tmp_path, {}) as folder, pytest.raises(TrainingError) as caught:
        train(make_model(), splits, SCHEDULE, folder, seed=1)
    assert f"the {split} inputs hold {value} at (17, 3), and 1 such values" in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "checkpoint.pt").exists()


def test_an_empty_split_is_refused(tmp_path):
    splits = make_splits() | {"validation": (torch.empty(0, 5), torch.empty(0, dtype=torch.long))}
    with RunFolder(tmp_path, {}) as folder, pytest.raises(TrainingError, match="the validation split is empty"):
        train(make_model(), splits, SCHEDULE, folder, seed=1)


class Spoilt(nn.Linear):
    """Its output turns to NaN at a given call in training."""

    def __init__(self, call):
        super().__init__(5, 2)
        self.left = call

    def forward(self, x):
        self.left -= self.training
        return super().forward(x) * (math.nan if self.training and self.left == 0 else 1.0)


def test_a_loss_that_is_not_finite_stops_the_run_and_no_checkpoint_holds_it(tmp_path):
    with RunFolder(tmp_path, {}) as folder, pytest.raises(TrainingError) as caught:
        train(Spoilt(call=11), make_splits(), SCHEDULE, folder, seed=1, title="spoilt")
    message = str(caught.value)
    assert message.startswith("spoilt: the loss or its gradient became NaN or infinite in epoch 2, by step 11;")
    assert "learning rate (0.02)" in message
    assert "start over" in message
    with RunFolder(tmp_path, {}) as folder:
        state = folder.load()
    assert state is not None
    assert state["standing"]["step"] == 10
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


def test_annealing_lowers_the_learning_rate_to_zero_step_by_step(tmp_path):
    """The same steps by hand, with the cosine written out."""
    splits = make_splits()
    schedule = Schedule(epochs=3, batch_size=64, learning_rate=0.02, annealing="cosine", patience=3)
    model, twin = make_model(dropout=0.0), make_model(dropout=0.0)
    with RunFolder(tmp_path, {}) as folder:
        train(model, splits, schedule, folder, seed=1)
    optimizer, steps, best = torch.optim.Adam(twin.parameters(), fused=True), 3 * 4, []
    inputs, targets = splits["train"]
    for step in range(steps):
        batch = epoch_order(200, 1, step // 4).split(64)[step % 4]
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(inputs[batch]), targets[batch]).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), schedule.clip_norm)
        optimizer.step()
        if step % 4 == 3:
            best.append(evaluate(twin, splits["validation"]))
    found = [(r["validation_loss"], r["validation_error"]) for r in records(tmp_path) if r["kind"] == "epoch"]
    assert found == best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 2.5}, "epochs must be an integer of at least 1, got 2.5"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"patience": 0}, "patience must be an integer of at least 1, got 0"),
        ({"learning_rate": -1.0}, r"learning_rate must be positive and finite, got -1\.0"),
        ({"annealing": "linear"}, "annealing must be one of none, cosine, got 'linear'"),
        ({"learning_rate": math.nan}, "learning_rate must be positive and finite, got nan"),
        ({"clip_norm": 0.0}, r"clip_norm must be positive .*, got 0\.0"),
        ({"clip_norm": "5"}, "clip_norm must be positive .*, got '5'"),
        ({"checkpoint_seconds": -1.0}, r"checkpoint_seconds must not be negative, got -1\.0"),
        ({"checkpoint_seconds": None}, "checkpoint_seconds must not be negative, got None"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"epochs": 1, **change})
