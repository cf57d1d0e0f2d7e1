"""The laws of `starts`: a sequence that restarts within a pass is as a sequence of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fastweights import nn

from ..laws import INPUT_SIZE, KERNELS, LAYERS, Layer, State, leaves, map_state
from .test_laws import assert_same, batch_axis, example, inputs

# Four sequences of six steps: two restarts, one at once, none, and one at the last step; with lengths that leave some
# of them out.
STARTS = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]).bool()
LENGTHS = torch.tensor([6, 3, 0, 4])


def each(*, ours: bool = False, lengths: bool = False, options: bool = True) -> pytest.MarkDecorator:
    chosen = [
        law
        for law in LAYERS
        if law.starts and law.ours >= ours and law.lengths >= lengths and (options or "," not in str(law))
    ]
    unbuilt = pytest.mark.skipif(not KERNELS, reason="the kernels are not built")
    return pytest.mark.parametrize(
        "law", [pytest.param(law, marks=[unbuilt] * law.needs_kernel) for law in chosen], ids=str
    )


def run_apart(law: Layer, layer: Any, x: Tensor, start: State, lengths: list[int]) -> tuple[Tensor, list[State]]:
    """Every sequence by itself: the outputs, zero past a length, and the state that each ends in."""
    outputs, ends = torch.zeros(*x.shape[:2], law.hidden_size, dtype=x.dtype), []
    for index, length in enumerate(lengths):
        state, begin = example(start, layer, index), 0
        marks = [t for t in range(length) if STARTS[t, index]]
        for mark in [*marks, length]:
            if mark > begin:
                y, state = layer(x[begin:mark, index : index + 1], state)
                outputs[begin:mark, index] = y[:, 0]
            if mark < length:
                state, begin = map_state(torch.zeros_like, state), mark
        ends.append(state)
    return outputs, ends


def total(y: Tensor, states: list[State]) -> Tensor:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    total: Tensor = (y * weights).sum() + sum(leaf.sin().sum() for state in states for leaf in leaves(state))
    return total


@each()
@pytest.mark.parametrize("ragged", [False, True])
def test_a_sequence_that_starts_anew_is_one_of_its_own(law: Layer, ragged: bool) -> None:
    if ragged and not law.lengths:
        pytest.skip("it takes no lengths")
    layer = law.build(dtype=torch.float64)
    x = inputs().requires_grad_()
    start = map_state(lambda leaf: leaf.clone().requires_grad_(), law.random_state(layer, 4))
    given = [x, *leaves(start), *layer.parameters()]
    options = {"lengths": LENGTHS} if ragged else {}
    y, end = layer(x, start, starts=STARTS, **options)
    expected, ends = run_apart(law, layer, x, start, LENGTHS.tolist() if ragged else [6] * 4)
    assert_same(y, expected)
    for index, own in enumerate(ends):
        assert_same(example(end, layer, index), own)
    gradients = torch.autograd.grad(total(y, [end]), given)
    apart = torch.autograd.grad(total(expected, ends), given)
    for mine, theirs in zip(gradients, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    for leaf, gradient in zip(leaves(start), gradients[1:], strict=False):
        assert (gradient.select(batch_axis(leaf, layer), 1) == 0).all()  # that one starts at once


@each(options=False)
def test_in_float32_too(law: Layer) -> None:
    layer, x = law.build(dtype=torch.float32), inputs(dtype=torch.float32)
    start = law.random_state(layer, 4)
    expected, _ = run_apart(law, layer, x, start, [6] * 4)
    assert (layer(x, start, starts=STARTS)[0] - expected).norm() <= 1e-6 * expected.norm()


@each()
def test_no_start_is_as_none_given_and_every_start_is_a_step_alone(law: Layer) -> None:
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    for mine, theirs in zip(layer(x, start, starts=torch.zeros(6, 4, dtype=torch.bool)), layer(x, start), strict=True):
        assert_same(mine, theirs)
    y, end = layer(x, start, starts=torch.ones(6, 4, dtype=torch.bool))
    alone, ends = layer(x.flatten(0, 1).unsqueeze(0))
    assert_same(y, alone.view_as(y))
    for mine, theirs in zip(leaves(end), leaves(ends), strict=True):
        assert_same(mine, theirs.narrow(batch_axis(theirs, layer), 20, 4))


@each()
@pytest.mark.parametrize("pieces", [[1] * 6, [2, 1, 3]])
def test_streaming_in_pieces_equals_the_whole(law: Layer, pieces: list[int]) -> None:
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start, starts=STARTS)
    state, outputs = start, []
    for piece, starts in zip(x.split(pieces), STARTS.split(pieces), strict=True):
        y, state = layer(piece, state, starts=starts)
        outputs.append(y)
    assert_same(torch.cat(outputs), whole)
    assert_same(state, end)


@each()
def test_batch_first_and_unbatched_agree_with_the_batch(law: Layer) -> None:
    layer, batch_first = law.build(dtype=torch.float64), law.build(dtype=torch.float64, batch_first=True)
    x = inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start, starts=STARTS)
    y, state = batch_first(x.transpose(0, 1), start, starts=STARTS.t())
    assert_same(y.transpose(0, 1), whole)
    assert_same(state, end)
    own = map_state(lambda leaf: leaf.select(batch_axis(leaf, layer), 0), start)
    for form in (layer, batch_first):
        alone, alone_end = form(x[:, 0], own, starts=STARTS[:, 0])
        assert_same(alone, whole[:, 0])
        assert_same(alone_end, map_state(lambda leaf: leaf.select(batch_axis(leaf, layer), 0), end))


@each(lengths=True)
def test_a_packed_sequence_takes_them_in_the_order_of_its_sequences(law: Layer) -> None:
    layer, x, lengths = law.build(dtype=torch.float64), inputs(), LENGTHS.clamp(min=1)
    expected, end = layer(x, lengths=lengths, starts=STARTS)
    y, state = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), starts=STARTS)
    assert isinstance(y, PackedSequence)
    assert_same(y.data, pack_padded_sequence(expected, lengths, enforce_sorted=False).data)
    assert_same(state, end)


@each(ours=True)
def test_nan_of_another_sequence_is_left_behind(law: Layer) -> None:
    layer = law.build(dtype=torch.float64)
    start = law.random_state(layer, 4)
    clean, clean_end = layer(inputs(), start, starts=STARTS)
    x = inputs()
    x[3, 0] = x[1, 1] = torch.nan  # before the restarts at step 4 of the second sequence, and within the first's last
    sick = map_state(lambda leaf: leaf.masked_fill(example_mask(leaf, layer, 1), torch.nan), start)
    y, end = layer(x.requires_grad_(), sick, starts=STARTS)
    assert y[3:, 0].isnan().all()
    assert y[1:4, 1].isnan().all()
    assert_same(y[4:, 1], clean[4:, 1])
    assert_same(y[:1, 1], clean[:1, 1])  # and the state that was given is not read
    assert_same(example(end, layer, 1), example(clean_end, layer, 1))
    (gradient,) = torch.autograd.grad(y[4:, 1].sum(), x)
    assert gradient[4:, 1].isfinite().all()


def example_mask(leaf: Tensor, layer: torch.nn.Module, index: int) -> Tensor:
    mask = torch.zeros_like(leaf, dtype=torch.bool)
    mask.select(batch_axis(leaf, layer), index).fill_(True)
    return mask


@each(options=False)
def test_gradients_and_their_gradients_against_differences(law: Layer) -> None:
    layer = law.build(dtype=torch.float64)
    starts = torch.tensor([[False, True], [True, False], [False, False]])
    start = map_state(lambda leaf: leaf.clone().requires_grad_(), law.random_state(layer, 2))

    def run(x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        y, end = layer(x, state[0] if isinstance(start, Tensor) else state, starts=starts)
        return (y, *leaves(end))

    tensors = (inputs(steps=3, batch=2).requires_grad_(), *leaves(start))
    assert torch.autograd.gradcheck(run, tensors)
    if law.ours:
        assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@each(ours=True, options=False)
def test_autocast_and_functional_gradients(law: Layer) -> None:
    layer, x = law.build(dtype=torch.float32), inputs(dtype=torch.float32)
    expected, _ = layer(x, starts=STARTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x, starts=STARTS)
    assert y.dtype == torch.bfloat16
    assert {leaf.dtype for leaf in leaves(state)} == {torch.float32}
    assert (y.float() - expected).norm() <= 0.05 * expected.norm()

    def loss(x: Tensor, starts: Tensor) -> Tensor:
        squares: Tensor = layer(x.unsqueeze(1), starts=starts.unsqueeze(1))[0].pow(2).sum()
        return squares

    each_gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(1, 1))(x, STARTS)
    whole = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(whole, starts=STARTS)[0].pow(2).sum(), whole)
    largest = float(expected.abs().max())  # single precision rounds what is added up to it
    torch.testing.assert_close(each_gradient.transpose(0, 1), expected, rtol=1e-4, atol=2e-5 * largest)


@pytest.mark.slow  # seconds of compiling each
@each(ours=True, options=False)
def test_compiled_without_a_graph_break_it_gives_the_same(law: Layer) -> None:
    torch.compiler.reset()
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        own = x.clone().requires_grad_()
        y, end = run(own, start, starts=STARTS)
        results.append([y, *leaves(end), *torch.autograd.grad(total(y, [end]), own)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


BAD = [
    (torch.zeros(5, 2), TypeError, r"starts must be torch\.bool, got torch\.float32: starts\.bool\(\)"),
    (torch.zeros(2, 5).bool(), ValueError, r"starts must be \[T,B\] of the steps of x, \(5, 2\), got shape \(2, 5\)"),
    (torch.zeros(5).bool(), ValueError, r"got shape \(5,\)"),
    ([[True]], TypeError, r"starts must be a tensor of bool, got a list: torch\.as_tensor\(starts\)"),
]


@each()
@pytest.mark.parametrize(("starts", "error", "message"), BAD)
def test_starts_that_do_not_fit_are_refused(law: Layer, starts, error, message) -> None:
    with pytest.raises(error, match=message):
        law.build()(torch.zeros(5, 2, INPUT_SIZE), starts=starts)


def test_the_form_of_starts_is_that_of_x() -> None:
    layer = nn.FastWeightsRNN(INPUT_SIZE, 5, batch_first=True)
    with pytest.raises(ValueError, match=r"starts must be \[B,T\] of the steps of x, \(2, 5\), got shape \(5, 2\)"):
        layer(torch.zeros(2, 5, INPUT_SIZE), starts=torch.zeros(5, 2).bool())
    with pytest.raises(ValueError, match=r"starts must be \[T\] of the steps of x, \(5,\), got shape \(5, 1\)"):
        layer(torch.zeros(5, INPUT_SIZE), starts=torch.zeros(5, 1).bool())
    packed = pack_padded_sequence(torch.zeros(3, 1, INPUT_SIZE), torch.tensor([3]))
    with pytest.raises(TypeError, match="GRU takes starts= with padded sequences alone"):
        nn.run_with_starts(torch.nn.GRU(INPUT_SIZE, 5), packed, starts=torch.zeros(3, 1).bool())  # type: ignore[arg-type]
