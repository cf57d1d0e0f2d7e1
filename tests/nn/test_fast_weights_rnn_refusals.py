"""The layer of Ba et al. 2016: what is refused, and changes nothing."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fastweights import nn
from fastweights.errors import KernelError

MAKERS = [nn.FastWeightsRNN, nn.FastWeightsRNNCell]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": 0}, "input_size must be an integer of at least 1, got 0"),
        ({"hidden_size": -2}, "hidden_size must be an integer of at least 1, got -2"),
        ({"decay": -0.1}, r"decay must lie between 0 and 1, got -0\.1"),
        ({"decay": 1.1}, r"decay must lie between 0 and 1, got 1\.1"),
        ({"decay": math.nan}, "decay must lie between 0 and 1, got nan"),
        ({"rate": -0.5}, r"rate must be finite and not negative, got -0\.5"),
        ({"rate": math.inf}, "rate must be finite and not negative, got inf"),
        ({"inner_steps": 0}, "inner_steps must be a whole number from 1 to 10,000, got 0"),
        ({"inner_steps": 1.5}, r"inner_steps must be a whole number from 1 to 10,000, got 1\.5"),
        ({"inner_steps": 2**32 + 1}, "inner_steps must be a whole number .*, got 4294967297"),
        ({"nonlinearity": "sigmoid"}, "nonlinearity must be one of relu, tanh, got 'sigmoid'"),
        ({"identity_scale": math.nan}, "identity_scale must be finite, got nan"),
        ({"impl": "gpu"}, "impl must be one of auto, reference, cpu, triton, got 'gpu'"),
    ],
)
def test_what_no_layer_can_have_is_refused(maker, options, message):
    with pytest.raises(ValueError, match=message):
        maker(**{"input_size": 3, "hidden_size": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"dropout": 1.5}, r"dropout must lie between 0 and 1, got 1\.5"),
    ],
)
def test_what_the_layer_alone_can_get_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        nn.FastWeightsRNN(3, 4, **options)


def test_dropout_of_a_single_layer_warns_as_torch_does():
    with pytest.warns(UserWarning, match=r"dropout=0\.5 acts between layers and does nothing with num_layers=1"):
        nn.FastWeightsRNN(3, 4, dropout=0.5)


LAYER = nn.FastWeightsRNN(3, 4)
STATE = nn.FastWeightsState(torch.zeros(2, 4), torch.zeros(2, 4, 4))


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(5, 2, 9), {}, ValueError, r"\[T,B,D\] or \[T,D\] with D = input_size = 3, got shape \(5, 2, 9\)"),
        (torch.zeros(3), {}, ValueError, r"got shape \(3,\)"),
        (torch.zeros(0, 2, 3), {}, ValueError, r"x of shape \(0, 2, 3\) has no time steps: give at least one"),
        (torch.zeros(0, 3), {}, ValueError, r"x of shape \(0, 3\) has no time steps"),
        (
            torch.zeros(5, 3, 3),
            {"state": STATE},
            ValueError,
            r"state\.hidden must have shape \(3, 4\) for this x, got \(2, 4\)",
        ),
        (
            torch.zeros(5, 2, 3),
            {"state": (torch.zeros(2, 4), torch.zeros(2, 4))},
            ValueError,
            r"state\.memory must have shape \(2, 4, 4\) for this x, got \(2, 4\)",
        ),
        (torch.zeros(5, 3), {"state": STATE}, ValueError, r"state\.hidden must have shape \(4,\) for this x"),
        (
            torch.zeros(5, 2, 3),
            {"lengths": torch.tensor([5, 6])},
            ValueError,
            "between 0 and the 5 steps of x, got 5 to 6",
        ),
        (torch.zeros(5, 2, 3), {"lengths": torch.tensor([-1, 5])}, ValueError, "got -1 to 5"),
        (torch.zeros(5, 2, 3), {"lengths": torch.tensor([5])}, ValueError, r"each of the 2 sequences, got \(1,\)"),
        (
            torch.zeros(5, 2, 3),
            {"lengths": torch.tensor([5.0, 1.0])},
            TypeError,
            r"must be integers, got torch\.float32",
        ),
        (
            torch.zeros(5, 2, 3),
            {"lengths": [5, 2]},
            TypeError,
            r"must be a tensor of integers, got a list: torch\.tensor",
        ),
        (
            pack_sequence([torch.zeros(4, 3)]),
            {"lengths": torch.tensor([4])},
            TypeError,
            "a PackedSequence has its own lengths",
        ),
        (pack_sequence([torch.zeros(4, 2)]), {}, ValueError, "packed from sequences with D = input_size = 3"),
    ],
)
def test_input_that_does_not_fit_is_refused_and_nothing_changes(x, options, error, message):
    before = {name: tensor.clone() for name, tensor in LAYER.state_dict().items()}
    with pytest.raises(error, match=message):
        LAYER(x, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in LAYER.state_dict().items())
    assert torch.equal(STATE.hidden, torch.zeros(2, 4))


def test_a_state_of_one_layer_does_not_fit_two():
    with pytest.raises(ValueError, match=r"state\.hidden must have shape \(2, 2, 4\) for this x, got \(2, 4\)"):
        nn.FastWeightsRNN(3, 4, num_layers=2)(torch.zeros(5, 2, 3), STATE)


@pytest.mark.parametrize(
    ("x", "state", "message"),
    [
        (torch.zeros(2, 9), None, r"x must be \[B,D\] or \[D\] with D = 3, got shape \(2, 9\)"),
        (torch.zeros(5, 2, 3), None, r"got shape \(5, 2, 3\)"),
        (torch.zeros(3, 3), STATE, r"state\.hidden must have shape \(3, 4\)"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(x, state, message):
    with pytest.raises(ValueError, match=message):
        nn.FastWeightsRNNCell(3, 4)(x, state)


def test_asking_for_a_kernel_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setattr("fastweights.ops._library.MISSING", "it was not built")
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but it was not built"):
        nn.FastWeightsRNN(3, 4, impl="cpu")(torch.zeros(5, 2, 3))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match="impl='triton' was asked for"):
        nn.FastWeightsRNN(3, 4, impl="triton")(torch.zeros(5, 2, 3))
