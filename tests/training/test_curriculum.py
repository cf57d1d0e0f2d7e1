"""The curriculum of classes: when levels are completed, what is drawn, and exact resume."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.errors import TrainingError
from fastweights.nn import HebbianSoftmax
from fastweights.training import CurriculumSchedule, RunFolder, train_curriculum

from .helpers import records

CLASSES, FEATURES = 12, 16
SCHEDULE = CurriculumSchedule(
    epochs=60, batch_size=8, learning_rate=0.004, clip_norm=float("inf"), checkpoint_seconds=0,
    test_every=4, first_classes=3, added_classes=2, last_classes=12, threshold=0.7,
)  # fmt: skip


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 10), nn.Dropout(0.1), nn.Tanh())
        self.head = HebbianSoftmax(10, CLASSES, gamma=0.1, dropout=0.1)
        self.seen = []  # targets of every step

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, x, target):
        self.seen.append(target)
        return self.head.loss(self.body(x), target)


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 1, FEATURES, generator=generator)
    generator.manual_seed(seed)
    return centres + 1.3 * torch.randn(CLASSES, count, FEATURES, generator=generator)


def jitter(x, *, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def train(folder, schedule=SCHEDULE, model=None, **options):
    model = model or Model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=schedule.learning_rate)
    model.head.attach(optimizer)
    with RunFolder(folder, {"model": "x"}) as opened:
        told: dict[str, Any] = {"seed": 3, "augment": jitter} | options
        return model, train_curriculum(model, optimizer, examples(9, 1), examples(5, 2), schedule, opened, **told)


def test_levels_follow_the_held_out_accuracy(tmp_path):
    model, result = train(tmp_path / "run")
    *tests, last = records(tmp_path / "run")
    assert last == result
    assert result["classes"] == CLASSES
    classes, completed, began = 3, [], 0
    for test in tests:
        assert test["classes"] == classes
        assert test["step"] % 4 == 0
        assert ("level" in test) == (test["validation_error"] < 30)
        if "level" in test:
            assert (test["level"], test["level_steps"]) == (classes, test["step"] - began)
            completed.append([classes, test["step"]])
            classes, began = classes + 2, test["step"]
    assert completed == result["levels"]
    assert classes >= CLASSES
    # Every step drew from the classes of its level, and the last level's were all drawn.
    levels = dict((step, shown) for shown, step in completed)
    shown = 3
    for step, target in enumerate(model.seen, start=1):
        assert int(target.max()) < shown
        shown = levels.get(step, shown - 2) + 2
    assert model.head.counts.sum() == len(model.seen) * 8


def test_the_result_is_of_the_last_weights_and_the_classes_shown(tmp_path):
    model, result = train(tmp_path / "run")
    x, targets = examples(5, 2).flatten(0, 1), torch.arange(CLASSES).repeat_interleave(5)
    model.eval()
    with torch.no_grad():
        logits = model(x)
    assert result["test_error"] == pytest.approx(100 * (logits.argmax(1) != targets).float().mean().item())
    assert result["test_loss"] == pytest.approx(F.cross_entropy(logits, targets).item())


def test_it_ends_after_its_steps(tmp_path):
    schedule = CurriculumSchedule(**vars(SCHEDULE) | {"epochs": 3, "threshold": 0.999})
    model, result = train(tmp_path / "run", schedule)
    assert len(model.seen) == result["steps"] == 12
    assert result["levels"] == []
    assert result["classes"] == 3


def test_images_of_whole_numbers_are_read_as_parts_of_one(tmp_path):
    images = torch.randint(0, 256, (CLASSES, 4, FEATURES), dtype=torch.uint8)

    class Seen(Model):
        def loss(self, x, target):
            assert x.dtype == torch.float32
            assert float(x.min()) >= 0
            assert 0.9 < float(x.max()) <= 1
            return super().loss(x, target)

    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = CurriculumSchedule(**vars(SCHEDULE) | {"epochs": 2})
    with RunFolder(tmp_path / "run", {"model": "x"}) as folder:
        train_curriculum(model, optimizer, images, images, schedule, folder, seed=1)


def test_refuses_what_it_cannot_train(tmp_path):
    schedule = CurriculumSchedule(**vars(SCHEDULE) | {"last_classes": CLASSES + 1})
    with pytest.raises(ValueError, match="train examples must have the schedule's 13 classes, got 12"):
        train(tmp_path / "run", schedule)
    bad = examples(5)
    bad[3, 1, 2] = float("nan")
    with RunFolder(tmp_path / "other", {}) as folder, pytest.raises(TrainingError, match=r"hold nan at \(3, 1, 2\)"):
        train_curriculum(Model(), None, bad, bad, SCHEDULE, folder, seed=1)  # type: ignore[arg-type]
    for name, value in (("test_every", 0), ("first_classes", 0), ("added_classes", 0), ("threshold", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
            CurriculumSchedule(**vars(SCHEDULE) | {name: value})
    with pytest.raises(ValueError, match="last_classes must be more than first_classes, 3, got 3"):
        CurriculumSchedule(**vars(SCHEDULE) | {"last_classes": 3})


class Fixed(nn.Linear):
    """Answers so many of the first ten held-out examples rightly, whatever it has learnt."""

    def __init__(self, right):
        super().__init__(1, 3)
        self.right = right

    def forward(self, x):
        answers = torch.arange(len(x)) // 5
        answers[self.right : 10] = 2
        return F.one_hot(answers, 3).float()

    def loss(self, x, target):
        return 0 * self.weight.sum()


@pytest.mark.parametrize(("right", "levels"), [(5, []), (6, []), (7, [[2, 2]])])
def test_a_level_is_completed_above_the_threshold_and_not_at_it(tmp_path, right, levels):
    schedule = CurriculumSchedule(epochs=1, test_every=2, first_classes=2, last_classes=3, threshold=0.6)
    model, images = Fixed(right), torch.zeros(3, 5, 1)
    with RunFolder(tmp_path / "run", {}) as folder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        result = train_curriculum(model, optimizer, images, images, schedule, folder, seed=1)
    assert result["levels"] == levels
