"""One example of gated fast weights over time: what its figure is drawn from."""

from dataclasses import dataclass
from typing import Any

import numpy

Array = numpy.ndarray[Any, numpy.dtype[Any]]


@dataclass(frozen=True)
class Trajectory:
    """One example of gated fast weights over time, T characters in all.

    Examples:
        >>> import numpy
        >>> from fastweights.report.trajectory import Trajectory
        >>> tokens = ("Q(ab)c.", "S(cd,e),", "S(gh,a),", "Q(cd)e.")
        >>> steps = sum(map(len, tokens)) + 1
        >>> fast_1, fast_2 = numpy.zeros((steps, 4, 8)), numpy.zeros((steps, 4, 5))
        >>> recall, answer = numpy.full((2, 4), 0.125), numpy.full(8, 0.125)
        >>> example = Trajectory(tokens, 1, fast_1, fast_2, fast_1, fast_2, recall, answer, "a state of zeros")
        >>> example.asked, example.starts, example.at_query
        (1, [0, 7, 15, 23], 27)
    """

    tokens: tuple[str, ...]  # `S(key,value),`, as many as there are, and at last `Q(key)value.`
    before: int  # 0 or 1: how many of the tokens belong to the example before
    fast_1: Array  # [T+1,H,H+D+1]: the matrix before each character is read, and after the last
    fast_2: Array  # [T+1,H,H+1]
    trace_1: Array  # [T+1,H,H+D+1]: fast_1, less its mean over the other values that the key asked for could have had
    trace_2: Array  # [T+1,H,H+1]
    recall: Array  # [storage tokens, tokens]: the chance that its value would be answered, were it asked after a token
    answer: Array  # [8]: the chance of a to h at the ")" of the query
    origin: str  # where the state at the beginning comes from, in words

    @property
    def starts(self) -> list[int]:
        """Where each token begins."""
        return [sum(map(len, self.tokens[:index])) for index in range(len(self.tokens))]

    @property
    def asked(self) -> int:
        """Which of the tokens last stored the key that is asked for."""
        key = key_of(self.tokens[-1])
        stored = range(self.before, len(self.tokens) - 1)
        return max(index for index in stored if key_of(self.tokens[index]) == key)

    @property
    def at_query(self) -> int:
        """The step that reads the ")" of the query, with whose matrices it is answered."""
        return self.starts[-1] + self.tokens[-1].index(")")


def key_of(token: str) -> str:
    """The key of a storage or query token.

    Examples:
        >>> key_of("S(hgb,c),"), key_of("Q(ceaf)e.")
        ('hgb', 'ceaf')
    """
    return token[2 : token.index("," if token[0] == "S" else ")")]


def value_of(token: str) -> str:
    """The value of a storage token, the answer of a query token.

    Examples:
        >>> value_of("S(hgb,c),"), value_of("Q(ceaf)e.")
        ('c', 'e')
    """
    return token[-3 if token[0] == "S" else -2]


def moments(example: Trajectory) -> list[int]:
    """The step of each column's matrices: after its token, but of the query those that it is answered with."""
    ends = [start + len(token) for start, token in zip(example.starts, example.tokens, strict=True)]
    return [*ends[:-1], example.at_query]


def norms(matrices: Array) -> Array:
    norms: Array = numpy.sqrt((matrices.astype(numpy.float64) ** 2).sum((1, 2)))
    return norms


def scale_limit(example: Trajectory) -> float:
    """The end of the scale that all matrices share: few entries lie beyond it."""
    shown = moments(example)
    entries = numpy.abs(numpy.concatenate([example.fast_1[shown].ravel(), example.fast_2[shown].ravel()]))
    return float(numpy.quantile(entries, 0.99)) or 1.0


def orders(example: Trajectory) -> tuple[Array, Array, Array, Array]:
    """Rows and columns of both matrices, so that units alike lie side by side: they have no order of their own."""
    size = example.fast_2.shape[1]
    features = example.fast_1.shape[2] - size - 1
    inner, hidden = _alike(example.fast_1), _alike(example.fast_2)
    inputs = _alike(example.fast_1[:, :, size : size + features].transpose(0, 2, 1))
    columns_1 = numpy.concatenate([hidden, size + inputs, [size + features]])
    return inner, columns_1, hidden, numpy.concatenate([inner, [size]])


def _alike(matrices: Array) -> Array:
    """The rows, by their part in what they do most in common over time."""
    rows = matrices.transpose(1, 0, 2).reshape(matrices.shape[1], -1).astype(numpy.float64)
    direction = numpy.linalg.eigh(rows @ rows.T)[1][:, -1]
    direction = direction * numpy.sign(direction[numpy.abs(direction).argmax()])
    return numpy.argsort(direction, kind="stable")
