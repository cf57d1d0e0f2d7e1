"""The protocol of a predictor of the next token: what a new memory of a language model implements."""

from typing import Protocol

from torch import Tensor


class Predictor(Protocol):
    """A predictor of the next token of a stream, by what it has seen of the stream so far.

    `NeuralCache`, `UnboundedCache`, `NGramCache` and `StreamMbPA` are predictors. `evaluation.score_text` scores any of
    them beside the model, and `fit_weights` and `mix` put their scores together.
    """

    def log_prob(self, h: Tensor, targets: Tensor) -> Tensor:
        """Score each position by what was before it, and then remember it.

        Args:
            h: hidden states, the input of the softmax, [T,d].
            targets: the token after each, [T] integers.

        Returns:
            log p(target) in nats, [T].
        """

    def clear(self) -> None:
        """Forget everything."""

    @property
    def nbytes(self) -> int:
        """The bytes that are held, the room for more included."""
