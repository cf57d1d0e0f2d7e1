"""What every recurrent layer of the registry must obey."""

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from fastweights import nn

from ..laws import INPUT_SIZE, KERNELS, LAYERS, Layer, leaves, map_state

LENGTHS = torch.tensor([4, 1, 6, 2])  # whose order and its inverse differ


def each(
    *, ours: bool = False, lengths: bool = False, options: bool = True, slow_options: bool = False
) -> pytest.MarkDecorator:
    """The layers that support what the law needs, each with its options too: `slow_options` in the slow tier alone."""
    chosen = [law for law in LAYERS if law.ours >= ours and law.lengths >= lengths and (options or "," not in str(law))]
    marked = []
    for law in chosen:
        marks = [pytest.mark.slow] if slow_options and "," in str(law) else []
        if law.needs_kernel and not KERNELS:
            marks.append(pytest.mark.skip(reason="the kernels are not built"))
        marked.append(pytest.param(law, marks=marks))
    return pytest.mark.parametrize("law", marked, ids=str)


def inputs(steps=6, batch=4, dtype=torch.float64, seed=1):
    return torch.randn(steps, batch, INPUT_SIZE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_same(first, second, tolerance=1e-12):
    pairs = list(zip(leaves(first), leaves(second), strict=True))
    assert pairs
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def batch_axis(state_leaf: Tensor, layer: torch.nn.Module) -> int:
    """Where a state's tensor has its batch: behind the layer axis where there is one."""
    stacked = isinstance(layer, torch.nn.RNN) or getattr(layer, "num_layers", 1) > 1
    return 1 if stacked else 0


def example(state, layer: torch.nn.Module, index: int):
    """The state of one example, as a batch of one."""
    return map_state(lambda leaf: leaf.narrow(batch_axis(leaf, layer), index, 1), state)


@each()
@pytest.mark.parametrize("pieces", [[1, 5], [5, 1], [2, 2, 2], [1] * 6])
def test_streaming_in_pieces_equals_the_whole(law: Layer, pieces):
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start)
    state, outputs = start, []
    for piece in x.split(pieces):
        y, state = layer(piece, state)
        outputs.append(y)
    assert_same(torch.cat(outputs), whole)
    assert_same(state, end)


@each(lengths=True)
def test_streaming_ragged_sequences_in_pieces_equals_the_whole(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start, lengths=LENGTHS)
    first, middle = layer(x[:3], start, lengths=LENGTHS.clamp(max=3))
    second, state = layer(x[3:], middle, lengths=(LENGTHS - 3).clamp(min=0))
    assert_same(torch.cat([first, second]), whole)
    assert_same(state, end)


@each()
def test_an_example_does_not_depend_on_its_batch(law: Layer):
    layer, x = law.build(dtype=torch.float32), inputs(batch=40, dtype=torch.float32)
    start = law.random_state(layer, 40)
    whole, end = layer(x, start)
    for index in (0, 7, 39):
        own = example(start, layer, index)
        alone, alone_end = layer(x[:, index : index + 1], own)
        # A layer norm of numbers that are nearly equal multiplies their rounding.
        assert_same(alone, whole[:, index : index + 1], tolerance=1e-5)
        expected = example(end, layer, index)
        assert_same(alone_end, expected, tolerance=1e-5)


