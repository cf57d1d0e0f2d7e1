"""The laws of `strengths` and `clears`: a layer that is told when to store, as in section 4.2 of Ba et al. 2016."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fastweights import nn

from ..laws import INPUT_SIZE, KERNELS, LAYERS, Layer, leaves, map_state
from .test_laws import assert_same, example, inputs
from .test_starts import LENGTHS, STARTS

GENERATOR = torch.Generator().manual_seed(3)
STRENGTHS = torch.rand(6, 4, dtype=torch.float64, generator=GENERATOR) * torch.tensor([[2], [0], [1], [1], [0], [1]])
CLEARS = torch.rand(6, 4, generator=GENERATOR) < 0.4
CONTROL = {"strengths": STRENGTHS, "clears": CLEARS}


def each(*, options: bool = True) -> pytest.MarkDecorator:
    chosen = [law for law in LAYERS if str(law).startswith("fast weights") and law.starts]
    chosen = [law for law in chosen if options or "," not in str(law)]
    unbuilt = pytest.mark.skipif(not KERNELS, reason="the kernels are not built")
    return pytest.mark.parametrize(
        "law", [pytest.param(law, marks=[unbuilt] * law.needs_kernel) for law in chosen], ids=str
    )


@pytest.mark.parametrize("layer_norm", [True, False])
def test_it_is_what_cells_give_with_another_memory_and_without_slow_weights(layer_norm: bool) -> None:
    """A(t) = decay A(t-1) + strength rate h h^T is a cell's write into a memory that has the rest already."""
    options: dict[str, Any] = {"rate": 0.3, "layer_norm": layer_norm, "dtype": torch.float64}
    layer = nn.FastWeightsRNN(INPUT_SIZE, 5, **options)
    slow, cleared = (nn.FastWeightsRNNCell(INPUT_SIZE, 5, **options) for _ in range(2))
    slow.load_state_dict(layer.state_dict())
    cleared.load_state_dict(layer.state_dict() | {"weight_hh": torch.zeros(5, 5)})
    x = inputs()
    y, end = layer(x, **CONTROL)
    decay, rate = layer.constants.decay, layer.constants.rate
    state = nn.FastWeightsState(torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 5, 5, dtype=torch.float64))
    for step, strength, clear, expected in zip(x, STRENGTHS, CLEARS, y, strict=True):
        rest = (strength - 1).view(-1, 1, 1) * rate / decay * state.hidden.unsqueeze(2) * state.hidden.unsqueeze(1)
        state = nn.FastWeightsState(state.hidden, state.memory + rest)
        kept, forgotten = slow(step, state), cleared(step, state)
        hidden = torch.where(clear.unsqueeze(1), forgotten[0], kept[0])
        assert_same(hidden, expected)
        state = nn.FastWeightsState(hidden, kept[1].memory)
    assert_same(state, end)


@each()
def test_ones_and_no_clears_are_as_none_given(law: Layer) -> None:
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    control = {
        "strengths": torch.ones(6, 4),
        "clears": torch.zeros(6, 4).bool(),
    }  # float32, taken in the weights' dtype
    for mine, theirs in zip(layer(x, start, **control), layer(x, start), strict=True):
        assert_same(mine, theirs)


@each()
@pytest.mark.parametrize("pieces", [[1] * 6, [2, 1, 3]])
def test_streaming_in_pieces_equals_the_whole(law: Layer, pieces: list[int]) -> None:
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start, starts=STARTS, **CONTROL)
    state, outputs = start, []
    for piece, *control in zip(*(part.split(pieces) for part in (x, STARTS, STRENGTHS, CLEARS)), strict=True):
        y, state = layer(piece, state, **dict(zip(("starts", "strengths", "clears"), control, strict=True)))
        outputs.append(y)
    assert_same(torch.cat(outputs), whole)
    assert_same(state, end)


