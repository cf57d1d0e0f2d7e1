"""Two protocols for predictors of the next token: `Predictor` scores a stream, `Reader` joins a language model."""

from typing import Protocol

from torch import Tensor

from fastweights.memory.predictors.past import Past
from fastweights.memory.store.episodic import EpisodicMemory


class Predictor(Protocol):
    """A predictor of the next token of a stream, which keeps what it has seen of the stream so far.

    `NeuralCache`, `UnboundedCache`, `NGramCache` and `StreamMbPA` are predictors. `evaluation.score_text` scores any of
    them beside the model, and `fit_weights` and `mix` put their scores together. What `AdaptiveLanguageModel` is to mix
    beside those four is a `Reader`.
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


class Reader(Protocol):
    """A predictor of your own for `AdaptiveLanguageModel(readers={"name": it})`, which reads the memory of the model.

    It keeps nothing of what was read: all of that is in the memory, which the model fills, undoes, saves and loads. So
    one method is all that it needs.

    Examples:
        >>> import torch, transformers
        >>> from fastweights import memory
        >>> class Unigram:
        ...     def recall(self, store, h, log_model, past):
        ...         stored = torch.bincount(store.values, minlength=log_model.shape[1])
        ...         seen = (past.ages > 0).to(log_model.dtype)                               # [Q,S]
        ...         own = torch.zeros_like(log_model).scatter_add_(1, past.labels.expand(seen.shape), seen)
        ...         counts = stored + own + 1
        ...         return (counts / counts.sum(1, keepdim=True)).log()
        >>> config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> lm = memory.AdaptiveLanguageModel(model, readers={"unigram": Unigram()}, weights=[0.5, 0.5])
        >>> lm.score(torch.full((1, 30), 7), remember=False).exp()[0, [0, 28]].round(decimals=1)  # [B,T] -> [B,T-1]
        tensor([0.0000, 0.2000])
        >>> memory.certify(lm, torch.arange(60).view(1, 60) % 7).passed
        True
    """

    def recall(self, store: EpisodicMemory, h: Tensor, log_model: Tensor, past: Past) -> Tensor:
        """Predict the next token at each of Q positions, from the memory and from what each sees of its own text.

        It changes none of its arguments. `certify` shows whether it looks at what it must not see.

        Args:
            store: the memory: `values` are tokens [m], oldest first, and `keys` the hidden states [m,d] before them.
            h: hidden states at the positions, [Q,d].
            log_model: log p of all tokens there by the model alone, [Q,V].
            past: the text at hand, which is not in the memory; of it each position sees where `ages` are not 0.

        Returns:
            log p of all tokens, [Q,V] float32 or float64, whose probabilities have the sum 1.
        """
