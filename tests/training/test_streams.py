import dataclasses
import math

import pytest
import torch
from torch import nn

from fastweights import nn as fast
from fastweights.errors import TrainingError
from fastweights.training import RunFolder, Schedule, StreamSchedule, evaluate_streams, train_streams

from .helpers import records


class Model(nn.Module):
    """Two carried tensors of different shapes: what a gated layer has."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.core = fast.GatedFastWeightsRNN(6, 7, slow_inner_size=8)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(7, 5)

    def forward(self, inputs, state=None):
        y, state = self.core(self.embedding(inputs), state)
        return self.output(self.dropout(y)), state


def make_model(**settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(**settings)


def make_streams(steps=70, batch=6, seed=0):
    """Answer with the symbol of three steps before, on a third of the steps; elsewhere with 0."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(1, 5, (steps, batch), generator=generator)
    due = torch.rand(steps, batch, generator=generator) < 1 / 3
    due[:3] = False
    targets = torch.where(due, inputs.roll(3, 0), 0)
    return inputs.byte(), targets.byte(), (3 * due).byte()


def make_splits(**sizes):
    return {name: make_streams(seed=seed, **sizes) for seed, name in enumerate(("train", "validation", "test"))}


SCHEDULE = StreamSchedule(
    epochs=3, batch_size=6, learning_rate=0.01, segment=16, reset=0.3, annealing="cosine", checkpoint_seconds=0
)


def test_it_learns_to_answer(tmp_path):
    schedule = StreamSchedule(epochs=60, batch_size=6, learning_rate=0.01, segment=16, patience=60)
    with RunFolder(tmp_path, {}) as folder:
        result = train_streams(make_model(dropout=0.0), make_splits(), schedule, folder, seed=1)
    epochs = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    assert [record["step"] for record in epochs] == [5 * epoch for epoch in range(1, 61)]  # 70 steps in segments of 16
    assert epochs[-1]["train_loss"] < 0.6 * epochs[0]["train_loss"]
    best = min(epochs, key=lambda record: (record["validation_error"], record["validation_loss"]))
    assert (result["epoch"], result["validation_error"]) == (best["epoch"], best["validation_error"])
    assert result["test_error"] == pytest.approx(100 * (1 - result["test_partial_accuracy"]))
    assert result["steps"] == 300


@pytest.mark.parametrize(("name", "kind"), [("nadam", torch.optim.NAdam), ("adam", torch.optim.Adam)])
def test_a_segment_is_one_step_on_carried_and_detached_states(tmp_path, name, kind):
    """The loop against one written out: the state goes on, from the end of the streams to their beginning too."""
    schedule = dataclasses.replace(SCHEDULE, reset=0.0, annealing="none", clip_norm=0.5, epochs=2, patience=2)
    schedule = dataclasses.replace(schedule, optimizer=name)
    splits = make_splits()
    model, plain = make_model(dropout=0.0), make_model(dropout=0.0)
    with RunFolder(tmp_path, {}) as folder:
        train_streams(model, splits, schedule, folder, seed=1)
    optimizer = kind(plain.parameters(), lr=0.01)
    inputs, targets, _ = (tensor.long() for tensor in splits["train"])
    state, losses = None, []
    for _ in range(2):
        for start in range(0, 70, 16):
            logits, state = plain(inputs[start : start + 16], state)
            state = state.detach()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[start : start + 16].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    epochs = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    assert epochs[1]["train_loss"] == pytest.approx(sum(losses[5:]) / 5, rel=1e-6)
    if epochs[1]["validation_error"] <= epochs[0]["validation_error"]:  # then the weights left are those of the end
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_streams_start_anew_where_the_dice_say_so_and_nowhere_else(tmp_path):
    seen = []

    class Watched(Model):
        def forward(self, inputs, state=None):
            if self.training:
                seen.append(None if state is None else [tensor.clone() for tensor in state])
            return super().forward(inputs, state)

    torch.manual_seed(0)
    schedule = dataclasses.replace(SCHEDULE, reset=0.5, epochs=10)
    with RunFolder(tmp_path, {}) as folder:
        train_streams(Watched(), make_splits(), schedule, folder, seed=1)
    assert seen[0] is None
    steps = []
    for state in seen[1:]:
        assert state is not None
        zero = torch.stack([(tensor.flatten(1) == 0).all(1) for tensor in state])
        assert (zero.all(0) == zero.any(0)).all()  # the whole state of a stream or nothing of it
        steps.append(zero.all(0))
    anew = torch.stack(steps).double()  # [steps, streams]
    assert abs(anew.sum() - anew.numel() / 2) < 4 * math.sqrt(anew.numel() / 4)
    assert (abs(anew.sum(0) - len(anew) / 2) < 4 * math.sqrt(len(anew) / 4)).all()  # other ones at every step