@each()
def test_other_examples_of_the_batch_cannot_be_seen(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs()
    whole, end = layer(x)
    spoilt = x.clone()
    spoilt[:, 2] = torch.nan
    y, state = layer(spoilt)
    others = torch.tensor([0, 1, 3])
    assert torch.equal(y[:, others], whole[:, others])
    assert y[:, 2].isnan().all()  # and NaN is passed on, not hidden
    for mine, theirs in zip(leaves(state), leaves(end), strict=True):
        axis = batch_axis(mine, layer)
        assert torch.equal(mine.index_select(axis, others), theirs.index_select(axis, others))


@each()
def test_batch_first_and_unbatched_agree_with_the_batch(law: Layer):
    layer, batch_first = law.build(dtype=torch.float64), law.build(dtype=torch.float64, batch_first=True)
    x = inputs()
    start = law.random_state(layer, 4)
    whole, end = layer(x, start)
    y, state = batch_first(x.transpose(0, 1), start)
    assert_same(y.transpose(0, 1), whole)
    assert_same(state, end)
    own = map_state(lambda leaf: leaf.select(batch_axis(leaf, layer), 1), start)
    for form in (layer, batch_first):
        alone, alone_end = form(x[:, 1], own)
        assert_same(alone, whole[:, 1])
        assert_same(alone_end, map_state(lambda leaf: leaf.select(batch_axis(leaf, layer), 1), end))


@each(lengths=True)
def test_outputs_past_a_length_are_zero_and_the_state_is_of_the_last_valid_step(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    padded = x.clone()
    for index, length in enumerate(LENGTHS.tolist()):
        padded[length:, index] = torch.nan  # whatever lies there
    y, state = layer(padded, start, lengths=LENGTHS)
    for index, length in enumerate(LENGTHS.tolist()):
        own = example(start, layer, index)
        alone, alone_end = layer(x[:length, index : index + 1], own)
        assert_same(y[:length, index], alone[:, 0])
        assert torch.equal(y[length:, index], torch.zeros_like(y[length:, index]))
        assert_same(example(state, layer, index), alone_end)


@each(lengths=True)
def test_a_length_of_zero_leaves_the_state_as_it_was(law: Layer):
    layer = law.build(dtype=torch.float64)
    start = law.random_state(layer, 4)
    y, state = layer(inputs(), start, lengths=torch.zeros(4, dtype=torch.long))
    assert torch.equal(y, torch.zeros_like(y))
    assert_same(state, start)


@each(ours=True)
def test_a_batch_of_no_examples_gives_none(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs(batch=0).requires_grad_()
    ragged = [{"lengths": torch.zeros(0, dtype=torch.int64)}] if law.lengths else []
    for options in [{}, *ragged]:
        y, state = layer(x, **options)
        again, _ = layer(x, state, **options)
        assert y.shape == again.shape == (6, 0, law.hidden_size)
        assert all(leaf.shape[batch_axis(leaf, layer)] == 0 for leaf in leaves(state))
        gradients = torch.autograd.grad((y.sum(), again.sum()), [x, *layer.parameters()], allow_unused=True)
        assert not any(gradient is not None and gradient.any() for gradient in gradients)
        with torch.no_grad():
            assert layer(x, **options)[0].shape == y.shape


@each(ours=True)
def test_a_state_of_another_dtype_is_taken_in_that_of_the_weights(law: Layer):
    layer, x = law.build(dtype=torch.float32), inputs(dtype=torch.float32)
    start = map_state(lambda leaf: leaf.bfloat16(), law.random_state(layer, 4))
    y, state = layer(x, start)
    expected, end = layer(x, map_state(lambda leaf: leaf.float(), start))
    assert_same(y, expected, 1e-6)
    assert_same(state, end, 1e-6)


@each(lengths=True)
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_gives_one_with_the_same_order(law: Layer, enforce_sorted):
    layer, x = law.build(dtype=torch.float64), inputs()
    lengths = LENGTHS.sort(descending=True).values if enforce_sorted else LENGTHS
    expected, end = layer(x, lengths=lengths)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    y, state = layer(packed)
    assert isinstance(y, PackedSequence)
    again = pack_padded_sequence(expected, lengths, enforce_sorted=enforce_sorted)
    assert_same(y.data, again.data)
    assert torch.equal(y.batch_sizes, packed.batch_sizes)
    for mine, theirs in ((y.sorted_indices, packed.sorted_indices), (y.unsorted_indices, packed.unsorted_indices)):
        assert (mine is None) == (theirs is None) == enforce_sorted
        assert mine is None or (theirs is not None and torch.equal(mine, theirs))
    assert_same(state, end)


@each(lengths=True)
def test_a_batch_first_layer_takes_packed_sequences(law: Layer):
    layer, batch_first = law.build(dtype=torch.float64), law.build(dtype=torch.float64, batch_first=True)
    packed = pack_sequence([inputs(batch=1)[:, 0], inputs(steps=2, batch=1)[:, 0]])
    assert_same(batch_first(packed)[0].data, layer(packed)[0].data)


@each(slow_options=True)
def test_gradients_of_inputs_parameters_and_initial_state(law: Layer):
    layer = law.build(dtype=torch.float64)
    x = inputs(steps=3, batch=2).requires_grad_()
    start = map_state(lambda leaf: leaf.clone().requires_grad_(), law.random_state(layer, 2))
    kind = type(start)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *rest: Tensor):
        count = len(leaves(start))
        state = rest[0] if isinstance(start, Tensor) else kind(*rest[:count])
        parameters = dict(zip(names, rest[count:], strict=True))
        y, end = torch.func.functional_call(layer, parameters, (x, state))
        return (y, *leaves(end))

    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *leaves(start), *parameters))


