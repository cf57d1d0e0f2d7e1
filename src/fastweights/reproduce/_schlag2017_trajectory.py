"""What the trained gated network's fast matrices are while it reads one example, and what it could answer then."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.nn import GatedFastWeightsState
from fastweights.report.trajectory import Trajectory, key_of, value_of
from fastweights.reproduce._schlag2017 import StreamModel
from fastweights.tasks import gated_retrieval as task

VALUES = task.VOCABULARY[: task.CHARACTERS]


def tokens_of(characters: str) -> list[str]:
    """The storage and query tokens of a stream.

    Examples:
        >>> tokens_of("S(hf,h),S(cc,d),Q(cc)d.")
        ['S(hf,h),', 'S(cc,d),', 'Q(cc)d.']
    """
    return [match.group() for match in task.TOKEN.finditer(characters)]


@torch.no_grad()
def trajectory(network: StreamModel, earlier: str, example: str, origin: str) -> Trajectory:
    """Read an example a character at a time, after a stream that came before it.

    Eight networks read it side by side, which differ in the value stored under the key that is asked for: what the
    true one's matrices have and the others' have not is the trace of that value.

    Args:
        network: of gated fast weights.
        earlier: the stream before, whole tokens, perhaps none; its last token is a part of the picture.
        example: storage tokens and one query, as `task.parse` takes them.
        origin: in words, where the state comes from that the example is read with.
    """
    tokens = (*tokens_of(earlier)[-1:], *tokens_of(example))
    before = len(tokens) - len(tokens_of(example))
    inputs = _indices("".join(tokens)).unsqueeze(1).repeat(1, len(VALUES))
    key, true = key_of(tokens[-1]), VALUES.index(value_of(tokens[-1]))
    asked = max(index for index in range(before, len(tokens) - 1) if key_of(tokens[index]) == key)
    inputs[sum(map(len, tokens[: asked + 1])) - 3] = torch.arange(len(VALUES))

    at_query = len(inputs) - len(tokens[-1]) + tokens[-1].index(")")
    first = _read(network, earlier[: len(earlier) - len("".join(tokens[:before]))], copies=len(VALUES))
    states = [first]
    for step, column in enumerate(inputs):
        logits, state = network(column.unsqueeze(0), states[-1])
        states.append(GatedFastWeightsState(*state))
        if step == at_query:
            answer = logits[0, true].softmax(0)[: len(VALUES)]
    fast_1, fast_2 = (torch.stack([getattr(state, name) for state in states]) for name in ("fast_1", "fast_2"))

    ends = torch.tensor([len(token) for token in tokens]).cumsum(0).tolist()
    return Trajectory(
        tokens=tokens,
        before=before,
        fast_1=fast_1[:, true].numpy(),
        fast_2=fast_2[:, true].numpy(),
        trace_1=_trace(fast_1, true).numpy(),
        trace_2=_trace(fast_2, true).numpy(),
        recall=recall(network, [_of(states[end], true) for end in ends], tokens[before:-1]).numpy(),
        answer=answer.numpy(),
        origin=origin,
    )


@torch.no_grad()
def recall(network: StreamModel, states: Sequence[GatedFastWeightsState], stored: Sequence[str]) -> Tensor:
    """The chance that each token's value were answered, if from each of the states its key was asked for.

    Shapes: states' tensors without the batch axis -> [storage tokens, states]. The states stay as they are.
    """
    together = GatedFastWeightsState(*map(torch.stack, zip(*states, strict=True)))
    chances = []
    for token in stored:
        query = _indices(f"Q({key_of(token)})").unsqueeze(1).expand(-1, len(states))
        logits, _ = network(query, together)
        chances.append(logits[-1].softmax(1)[:, VALUES.index(value_of(token))])
    return torch.stack(chances)


def _read(network: StreamModel, characters: str, *, copies: int) -> GatedFastWeightsState:
    """The state after a stream, of as many networks; after none, zeros."""
    _, state = network(_indices(characters or task.VOCABULARY[0]).unsqueeze(1))
    state = GatedFastWeightsState(*(tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for tensor in state))
    return state if characters else GatedFastWeightsState(*map(torch.zeros_like, state))


def _trace(fast: Tensor, true: int) -> Tensor:
    others = [index for index in range(len(VALUES)) if index != true]
    return (fast[:, true].unsqueeze(1) - fast[:, others]).mean(1)  # before the value is read, zero but for rounding


def _of(state: GatedFastWeightsState, index: int) -> GatedFastWeightsState:
    return GatedFastWeightsState(*(tensor[index] for tensor in state))


def _indices(characters: str) -> Tensor:
    return torch.tensor([task.VOCABULARY.index(character) for character in characters])
