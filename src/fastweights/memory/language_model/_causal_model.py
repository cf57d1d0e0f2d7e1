"""A causal language model of transformers, read from outside: its hidden states, its logits, and how it generates."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.memory.network import Network
from fastweights.memory.predictors.past import Past, count_ages
from fastweights.nn.modes import evaluating

PROBABILITIES = 2**22  # probabilities of all classes that are computed at once
QUERIES = 256  # positions of a window that are scored at once


@dataclass(eq=False)
class Window:
    """Consecutive positions of a text that the model has read at once, and what the text has before them.

    Attributes:
        h: hidden states, [c,d].
        logits: the model's there, [c,V].
        targets: the token after each, [c].
        keys: the hidden states of the text up to here, those of the window the last, [S,d].
        labels: the token after each of those, [S].
        reach: how many positions before its own one a query is shown at least; None for all.
    """

    h: Tensor
    logits: Tensor
    targets: Tensor
    keys: Tensor
    labels: Tensor
    reach: int | None

    @cached_property
    def plain(self) -> Tensor:
        """Log p of the targets by the model, [c]; MbPA, which has it from the same pass, puts its own here."""
        return log_prob(self.logits, self.targets)

    def parts(self, count: int = QUERIES) -> Iterator[tuple[slice, Past]]:
        """Yield so many of the window's positions after the others, and what each of them sees of the text."""
        before = len(self.keys) - len(self.h)
        for start in range(0, len(self.h), count):
            queries = min(count, len(self.h) - start)
            end = before + start + queries
            first = 0 if self.reach is None else max(0, end - queries - self.reach)
            ages = count_ages(end - queries - first, queries, self.keys)
            yield slice(start, start + queries), Past(self.keys[first:end], self.labels[first:end], ages)


class CausalModel:
    """A model whose output embedding has a hook, through which hidden states are seen or put in place of its own.

    They come through a hook at the output embedding, which is there only while the model is read. Whatever the model
    does after its output embedding (scaling, soft caps, a padded vocabulary) is in the logits, because they are always
    those that the model itself ends with.

    Attributes:
        attached: whether the model may be read.
        bos_token_id: the token that every window begins with, or None.
        key_size: d, of a hidden state.
        classes: V, how many logits the model ends with.
    """

    def __init__(self, model: nn.Module) -> None:
        name = type(model).__name__
        config: Any = getattr(model, "config", None)
        find: Any = getattr(model, "get_output_embeddings", None)
        if not isinstance(model, nn.Module) or config is None or find is None or not hasattr(model, "generate"):
            raise ValueError(
                f"model must be a causal language model of transformers, such as AutoModelForCausalLM loads, got {name}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name} is an encoder-decoder: give a model that AutoModelForCausalLM loads")
        head = find()
        if not isinstance(head, nn.Module):
            raise ValueError(f"{name} has no output embedding: give the model with its language modelling head")
        self.model: Any = model
        self.head = head
        self.attached, self._reading = True, False
        self.bos_token_id: int | None = None
        self._weights = Network(model, None, 0)
        self._versions, self._glance = self._weights.versions(), self._weights.glance()
        h, logits = self.read(torch.zeros(1, 1, dtype=torch.int64))
        self.key_size, self.classes = h.shape[1], logits.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the output embedding; of a quantised one, which has no parameters, that of the model."""
        known = (each.device for each in (*self.head.parameters(), *self.model.parameters()))
        return next(known, torch.device("cpu"))

    @property
    def longest(self) -> int | None:
        """The greatest number of tokens that the model reads at once, or None."""
        config = self.model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        longest = getattr(config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) and longest > 0 else None

    @contextmanager
    def seeing(self, see: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Call `see` with the hidden states [B,T,d] that the output embedding gets; it takes what `see` returns."""
        if not self.attached:
            raise ValueError("the model was detached: attach() it again")
        if self._reading:
            raise ValueError("the model is being read already: one call at a time")
        hook = self.head.register_forward_pre_hook(lambda head, inputs: (see(inputs[0]), *inputs[1:]), prepend=True)
        self._reading = True
        try:
            with evaluating(self.model), torch.no_grad():
                yield
        finally:
            hook.remove()
            self._reading = False

    def read(self, ids: Tensor, *, wants_logits: bool = True) -> tuple[Tensor, Tensor]:
        """Return hidden states [T,d] and logits [T,V], in float32 at least, after each token of a text [1,T].

        Args:
            ids: the text.
            wants_logits: False for those of the last token alone, [1,V].
        """
        seen: list[Tensor] = []

        def see(h: Tensor) -> Tensor:
            seen.append(h)
            return h if wants_logits else h[:, -1:]

        with self.seeing(see):
            logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits[0]
        if len(seen) != 1 or seen[0].shape[:2] != ids.shape:
            raise ValueError(
                f"{type(self.model).__name__} uses its output embedding {len(seen)} times, on "
                f"{[list(each.shape) for each in seen]} for a text {list(ids.shape)}: a causal language model uses it "
                "once, on a hidden state of each token"
            )
        return check_states(seen[0][0]), _widen(logits)

    def windows(
        self, ids: Tensor, context: int | None, *, reach: int | None = None, wants_logits: bool = True
    ) -> Iterator[Window]:
        """Yield the windows of a text [T], one after another.

        A window that does not begin with the model's first token gets it in front, as one of its tokens; nothing is
        yielded of it.

        Args:
            ids: the text.
            context: the tokens of a window; None for as many as the model can read.
            reach: of the windows.
            wants_logits: as of `read`.
        """
        longest = self.longest or len(ids) + 1
        context = min(context or longest, longest)
        keys = torch.empty(0, self.key_size, device=self.device)
        first = 0
        while first < len(ids) - 1:
            before = ids[:0] if self.bos_token_id in (None, int(ids[first])) else ids.new_tensor([self.bos_token_id])
            part = ids[first : first + max(1, context - len(before)) + 1]
            h, logits = self.read(torch.cat([before, part[:-1]])[None], wants_logits=wants_logits)
            h, logits = h[len(before) :], logits[len(before) :] if wants_logits else logits
            first += len(part) - 1
            keys = torch.cat([keys, h])
            yield Window(h, logits, part[1:], keys, ids[1 : first + 1], reach)

    def logits_of(self, h: Tensor) -> Tensor:
        """Return the logits [n,V] that the model makes of hidden states [n,d]: they take the place of its own."""

        def see(own: Tensor) -> Tensor:
            return h.to(own.device, own.dtype).unsqueeze(0)

        with self.seeing(see):
            token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            return _widen(self.model(input_ids=token, use_cache=False).logits[0])

    def fingerprint(self) -> str:
        """Return a checksum over all modules and weights."""
        return self._weights.fingerprint()

    def changed(self) -> bool:
        """Return whether the weights are others than at the beginning, or than after the last `accept_weights`."""
        versions = self._weights.versions()
        if versions == self._versions:
            return False
        if self._weights.glance() != self._glance:
            return True
        self._versions = versions  # moved, or loaded once more
        return False

    def accept_weights(self) -> None:
        """Take the weights as they are for those that `changed` compares with."""
        self._versions, self._glance = self._weights.versions(), self._weights.glance()

    def describe(self) -> str:
        """Return the model in words."""
        return f"{type(self.model).__name__} of {sum(each.numel() for each in self.model.parameters()):,} parameters"