@each(lengths=True)
def test_gradients_with_lengths(law: Layer):
    layer = law.build(dtype=torch.float64)
    x = inputs(steps=4, batch=3).requires_grad_()
    lengths = torch.tensor([4, 0, 2])

    parameters = dict(layer.named_parameters())
    name = "weight_hh" if "weight_hh" in parameters else next(iter(parameters))

    def run(x: Tensor, weight: Tensor):
        y, end = torch.func.functional_call(layer, {name: weight}, (x,), {"lengths": lengths})
        return (y, *leaves(end))

    weight = parameters[name].detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weight))
    (gradient,) = torch.autograd.grad(run(x, weight)[0].sum(), x)
    assert torch.equal(gradient[2:, 2], torch.zeros_like(gradient[2:, 2]))
    assert torch.equal(gradient[:, 1], torch.zeros_like(gradient[:, 1]))


@each()
def test_a_state_dict_a_copy_and_a_pickle_give_the_same_layer(law: Layer):
    layer, other, x = law.build(dtype=torch.float64), law.build(seed=1, dtype=torch.float64), inputs()
    expected = layer(x)[0]
    assert not torch.equal(other(x)[0], expected)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x)[0], expected)


@each(ours=True)
def test_autocast_computes_in_bfloat16_and_keeps_the_state_in_float32(law: Layer):
    layer, x = law.build(dtype=torch.float32), inputs(dtype=torch.float32)
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        again, _ = layer(x, state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert {leaf.dtype for leaf in leaves(state)} == {torch.float32}
    assert (y.float() - expected).norm() <= 0.05 * expected.norm()
    parameters = list(layer.parameters())
    grads = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(y.sum(), parameters)
    for grad, other in zip(grads, within, strict=True):
        assert grad.isfinite().all()
        assert (other - grad).norm() <= 0.05 * grad.norm()


@each(ours=True)
def test_autocast_leaves_float64_as_it_is(law: Layer):
    if law.needs_kernel:
        pytest.skip("the kernel has no float64")
    layer, x = law.build(dtype=torch.float64), inputs(dtype=torch.float64)
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x)
        y.sum().backward()
    assert y.dtype == torch.float64
    assert {leaf.dtype for leaf in leaves(state)} == {torch.float64}
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)


@each(ours=True)
def test_a_module_in_bfloat16_runs(law: Layer):
    if law.needs_kernel:
        pytest.skip("the kernel has no bfloat16")
    layer, x = law.build(dtype=torch.float32), inputs(dtype=torch.float32)
    expected, _ = layer(x)
    y, state = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert y.dtype == leaves(state)[0].dtype == torch.bfloat16
    assert (y.float() - expected).norm() <= 0.1 * expected.norm()