def test_scores_are_those_counted_by_hand():
    logits = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 0, 3], [1, 0, 0]]).view(4, 1, 3)

    class Fixed(nn.Module):
        def forward(self, inputs, state):
            return logits, ()

    targets = torch.tensor([[0], [1], [1], [2]])
    distances = torch.tensor([[0], [16], [17], [40]])
    scores = evaluate_streams(Fixed(), (targets, targets, distances))
    log_p = logits.squeeze(1).log_softmax(1)[range(4), targets.squeeze(1)] / math.log(2)
    assert scores.total_accuracy == 0.5
    assert scores.partial_accuracy == pytest.approx(1 / 3)
    assert scores.total_bits == pytest.approx(-log_p.mean().item())
    assert scores.partial_bits == pytest.approx(-log_p[1:].mean().item())
    assert scores.loss == pytest.approx(-log_p.mean().item() * math.log(2))
    assert scores.by_distance == ((1, 16, 1.0, 1), (17, 32, 0.0, 1), (33, 48, 0.0, 1))


def test_a_model_of_half_precision_is_scored_in_single_precision():
    inputs, targets, distances = make_streams()
    logits = torch.randn(*inputs.shape, 5, generator=torch.Generator().manual_seed(0)).bfloat16()

    class Fixed(nn.Module):
        def forward(self, inputs, state):
            return logits, ()

    shares = logits.double().log_softmax(2).gather(2, targets.long().unsqueeze(2))
    assert evaluate_streams(Fixed(), (inputs, targets, distances)).loss == pytest.approx(
        -shares.mean().item(), rel=1e-6
    )


def test_a_score_does_not_depend_on_how_many_steps_are_read_at_once(monkeypatch):
    model, streams = make_model(), make_streams()
    whole = evaluate_streams(model, streams)
    monkeypatch.setattr("fastweights.training.streams._EVALUATED_STEPS", 7)
    pieces = evaluate_streams(model, streams)
    assert pieces.total_accuracy == whole.total_accuracy
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)


def test_scoring_leaves_a_part_that_its_owner_has_frozen_frozen():
    model = make_model().train()
    model.dropout.eval()
    evaluate_streams(model, make_streams())
    assert [part.training for part in model.children()] == [True, True, False, True]
    assert model.training


def test_bad_streams_are_refused_before_anything_is_written(tmp_path):
    splits = make_splits()
    with RunFolder(tmp_path / "a", {}) as folder:
        with pytest.raises(ValueError, match=r"train split must be 7 streams \(batch_size\), got 6"):
            train_streams(make_model(), splits, dataclasses.replace(SCHEDULE, batch_size=7), folder, seed=1)
        with pytest.raises(ValueError, match=r"test: inputs, targets and distances must each be \[steps,B\]"):
            train_streams(make_model(), splits | {"test": [t[0] for t in splits["test"]]}, SCHEDULE, folder, seed=1)
        empty = [tensor[:0] for tensor in splits["validation"]]
        with pytest.raises(TrainingError, match="validation split is empty"):
            train_streams(make_model(), splits | {"validation": empty}, SCHEDULE, folder, seed=1)
        nothing = (*splits["test"][:2], torch.zeros(70, 6, dtype=torch.long))
        with pytest.raises(ValueError, match="test: no answer is due"):
            train_streams(make_model(), splits | {"test": nothing}, SCHEDULE, folder, seed=1)
        with pytest.raises(ValueError, match=r"splits lack validation and test: .*, got train"):
            train_streams(make_model(), {"train": splits["train"]}, SCHEDULE, folder, seed=1)
        floats = (splits["train"][0].float(), *splits["train"][1:])
        with pytest.raises(ValueError, match=r"train: inputs must be integers, got torch.float32"):
            train_streams(make_model(), splits | {"train": floats}, SCHEDULE, folder, seed=1)
        with pytest.raises(TypeError, match="schedule must be a StreamSchedule"):
            train_streams(make_model(), splits, Schedule(epochs=1), folder, seed=1)  # type: ignore[arg-type]
        assert not (tmp_path / "a" / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="streams: no answer is due"):
        evaluate_streams(make_model(), nothing)
    with pytest.raises(ValueError, match="streams: distances must not be negative, got -1"):
        evaluate_streams(make_model(), (*nothing[:2], nothing[2] - 1))
    model = make_model()
    with pytest.raises(IndexError):
        evaluate_streams(model, (nothing[0].long() + 9, nothing[1], nothing[2] + 1))
    assert model.training  # as it was


def test_the_seed_decides_which_streams_start_anew(tmp_path):
    states = []
    for seed in (1, 2):
        model = make_model(dropout=0.0)
        with RunFolder(tmp_path / str(seed), {}) as folder:
            train_streams(model, make_splits(), SCHEDULE, folder, seed=seed)
        states.append(model.state_dict())
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"segment": 0}, "segment must be an integer of at least 1, got 0"),
        ({"reset": 1.5}, "reset must lie between 0 and 1, got 1.5"),
    ],
)
def test_a_schedule_out_of_range_is_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        StreamSchedule(epochs=1, **setting)
