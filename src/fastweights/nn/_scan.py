"""Recurrences on their way to ONNX: one Scan over the steps, however many a call has."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.func import functional_call

Step = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


class _Stepper(nn.Module):
    """A step of a module as a module, so that it can be called with other weights."""

    def __init__(self, module: nn.Module, step: Step) -> None:
        super().__init__()
        self.module, self.step = module, step

    def forward(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        output, after = self.step(inputs, state)
        # Copies: a step must return neither its own inputs nor one tensor twice.
        return [*(tensor.clone() for tensor in after), output.clone()]


def scan_steps(
    module: nn.Module, step: Step, state: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Take one step after another in one node of a graph that is exported.

    Args:
        module: whose parameters and buffers a step reads.
        step: takes the inputs of a step, each [...], and the state before it; gives an output and the state after it.
        state: the state before the first step.
        inputs: each [T,...].

    Returns:
        The outputs [T,...], and the state after the last step.
    """
    from torch._higher_order_ops.scan import scan_op  # loads the compiler; `scan` around it would fix the batch

    stepper = _Stepper(module, step)
    weights = dict(stepper.named_parameters()) | dict(stepper.named_buffers())

    def take(*tensors: Tensor) -> list[Tensor]:
        before, now = tensors[: len(state)], tensors[len(state) : len(state) + len(inputs)]
        given = dict(zip(weights, tensors[len(state) + len(inputs) :], strict=True))
        taken: list[Tensor] = functional_call(stepper, given, (now, before))
        return taken

    # Detached, for ONNX has no gradients and the graph of a step's would not go through the exporter.
    before, all_steps, shared = ([tensor.detach() for tensor in each] for each in (state, inputs, weights.values()))
    *end, outputs = scan_op(take, [tensor.clone() for tensor in before], all_steps, tuple(shared))
    return outputs, end