@each(ours=True)
def test_func_grad_and_vmap_give_the_gradient_of_each_example(law: Layer):
    layer = law.build(dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y, state = torch.func.functional_call(layer, parameters, (x.unsqueeze(1),))
        total: Tensor = y.pow(2).sum() + sum(leaf.sin().sum() for leaf in leaves(state))
        return total

    x = inputs(batch=3)
    each_gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(parameters, x)
    for index in range(3):
        own = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
        expected = torch.autograd.grad(loss(own, x[:, index]), list(own.values()))
        for (name, gradient), single in zip(each_gradient.items(), expected, strict=True):
            torch.testing.assert_close(gradient[index], single, rtol=1e-9, atol=1e-11, msg=name)


@each(ours=True)
def test_vmap_over_an_ensemble_of_weights(law: Layer):
    ensemble = [law.build(seed=seed, dtype=torch.float64) for seed in range(3)]
    stacked, buffers = torch.func.stack_module_state(ensemble)
    x = inputs()

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(ensemble[0], (parameters, buffers), (x,))[0]
        return y

    together = torch.func.vmap(run)(stacked, buffers)
    for index, layer in enumerate(ensemble):
        assert_same(together[index], layer(x)[0])


@pytest.mark.slow  # seconds of compiling each
@each(ours=True)
def test_compiled_without_a_graph_break_it_gives_the_same(law: Layer):
    torch.compiler.reset()  # the layers share their code: each is the first of its kind
    layer, x = law.build(dtype=torch.float64), inputs()
    start = law.random_state(layer, 4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        own = x.clone().requires_grad_()
        y, end = run(own, start)
        (y.pow(2).sum() + sum(leaf.sin().sum() for leaf in leaves(end))).backward()
        results.append((y, end, own.grad, [parameter.grad for parameter in layer.parameters()]))
    (y, end, grad, grads), (y2, end2, grad2, grads2) = results
    assert_same(y2, y)
    assert_same(end2, end)
    torch.testing.assert_close(grad2, grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grads2, grads, rtol=1e-10, atol=1e-12)


@pytest.mark.slow  # a minute of compiling, of which the test before has the most telling half
@each(ours=True, options=False)
def test_compiled_it_runs_where_nothing_is_differentiated(law: Layer):
    torch.compiler.reset()
    layer, x = law.build(dtype=torch.float64), inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = layer(x)[0]
    torch.testing.assert_close(compiled(x)[0], expected, rtol=1e-12, atol=1e-12)  # trained, then evaluated
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(x)[0], expected.detach(), rtol=1e-12, atol=1e-12)
    layer.requires_grad_(False)
    torch.testing.assert_close(compiled(x)[0], expected.detach(), rtol=1e-12, atol=1e-12)


@each(lengths=True)
def test_padding_reaches_no_gradient(law: Layer):
    layer = law.build(dtype=torch.float64)
    results = []
    for padding in (0.0, torch.nan):
        x = inputs()
        for index, length in enumerate(LENGTHS.tolist()):
            x[length:, index] = padding
        y, state = layer(x, lengths=LENGTHS)
        loss = y.pow(2).sum() + sum(leaf.sum() for leaf in leaves(state))
        results.append(torch.autograd.grad(loss, list(layer.parameters())))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@each()
def test_a_detached_state_cuts_the_graph(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs().requires_grad_()
    _, state = layer(x)
    assert all(leaf.requires_grad for leaf in leaves(state))
    assert not any(leaf.requires_grad for leaf in leaves(state.detach()))
    assert_same(state.detach(), map_state(Tensor.detach, state))


@each(ours=True)
def test_a_state_is_kept_moved_and_shown(law: Layer, tmp_path):
    layer = law.build(dtype=torch.float64)
    with torch.no_grad():
        state = layer(inputs())[1]
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")  # weights_only
    narrow = state.to(torch.float32)
    meta = state.to("meta")
    for other in (loaded, narrow, meta):
        assert type(other) is type(state)
    assert_same(loaded, state, tolerance=0)
    assert_same(narrow, map_state(Tensor.float, state), tolerance=0)
    assert {leaf.device.type for leaf in meta} == {"meta"}
    assert (
        repr(state)
        == f"{type(state).__name__}("
        + ", ".join(f"{name}=float64 {list(leaf.shape)}" for name, leaf in zip(state._fields, state, strict=True))
        + ")"
    )


@each(ours=True)
def test_outputs_and_state_share_no_memory(law: Layer):
    layer = law.build(dtype=torch.float64)
    with torch.no_grad():
        y, state = layer(inputs())
        before = [leaf.clone() for leaf in leaves(state)]
        y.zero_()
    for leaf, kept in zip(leaves(state), before, strict=True):
        assert torch.equal(leaf, kept)


@each(ours=True)
def test_a_plain_tuple_is_a_state_and_one_that_does_not_fit_is_refused(law: Layer):
    layer, x = law.build(dtype=torch.float64), inputs()
    state = layer(x)[1]
    assert torch.equal(layer(x, tuple(state))[0], layer(x, state)[0])
    for index, (name, leaf) in enumerate(zip(state._fields, state, strict=True)):
        wrong = list(state)
        shape, fewer = re.escape(str(tuple(leaf.shape))), leaf.narrow(batch_axis(leaf, layer), 0, 1)
        wrong[index] = fewer
        got = re.escape(str(tuple(fewer.shape)))
        with pytest.raises(ValueError, match=rf"^state\.{name} must have shape {shape} for this x, got {got}$"):
            layer(x, tuple(wrong))
        wrong[index] = None
        with pytest.raises(TypeError, match=rf"^state\.{name} must be a tensor of shape {shape}, got None$"):
            layer(x, tuple(wrong))
    with pytest.raises(ValueError, match=r"^state\..* must have shape .* for this x"):
        layer(x[:, 0], state)
    kind, parts = (
        type(state),
        ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in zip(state._fields, state, strict=True)),
    )
    for wrong_state, got in ((state[0], "a Tensor"), ((*state, state[0]), f"a tuple of {len(state) + 1}")):
        with pytest.raises(
            TypeError, match=rf"^state must be a {kind.__name__} for this x, {re.escape(parts)}, got {got}$"
        ):
            layer(x, wrong_state)


@each(lengths=True)
@pytest.mark.parametrize(
    ("x", "lengths", "error", "message"),
    [
        (
            torch.zeros(5, 2, 9),
            None,
            ValueError,
            r"\[T,B,D\] or \[T,D\] with D = input_size = 3, got shape \(5, 2, 9\)",
        ),
        (torch.zeros(3), None, ValueError, r"got shape \(3,\)"),
        (torch.zeros(0, 2, 3), None, ValueError, r"x of shape \(0, 2, 3\) has no time steps: give at least one"),
        (torch.zeros(0, 3), None, ValueError, r"x of shape \(0, 3\) has no time steps"),
        (torch.zeros(5, 2, 3), torch.tensor([5, 6]), ValueError, "between 0 and the 5 steps of x, got 5 to 6"),
        (torch.zeros(5, 2, 3), torch.tensor([-1, 5]), ValueError, "got -1 to 5"),
        (torch.zeros(5, 2, 3), torch.tensor([5]), ValueError, r"each of the 2 sequences, got \(1,\)"),
        (torch.zeros(5, 2, 3), torch.tensor([5.0, 1.0]), TypeError, r"must be integers, got torch\.float32"),
        (torch.zeros(5, 2, 3), [5, 2], TypeError, r"must be a tensor of integers, got a list: torch\.tensor"),
        (pack_sequence([torch.zeros(4, 3)]), torch.tensor([4]), TypeError, "a PackedSequence has its own lengths"),
        (pack_sequence([torch.zeros(4, 2)]), None, ValueError, "packed from sequences with D = input_size = 3"),
    ],
)
def test_input_that_does_not_fit_is_refused(law: Layer, x, lengths, error, message):
    layer = law.build()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(error, match=message):
        layer(x, lengths=lengths)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@each(ours=True)
def test_inputs_of_another_kind_or_dtype_are_refused(law: Layer):
    layer, x = law.build(), inputs(dtype=torch.float32)
    for wrong, message in (
        (
            x.double(),
            r"x must have the dtype of the weights, torch\.float32, got torch\.float64: x\.to\(torch\.float32\)",
        ),
        (x.long(), r"x must have the dtype of the weights, torch\.float32, got torch\.int64"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(wrong)


@each(ours=True, lengths=True)
def test_inputs_that_are_no_tensor_are_refused(law: Layer):
    x = inputs(dtype=torch.float32)
    for wrong, kind in ((x.numpy(), "ndarray"), (x.tolist(), "list")):
        with pytest.raises(TypeError, match=rf"x must be a tensor or a PackedSequence, got a {kind}: torch\.as_tensor"):
            law.build()(wrong)
    with pytest.raises(TypeError, match=r"x must be a tensor, got a ndarray: torch\.as_tensor"):
        nn.FastWeightsRNNCell(INPUT_SIZE, 5)(x[0].numpy())


def test_the_state_of_another_layer_is_refused():
    """Their states have as many parts."""
    x, gated = torch.zeros(2, 3, INPUT_SIZE), nn.GatedFastWeightsRNN(INPUT_SIZE, 5)
    with pytest.raises(TypeError, match=r"^state must be a HyperLSTMState .*, got a GatedFastWeightsState of 4$"):
        nn.HyperLSTM(INPUT_SIZE, 5)(x, gated(x)[1])


@each()
def test_the_repr_names_the_sizes(law: Layer):
    assert f"{INPUT_SIZE}, {law.hidden_size}" in repr(law.build())


@pytest.mark.gpu
@each(lengths=True)
def test_a_gpu_gives_the_same_outputs_states_and_gradients(law: Layer):
    """In float64: where it has a kernel this is Triton's, and elsewhere the reference."""
    if law.needs_kernel:
        pytest.skip("the kernel is a processor's")
    layer, x = law.build(dtype=torch.float64), inputs()

    def run(device: str) -> list[Tensor]:
        moved, given = copy.deepcopy(layer).to(device), x.to(device).requires_grad_()
        y, end = moved(given, lengths=LENGTHS)
        gradients = torch.autograd.grad(y.square().sum(), [given, *moved.parameters()])
        assert all(tensor.device.type == device for tensor in (y, *leaves(end), *gradients))
        return [tensor.cpu() for tensor in (y, *leaves(end), *gradients)]

    for mine, theirs in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