def log_softmax(logits: Tensor) -> Tensor:
    """Return log p of all classes [T,V], whose sum is one to 1e-6 for any V.

    PyTorch's own adds a row up lane by lane, in float32: of 50,000 classes it is wrong by 1e-5, of 250,000 by 2e-5.
    """
    shifted = logits - logits.amax(1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(1, keepdim=True).log_())


def log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p of targets [T] of logits [T,V], some at a time."""
    size = max(1, PROBABILITIES // logits.shape[1])
    parts = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
    return torch.cat([log_softmax(some).gather(1, words.unsqueeze(1))[:, 0] for some, words in parts])


def check_states(h: Tensor) -> Tensor:
    """Return hidden states in float32 at least; they are finite."""
    wrong = ~h.isfinite().flatten(1).all(1)
    if bool(wrong.any()):
        raise ValueError(
            f"the model's hidden state at token {int(wrong.nonzero()[0])} is not finite: memories need finite numbers; "
            "try another precision, such as torch.bfloat16 instead of float16"
        )
    return _widen(h)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Return a checksum over a tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def find_first_token(tokenizer: Any) -> int | None:
    """Return the token that a tokenizer begins every text with, as the model's training did; None where it has none."""
    first = getattr(tokenizer, "bos_token_id", None)
    ids = [] if first is None else list(tokenizer("a", verbose=False)["input_ids"])
    return int(ids[0]) if ids and ids[0] == first else None


def check_tokenizer(tokenizer: Any, classes: int) -> None:
    """Refuse a tokenizer that has tokens which the model does not know."""
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"tokenizer must be one of transformers, got {type(tokenizer).__name__}")
    most = max(tokenizer.get_vocab().values(), default=-1)
    if most >= classes:
        raise ValueError(
            f"the tokenizer has the token {most}, and the model's are 0 to {classes - 1}: give the tokenizer that the "
            "model was trained with"
        )