@each()
def test_sequences_with_lengths_are_as_alone_and_padding_is_not_read(law: Layer) -> None:
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    strengths = STRENGTHS.clone()
    for index, length in enumerate(LENGTHS.tolist()):
        strengths[length:, index] = torch.nan
    strengths.requires_grad_()
    y, end = layer(x, start, lengths=LENGTHS, strengths=strengths, clears=CLEARS)
    for index, length in enumerate(LENGTHS.tolist()):
        if length:
            alone = {name: control[:length, index : index + 1] for name, control in CONTROL.items()}
            expected, expected_end = layer(x[:length, index : index + 1], example(start, layer, index), **alone)
            assert_same(y[:length, index], expected[:, 0])
            assert_same(example(end, layer, index), expected_end)
    (gradient,) = torch.autograd.grad(y.sum() + sum(leaf.sum() for leaf in leaves(end)), strengths)
    past = torch.arange(6).unsqueeze(1) >= LENGTHS
    assert gradient.isfinite().all()
    assert (gradient[past] == 0).all()
    if law.lengths:
        packed = pack_padded_sequence(x, LENGTHS.clamp(min=1), enforce_sorted=False)
        y, _ = layer(packed, start, **CONTROL)
        assert isinstance(y, PackedSequence)
        again, _ = layer(x, start, lengths=LENGTHS.clamp(min=1), **CONTROL)
        assert_same(y.data, pack_padded_sequence(again, LENGTHS.clamp(min=1), enforce_sorted=False).data)


@each()
def test_batch_first_and_unbatched_agree_with_the_batch(law: Layer) -> None:
    layer, batch_first = law.build(dtype=torch.float64), law.build(dtype=torch.float64, batch_first=True)
    x = inputs()
    whole, end = layer(x, **CONTROL)
    y, state = batch_first(x.transpose(0, 1), **{name: control.t() for name, control in CONTROL.items()})
    assert_same(y.transpose(0, 1), whole)
    assert_same(state, end)
    for form in (layer, batch_first):
        alone, _ = form(x[:, 1], **{name: control[:, 1] for name, control in CONTROL.items()})
        assert_same(alone, whole[:, 1])


@each(options=False)
def test_gradients_and_their_gradients_against_differences(law: Layer) -> None:
    layer = law.build(dtype=torch.float64)
    start = map_state(lambda leaf: leaf.clone().requires_grad_(), law.random_state(layer, 2))

    def run(x: Tensor, strengths: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        y, end = layer(x, state, strengths=strengths, clears=CLEARS[:3, :2])
        return (y, *leaves(end))

    tensors = (inputs(steps=3, batch=2).requires_grad_(), STRENGTHS[2:5, :2].clone().requires_grad_(), *leaves(start))
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


def test_autocast_and_functional_gradients() -> None:
    layer, x = nn.FastWeightsRNN(INPUT_SIZE, 5), inputs(dtype=torch.float32)
    expected, _ = layer(x, **CONTROL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x, strengths=STRENGTHS.bfloat16(), clears=CLEARS)
    assert (y.dtype, state.memory.dtype) == (torch.bfloat16, torch.float32)
    assert (y.float() - expected).norm() <= 0.05 * expected.norm()

    def loss(x: Tensor, strengths: Tensor, clears: Tensor) -> Tensor:
        control = {"strengths": strengths.unsqueeze(1), "clears": clears.unsqueeze(1)}
        squares: Tensor = layer(x.unsqueeze(1), **control)[0].pow(2).sum()
        return squares

    each_gradient = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(1, 1, 1))(x, STRENGTHS, CLEARS)
    strengths = STRENGTHS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(x, strengths=strengths, clears=CLEARS)[0].pow(2).sum(), strengths)
    torch.testing.assert_close(each_gradient.t(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # seconds of compiling
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, and hides the warning from users
@each(options=False)
def test_compiled_without_a_graph_break_it_gives_the_same(law: Layer) -> None:
    torch.compiler.reset()
    layer, x = law.build(dtype=torch.float64), inputs()
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        strengths = STRENGTHS.clone().requires_grad_()
        y, end = run(x, strengths=strengths, clears=CLEARS)
        (gradient,) = torch.autograd.grad(y.pow(2).sum() + end.memory.sin().sum(), strengths)
        results.append([y, *leaves(end), gradient])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("control", "error", "message"),
    [
        ({"strengths": torch.zeros(2, 5)}, ValueError, r"strengths must be \[T,B\] of the steps of x, \(5, 2\)"),
        ({"strengths": torch.ones(5, 2).bool()}, TypeError, r"strengths must be floating point, got torch\.bool: stre"),
        ({"strengths": 0.5}, TypeError, r"strengths must be a tensor of floating point, got a float: torch\.as_tensor"),
        ({"clears": torch.ones(5, 2)}, TypeError, r"clears must be torch\.bool, got torch\.float32: clears\.bool\(\)"),
        ({"clears": torch.ones(5).bool()}, ValueError, r"clears must be \[T,B\] of the steps of x, \(5, 2\)"),
    ],
)
def test_a_control_that_does_not_fit_is_refused(control, error, message) -> None:
    with pytest.raises(error, match=message):
        nn.FastWeightsRNN(INPUT_SIZE, 5)(torch.zeros(5, 2, INPUT_SIZE), **control)
