"""Layers and networks in ONNX: what onnxruntime answers, for other batches and other numbers of steps."""

from collections.abc import Callable

import pytest
import torch
from torch.export import Dim

from fastweights import few_shot, nn
from tests.laws import INPUT_SIZE, LAYERS, leaves

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

STEPS, BATCH = Dim("steps"), Dim("batch")
# An export takes seconds: all but a few are left to the slow tests.
FEW = ("fast weights", "fast weight programmer")
# The graph is that of the reference, whatever a layer computes by.
RECURRENT = [
    layer for layer in LAYERS if not layer.needs_kernel and "cell" not in layer.name and "reference" not in layer.name
]


def export(module, arguments, shapes):
    """A session of onnxruntime, and the kinds of nodes in the graph."""
    program = torch.onnx.export(module.eval(), arguments, dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    model = program.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(model, options), [node.op_type for node in program.model_proto.graph.node]


def assert_same(session, module, arguments, tolerance=1e-5):
    with torch.no_grad():
        wanted = [*torch.utils._pytree.tree_leaves(module(*arguments))]
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, dict(zip(names, (tensor.numpy() for tensor in arguments), strict=True)))
    for ours, theirs in zip(wanted, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=tolerance, rtol=tolerance)


class Streaming(torch.nn.Module):
    """A layer whose state is given and returned as tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *state):
        state = state[0] if isinstance(self.layer, nn.IRNN) else state
        y, end = self.layer(x, state)
        return y, *leaves(end)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(each, marks=[] if each.name in FEW else [pytest.mark.slow], id=each.name) for each in RECURRENT],
)
def test_a_layer_answers_in_onnx_for_any_batch_and_any_number_of_steps(layer):
    module = Streaming(layer.build())
    axis = 1 if isinstance(module.layer, nn.IRNN) else module.layer._batch_axis

    def arguments(steps, batch):
        return torch.randn(steps, batch, INPUT_SIZE), *leaves(layer.random_state(module.layer, batch))

    given = arguments(4, 2)
    shapes = {"x": {0: STEPS, 1: BATCH}, "state": tuple({axis: BATCH} for _ in given[1:])}
    session, kinds = export(module, given, shapes)
    assert kinds.count("Scan") == 1
    # A normalised recurrence enlarges rounding: PyTorch itself is up to 1.4e-4 from its double precision in 200 draws.
    for steps, batch in ((4, 2), (9, 3), (1, 1)):
        assert_same(session, module, arguments(steps, batch), tolerance=1e-3)


class WithLengths(torch.nn.Module):
    """A layer that is told lengths and starts, batch first and without a state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.FastWeightsRNN(3, 5, batch_first=True)

    def forward(self, x, lengths, starts):
        y, end = self.layer(x, lengths=lengths, starts=starts)
        return y, *end


@pytest.mark.slow
def test_lengths_and_starts_are_inputs_of_the_graph():
    module = WithLengths()

    def arguments(batch, steps):
        lengths = torch.arange(batch) % (steps + 1)
        return torch.randn(batch, steps, 3), lengths, torch.rand(batch, steps) < 0.3

    shapes = {"x": {0: BATCH, 1: STEPS}, "lengths": {0: BATCH}, "starts": {0: BATCH, 1: STEPS}}
    session, _ = export(module, arguments(2, 4), shapes)
    for batch, steps in ((2, 4), (5, 7)):
        assert_same(session, module, arguments(batch, steps))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_layers": 2}, id="plain"),
        pytest.param({"layer_norm": True, "hebbian": {}}, marks=pytest.mark.slow, id="normed"),
    ],
)
def test_a_language_model_answers_in_onnx(options):
    module = Streaming(nn.LSTMLanguageModel(20, 4, 6, **options))
    layers = module.layer.num_layers

    def arguments(steps, batch):
        return torch.randint(20, (steps, batch)), torch.randn(layers, batch, 6), torch.randn(layers, batch, 6)

    session, kinds = export(module, arguments(4, 2), {"x": {0: STEPS, 1: BATCH}, "state": ({1: BATCH}, {1: BATCH})})
    assert kinds.count("Scan") == layers
    for steps, batch in ((4, 2), (9, 3)):
        assert_same(session, module, arguments(steps, batch))


class Texts(torch.nn.Module):
    """A language model that is told lengths and starts, without a state."""

    def __init__(self):
        super().__init__()
        self.model = nn.LSTMLanguageModel(20, 4, 6)

    def forward(self, tokens, lengths, starts):
        logits, end = self.model(tokens, lengths=lengths, starts=starts)
        return logits, *end


@pytest.mark.slow
def test_lengths_and_starts_of_texts_are_inputs_of_the_graph():
    module = Texts()

    def arguments(steps, batch):
        lengths = torch.arange(batch) % (steps + 1)
        return torch.randint(20, (steps, batch)), lengths, torch.rand(steps, batch) < 0.3

    shapes = {"tokens": {0: STEPS, 1: BATCH}, "lengths": {0: BATCH}, "starts": {0: STEPS, 1: BATCH}}
    session, _ = export(module, arguments(4, 2), shapes)
    for steps, batch in ((4, 2), (7, 5)):
        assert_same(session, module, arguments(steps, batch))


HEADS: dict[str, Callable[[int], torch.nn.Module]] = {
    "hebbian": lambda features: few_shot.FastWeightsHead(features, 5),
    "matching": lambda features: few_shot.MatchingHead(5),
    "prototypes": lambda features: few_shot.PrototypeHead(5),
}


@pytest.mark.parametrize(
    "head", ["hebbian", *(pytest.param(name, marks=pytest.mark.slow) for name in ("matching", "prototypes"))]
)
def test_a_few_shot_network_describes_and_predicts_in_onnx(head):
    encoder = few_shot.ConvEncoder(1, 8, size=12, blocks=2)
    module = few_shot.FewShotNetwork(encoder, HEADS[head](encoder.features))

    def arguments(tasks, described, asked):
        count = tasks * (described + asked)
        index = torch.arange(count).view(tasks, -1)
        labels = torch.arange(described).expand(tasks, -1).clone() % 5
        return torch.rand(count, 1, 12, 12), index[:, :described].clone(), labels, index[:, described:].clone()

    tasks, described = Dim("tasks"), Dim("described")
    shapes = {
        "examples": {0: Dim("examples")},
        "description": {0: tasks, 1: described},
        "labels": {0: tasks, 1: described},
        "queries": {0: tasks, 1: Dim("asked")},
    }
    session, _ = export(module, arguments(2, 5, 3), shapes)
    for sizes in ((2, 5, 3), (3, 10, 4)):
        assert_same(session, module, arguments(*sizes))


@pytest.mark.parametrize(
    "module",
    [
        nn.FastWeightsRNN(3, 5),
        pytest.param(nn.GatedFastWeightsRNN(3, 5), marks=pytest.mark.slow),
        pytest.param(nn.DeltaFastWeightsRNN(3, 4), marks=pytest.mark.slow),
        pytest.param(nn.FastWeightProgrammer(3, 3, key_size=2, value_size=2), marks=pytest.mark.slow),
        pytest.param(nn.AssociativeLSTM(3, 6), marks=pytest.mark.slow),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_exported_program_of_torch_takes_any_batch(module):
    x = torch.randn(4, 2, 3)
    with torch.no_grad():
        program = torch.export.export(module.eval(), (x,), dynamic_shapes={"x": {1: BATCH}})
        x = torch.randn(4, 7, 3)
        torch.testing.assert_close(program.module()(x)[0], module(x)[0], atol=1e-5, rtol=1e-5)


def test_a_language_model_is_exported_by_torch():
    model = nn.LSTMLanguageModel(20, 4, 6).eval()
    program = torch.export.export(model, (torch.randint(20, (2, 2)),), dynamic_shapes={"tokens": {1: BATCH}})
    tokens = torch.randint(20, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(tokens)[0], model(tokens)[0], atol=1e-5, rtol=1e-5)
