"""A causal language model of transformers, adapted at test time from a memory of what it has read."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from fastweights.checks import check_positive, check_sizes
from fastweights.hub import FOLDER, Shared, find_folder, put_card, write_card
from fastweights.memory import _language_model_file as file
from fastweights.memory._causal_model import CausalModel, check_tokenizer
from fastweights.memory._generation import generate
from fastweights.memory._past import Past, Recalled, count_ages
from fastweights.memory.caches import NeuralCache, UnboundedCache, log_share
from fastweights.memory.episodic import EpisodicMemory
from fastweights.memory.mixtures import fit_weights, mix
from fastweights.memory.stream_mbpa import StreamMbPA

# The memories of a model that is given none.
_CACHE, _LAST, _STORED, _NEIGHBOURS = 2000, 4096, 100_000, 64
_PREDICTIONS = 2**28  # numbers that MbPA keeps at most, of 16 bits
_QUERIES = 256  # positions at once
_PROBABILITIES = 2**22  # of all classes at once
# Of kernels that `fit` tries: over the mean squared length of a hidden state, theta, and 1 / bandwidth^2.
_SHARPNESS = tuple(2.0**power for power in range(9))
_RATES = tuple(10.0 ** (power / 2) for power in range(-2, 7))  # of MbPA, over the same


class AdaptiveLanguageModel(Shared):
    """A causal language model that remembers the text it reads, and predicts from the memory, too.

    The memory is a list of hidden states, the inputs of the model's output embedding, with the token that followed on
    each. Up to three predictors read it, and are mixed with the model itself:
    p = w_0 p_model + w_1 p_cache + w_2 p_mbpa + w_3 p_knn. They are the continuous cache of Grave et al. 2016
    (`NeuralCache`), memory-based parameter adaptation of Sprechmann et al. 2018 (`StreamMbPA`), and the nearest
    neighbours of Khandelwal et al. 2020 (`UnboundedCache` with a bandwidth). A position is always scored before it is
    stored.

    The model itself is never changed: a hook at its output embedding, for the time of a call, is all that it gets. So
    this works for every model that has an output embedding, whatever it is made of, and
    in bfloat16 too. Memories raise recall of what was read, not reasoning; of a text that fits into the model's context
    they add little.

    Args:
        model: a causal language model of transformers.
        cache: a `NeuralCache` of the model's V classes; what it remembers is kept in step with `store`.
        mbpa: a `StreamMbPA` around `model.get_output_embeddings()`, with one step; kept in step as well.
        knn: an `UnboundedCache`, whose memory is `store`. Where none of the three is given, all are made: a cache of
            the last 2,000 positions, MbPA of the last 4,096 (fewer if their predictions took more than half a GiB) and
            kNN of the last 100,000, both with 64 neighbours.
        weights: of the model, then of the memories that are given, in the order cache, mbpa, knn; their sum is 1. None:
            `fit` finds them.
        store: the memory; by default that of `knn`, else one in this process with room for the cache and MbPA.
        tokenizer: the model's, for methods that are given text.

    Attributes:
        store: the `EpisodicMemory` of hidden states [m,d] and next tokens [m]. It may be read, and what was written
            under a tag be undone, at any time.

    Raises:
        ValueError: no causal language model, memories of other sizes than the model's, weights that
            are no mixture, a tokenizer of another vocabulary, or hidden states that are not finite.

    Examples:
        >>> import torch, transformers
        >>> from fastweights import memory
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(1000, num_classes=50))
        >>> weights = lm.fit(torch.arange(200) % 7)                      # a validation text, [N]
        >>> text = torch.randint(50, (1, 40))
        >>> before, after = lm.score(text), lm.score(text)               # [B,T] -> [B,T-1]: read for the second time
        >>> bool(after.mean() > before.mean())
        True
        >>> lm.generate(text[:, :3], max_new_tokens=5, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 8])
        >>> lm.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        cache: NeuralCache | None = None,
        mbpa: StreamMbPA | None = None,
        knn: UnboundedCache | None = None,
        weights: Sequence[float] | Tensor | None = None,
        store: EpisodicMemory | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._network = CausalModel(model)
        self.model, self.tokenizer = model, tokenizer
        if all(each is None for each in (cache, mbpa, knn)):
            cache, mbpa, knn = self._make_memories(store)
        self.cache, self.mbpa, self.knn = cache, mbpa, knn
        self.store = self._check_memories(store)
        self.weights = weights
        if tokenizer is not None:
            check_tokenizer(tokenizer, self._network.classes)
        self._forget_views()

    def _make_memories(self, store: EpisodicMemory | None) -> tuple[NeuralCache, StreamMbPA | None, UnboundedCache]:
        """Return all three, where none was asked for."""
        network, mbpa = self._network, None
        if isinstance(network.head, nn.Linear):
            last = max(1, min(_LAST, _PREDICTIONS // network.classes))
            mbpa = StreamMbPA(network.head, last, neighbours=_NEIGHBOURS, half=True)
        if store is None:
            store = EpisodicMemory(_STORED, network.key_size, device=network.device)
        near = UnboundedCache(store, network.classes, neighbours=_NEIGHBOURS)
        return NeuralCache(_CACHE, network.classes), mbpa, near

    def _check_memories(self, store: EpisodicMemory | None) -> EpisodicMemory:
        """Return the memory, after comparing the sizes of all with the model's."""
        classes, key_size = self._network.classes, self._network.key_size
        for name, given in (("cache", self.cache), ("knn", self.knn)):
            if given is not None and given.num_classes != classes:
                raise ValueError(
                    f"{name} has {given.num_classes} classes, and the model predicts {classes} tokens: make it with "
                    f"num_classes={classes}"
                )
        if self.mbpa is not None:
            if self.mbpa.output is not self._network.head:
                raise ValueError("mbpa must be a StreamMbPA around model.get_output_embeddings()")
            if self.mbpa.descent.steps != 1:
                raise ValueError(f"mbpa must take one step, got steps={self.mbpa.descent.steps}")
        if self.knn is not None:
            if store not in (None, self.knn.store):
                raise ValueError("store must be the memory of knn, or be left out")
            store = self.knn.store
        if store is None:
            capacities = [each.capacity for each in (self.cache, self.mbpa) if each is not None]
            if None in capacities:
                raise ValueError("a cache without a limit needs a memory of its own: give store=EpisodicMemory(...)")
            most = max(each for each in capacities if each is not None)
            store = EpisodicMemory(most, key_size, device=self._network.device)
        if store.key_size != key_size or store.value_shape != () or store.value_dtype.is_floating_point:
            raise ValueError(f"the memory must have keys of width {key_size} and integers as values, got {store}")
        if store.device != self._network.device:
            raise ValueError(
                f"the memory is on {store.device}, the model on {self._network.device}: they must be on one"
            )
        return store

    @property
    def weights(self) -> Tensor | None:
        """The weights of the mixture, float64: of the model, then of the memories that are given; None before `fit`."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float] | Tensor | None) -> None:
        if weights is not None:
            weights = torch.as_tensor(weights, dtype=torch.float64)
            mix([torch.zeros(1)] * len(self.names), weights)  # which checks them
        self._weights = weights

    @property
    def settings(self) -> dict[str, float | None]:
        """The settings that `fit` chooses: "theta" of the cache, "rate" of MbPA, "bandwidth" of knn."""
        found: dict[str, float | None] = {}
        if self.cache is not None:
            found["theta"] = self.cache.theta
        if self.mbpa is not None:
            found["rate"] = self.mbpa.descent.lr
        if self.knn is not None:
            found["bandwidth"] = self.knn.bandwidth
        return found

    @property
    def names(self) -> list[str]:
        """The predictors, in the order of the weights: "model", then those of "cache", "mbpa" and "knn" there are."""
        given = {"cache": self.cache, "mbpa": self.mbpa, "knn": self.knn}
        return ["model", *(name for name, each in given.items() if each is not None)]

    @property
    def num_classes(self) -> int:
        """The number of tokens that the model predicts, V."""
        return self._network.classes

    @property
    def attached(self) -> bool:
        """True until `detach`: the model is adapted."""
        return self._network.attached

    @property
    def memory_bytes(self) -> int:
        """The bytes of what the memories hold, the room for more included."""
        ring = self.store._state.ring
        held = ring.keys.nbytes + ring.values.nbytes
        for view in (self.cache, self.mbpa):
            held += 0 if view is None else view.nbytes
        return held

    def fingerprint(self) -> str:
        """Return a checksum over the model's modules and weights."""
        return self._network.fingerprint()

    def __repr__(self) -> str:
        shares = (
            "not fitted"
            if self._weights is None
            else ", ".join(
                f"{name} {share:.3f}" for name, share in zip(self.names, self._weights.tolist(), strict=True)
            )
        )
        return f"AdaptiveLanguageModel({self._network.describe()}, {shares}, {self.store!r})"

    # Scores

    @torch.no_grad()
    def score(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        remember: bool = True,
        *,
        context: int | None = None,
        tag: str | None = None,
    ) -> Tensor:
        """Score every token after the first of each text, each before it is stored.

        Each row is a text of its own: it sees what the memory held before the call, and its own past. Afterwards all
        rows are written to the memory, in their order. Rows are read without their padding, one by one.

        Args:
            input_ids: texts [B,T] of token ids.
            attention_mask: [B,T], 0 where there is padding, on either side.
            remember: False to leave the memory as it was: then every row has one of its own, for the time of the call.
            context: the tokens that the model reads at once, of a longer text one window after another; by default as
                many as it can.
            tag: a name under which `undo` takes back what is remembered.

        Returns:
            log p of each next token, in nats, [B,T-1] float32; 0 where there is padding.

        Raises:
            ValueError: no tokens of the model, rows of fewer than two tokens, hidden states that are not finite, or
                weights that were not fitted; nothing is remembered then.
            MemoryFileError: the disk refuses; nothing is remembered.
        """
        self._check_ready(context)
        found = self.score_each(input_ids, attention_mask, remember, context=context, tag=tag)
        return mix(list(found.values()), self._shares())

    @torch.no_grad()
    def score_each(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        remember: bool = True,
        *,
        context: int | None = None,
        tag: str | None = None,
    ) -> dict[str, Tensor]:
        """Score as `score` does, in the same pass, but by the model and by each memory alone: needs no weights.

        Returns:
            log p of each next token, [B,T-1] float32, of "model", "cache", "mbpa" and "knn", those that are given;
            minus infinity where a memory rules a token out.

        Raises:
            ValueError, MemoryFileError: as `score`.
        """
        rows = self._check_texts(input_ids, attention_mask)
        self._check_attached(context)
        self._follow_store()
        shape = len(rows), _as_ids(input_ids).shape[1] - 1
        scores = {name: torch.zeros(shape, device=self._network.device) for name in self.names}
        texts, alone = [], remember and len(rows) == 1
        for row, (ids, places) in enumerate(rows):
            found, keys, labels = self._read(ids, context, stays=alone)
            for name, log_probs in found.items():
                scores[name][row, places[1:] - 1] = log_probs
            texts.append((keys, labels))
        if remember:
            self._remember(texts, tag, views_know=alone)
        return scores

    @torch.no_grad()
    def score_plain(self, input_ids: Tensor, *, context: int | None = None) -> Tensor:
        """Return what the model itself gives to each next token, log p [B,T-1] float32, read as `score` reads it.

        Raises:
            ValueError: as `score`.
        """
        rows = self._check_texts(input_ids, None)
        self._check_attached(context)
        parts = [_log_prob(logits, targets) for ids, _ in rows for _, logits, targets in self._windows(ids, context)]
        return torch.cat(parts).view(len(rows), -1).float()

    @torch.no_grad()
    def distribution(self, input_ids: Tensor, *, context: int | None = None) -> Tensor:
        """Return log p of all tokens after each token of texts [B,T]: [B,T-1,V] float32, each position's sum is one.

        Rows are as those of `score`, of one length; nothing is remembered.

        Raises:
            ValueError: as `score`.
        """
        rows = self._check_texts(input_ids, None)
        self._check_ready(context)
        self._follow_store()
        found = []
        for ids, _ in rows:
            keys, labels, predictions = self._nothing()
            for h, logits, targets in self._windows(ids, context):
                before = len(keys)
                keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
                if self.mbpa is not None:
                    predictions = torch.cat([predictions, logits.softmax(1)])
                size = max(1, _PROBABILITIES // self._network.classes)
                for start in range(0, len(h), size):
                    some = slice(start, start + size)
                    end = before + start + len(h[some])
                    past = Past(keys[:end], labels[:end], count_ages(end - len(h[some]), len(h[some]), h), predictions)
                    found.append(self._predict(h[some], logits[some], past))
        return torch.cat(found).view(len(rows), -1, self._network.classes).float()

    def generate(self, input_ids: Any = None, **options: Any) -> Any:
        """Continue texts by the model's own `generate`, with all that it can do, from the mixture.

        Sequences see what the memory held before the call, and their own past: of a beam, its own; padding is not
        remembered. The processors that `generate` makes of its settings, such as penalties and temperature, come after
        the mixture. Nothing is remembered: `write` what is to stay.

        Args:
            input_ids: texts [B,T], or the first argument of the model's `generate`.
            options: its other arguments.

        Raises:
            ValueError: weights that were not fitted, hidden states that are not finite, or a way to generate that is
                no part of transformers.
        """
        self._check_ready(None)
        self._follow_store()
        if input_ids is not None:
            options["inputs"] = input_ids
        return generate(self._network, self._predict, wants_predictions=self.mbpa is not None, **options)

    def _predict(self, h: Tensor, logits: Tensor, past: Past) -> Tensor:
        """Return log p of all tokens [Q,V], from hidden states [Q,d] and the model's logits there [Q,V]."""
        classes = self._network.classes
        found = [logits.log_softmax(1)]
        if self.cache is not None:
            found.append(self.cache._recall(h, past).spread(classes))
        if self.mbpa is not None:
            found.append(self.mbpa._recall(h, logits, past).log_softmax(1))
        if self.knn is not None:
            found.append(self.knn._recall(h, past).spread(classes))
        return mix([each.to(logits.dtype) for each in found], self._shares())

    # Reading

    def _read(self, ids: Tensor, context: int | None, *, stays: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return log p [T-1] of the model and of each memory on a text, its hidden states and next tokens.

        Args:
            ids: the text, [T].
            context: the tokens of a window.
            stays: whether MbPA remembers it.
        """
        keys, labels, _ = self._nothing()
        scores: dict[str, list[Tensor]] = {name: [] for name in self.names}
        with contextlib.ExitStack() as stack:
            if self.mbpa is not None:
                if stays:
                    stack.callback(self._forget_views)  # an error leaves MbPA out of step
                else:
                    stack.enter_context(self.mbpa._rewinding(len(ids)))
            for h, logits, targets in self._windows(ids, context):
                keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
                if self.mbpa is None:
                    scores["model"].append(_log_prob(logits, targets))
                else:
                    for name, part in zip(("model", "mbpa"), self.mbpa.score(h, targets, logits), strict=True):
                        scores[name].append(part)
                for start, past in self._pasts(keys, labels, len(h)):
                    some = slice(start, start + len(past.ages))
                    if self.cache is not None:
                        scores["cache"].append(self._share(self.cache._recall(h[some], past), targets[some]))
                    if self.knn is not None:
                        scores["knn"].append(self._share(self.knn._recall(h[some], past), targets[some]))
            if stays:
                stack.pop_all()
        return {name: torch.cat(parts).float() for name, parts in scores.items()}, keys, labels

    def _share(self, recalled: Recalled, targets: Tensor) -> Tensor:
        return log_share(recalled, targets, self._network.classes)

    def _pasts(self, keys: Tensor, labels: Tensor, count: int) -> Iterator[tuple[int, Past]]:
        """Yield what the last `count` positions of a text see of it, some at a time, with the number of the first."""
        before = len(keys) - count
        for start in range(0, count, _QUERIES):
            queries = min(_QUERIES, count - start)
            end = before + start + queries
            first = 0
            if self.knn is None and self.cache is not None and self.cache.capacity is not None:
                first = max(0, end - queries - self.cache.capacity)  # what is before it is out of sight
            ages = count_ages(end - queries - first, queries, keys)
            yield start, Past(keys[first:end], labels[first:end], ages)

    def _windows(
        self, ids: Tensor, context: int | None, *, wants_logits: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield hidden states [c,d], logits [c,V] and next tokens [c] of a text [T], window after window."""
        longest = self._network.longest or len(ids)
        context = min(context or longest, longest)
        for first in range(0, len(ids) - 1, context):
            part = ids[first : first + context + 1]
            h, logits = self._network.read(part[None, :-1], wants_logits=wants_logits)
            yield h, logits, part[1:]

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states [0,d], tokens [0] and predictions [0,V]."""
        device, network = self._network.device, self._network
        labels = torch.empty(0, dtype=torch.int64, device=device)
        return torch.empty(0, network.key_size, device=device), labels, torch.empty(0, network.classes, device=device)

    def _check_texts(self, input_ids: Any, attention_mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens of each row that are no padding [t], and their places."""
        ids = _as_ids(input_ids)
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"input_ids must be texts [B,T], got {list(ids.shape)}")
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask must be [B,T] like input_ids, {list(ids.shape)}, got {list(mask.shape)}")
        rows = []
        for row, (line, valid) in enumerate(zip(ids, mask, strict=True)):
            places = valid.nonzero()[:, 0]
            if len(places) < 2:
                raise ValueError(f"row {row} has {len(places)} tokens: a text of at least two is needed")
            rows.append((self._check_ids(line[places]), places.to(self._network.device)))
        return rows

    def _check_ids(self, ids: Tensor) -> Tensor:
        classes = self._network.classes
        wrong = ids[(ids < 0) | (ids >= classes)]
        if len(wrong):
            raise ValueError(
                f"the text has the token {int(wrong[0])}, and the model's are 0 to {classes - 1}: it was made by "
                "another tokenizer than the model's"
            )
        return ids.to(self._network.device, torch.int64)

    def _check_ready(self, context: int | None) -> None:
        self._shares()
        self._check_attached(context)

    def _check_attached(self, context: int | None) -> None:
        if context is not None:
            check_sizes(context=context)
        if not self._network.attached:
            raise ValueError("the model was detached: attach() it again")

    def _shares(self) -> Tensor:
        if self._weights is None:
            raise ValueError("there are no weights yet: call fit() with a validation text, or set lm.weights")
        return self._weights

    # Memory

    @torch.no_grad()
    def write(self, text: Any, tag: str | None = None, *, context: int | None = None) -> None:
        """Remember a text without scoring it.

        Args:
            text: a string, which needs a tokenizer, or token ids [T] or [1,T].
            tag: a name under which `undo` takes it back; several texts may share it.
            context: as of `score`.

        Raises:
            ValueError: an empty text, no tokens of the model, or hidden states that are not finite; nothing was
                changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        ids = self._encode(text)
        self._check_attached(context)
        self._follow_store()
        keys, labels, _ = self._nothing()
        for h, _, targets in self._windows(ids, context, wants_logits=False):
            keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
        self._remember([(keys, labels)], tag, views_know=False)

    def undo(self, tag: str) -> None:
        """Take back all that was written under a tag, as if it had never been written.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        self.store.undo(tag)

    def keep(self, tag: str) -> None:
        """Make what was written under a tag final: it can no longer be undone.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        self.store.keep(tag)

    def _encode(self, text: Any) -> Tensor:
        """Return the tokens of a text, [T]."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("a string needs the tokenizer: make the model with tokenizer=..., or give token ids")
            ids = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        else:
            ids = _as_ids(text)
            ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or len(ids) < 2:
            raise ValueError(f"a text must have at least two tokens, [T]; got {list(ids.shape)} of {str(text)[:40]!r}")
        return self._check_ids(ids)

    def _remember(self, texts: list[tuple[Tensor, Tensor]], tag: str | None, *, views_know: bool) -> None:
        """Write texts to the memory; `views_know`: MbPA has seen them already."""
        keys, labels = (torch.cat(part) for part in zip(*texts, strict=True))
        try:
            self.store.write(keys, labels, tag)
            if not views_know:
                return  # the next to read brings the views into step
            if self.cache is not None:
                self.cache.remember(keys, labels)
            self._seen = self._recent_numbers()
        except BaseException:
            self._forget_views()
            raise

    def _forget_views(self) -> None:
        """Make the cache and MbPA be filled anew, by the next to read."""
        for view in (self.cache, self.mbpa):
            if view is not None:
                view.clear()
        self._seen = torch.empty(0, dtype=torch.int64)  # numbers of the entries that they know

    def _recent_numbers(self) -> Tensor:
        """Return the numbers of the entries that the cache or MbPA is to know, ascending."""
        capacities = [each.capacity for each in (self.cache, self.mbpa) if each is not None]
        numbers = self.store.numbers
        if not capacities:
            return numbers[:0]
        return numbers if None in capacities else numbers[-max(each for each in capacities if each is not None) :]

    def _follow_store(self) -> None:
        """Bring the cache and MbPA into step with the memory, which may have been changed, undone or read anew."""
        with self.store.lock:
            numbers = self._recent_numbers()
            if torch.equal(numbers, self._seen):
                return
            old = numbers[numbers <= self._seen[-1]] if len(self._seen) else numbers[:0]
            if not (len(old) and torch.equal(old, self._seen[-len(old) :])):
                self._forget_views()
                old = numbers[:0]
            ring, first = self.store._state.ring, len(self.store) - len(numbers) + len(old)
            for part in torch.split(torch.arange(first, len(self.store), device=self.store.device), _QUERIES):
                keys, labels = ring.keys_at(part).float(), ring.values_at(part).long()
                if self.cache is not None:
                    self.cache.remember(keys, labels)
                if self.mbpa is not None:
                    self.mbpa.score(keys, labels, self._network.logits_of(keys))
            self._seen = numbers

    # Settings

    @torch.no_grad()
    def fit(
        self,
        text: Any,
        *,
        thetas: Sequence[float] | None = None,
        bandwidths: Sequence[float | None] | None = None,
        rates: Sequence[float] | None = None,
        context: int | None = None,
    ) -> Tensor:
        """Choose theta, the bandwidth, MbPA's rate and the weights of the mixture on a validation text, in one pass.

        The text is read once, as `score` reads it, by every memory with all of its candidates side by side. Of each
        memory the candidate is taken that makes the text most likely in a mixture with the model; then the weights of
        all are fitted. Nothing is remembered.

        Args:
            text: a validation text: a string, or token ids [T] or [1,T]. Some thousand tokens are enough.
            thetas: candidates of the cache; by default 1 to 256 over the mean squared length of a hidden state.
            bandwidths: candidates of knn, None for the distance of the farthest neighbour; by default None, and those
                that fall off as the cache does.
            rates: candidates of MbPA's `lr`; by default 0.1 to 1,000 over that length.
            context: as of `score`; give what the model is to be used with.

        Returns:
            The weights, which are those of this model from now on: of the model, cache, mbpa and knn if given.

        Raises:
            ValueError: as `score`, or candidates out of range.
        """
        ids = self._encode(text)
        self._check_attached(context)
        self._follow_store()
        for name, values in (("thetas", thetas), ("bandwidths", bandwidths), ("rates", rates)):
            for value in values or ():
                if value is not None:
                    check_positive(**{name: value})
        scores: dict[tuple[str, float | None], list[Tensor]] = {}
        keys, labels, _ = self._nothing()
        with contextlib.ExitStack() as stack:
            if self.mbpa is not None:
                stack.enter_context(self.mbpa._rewinding(len(ids)))
            for h, logits, targets in self._windows(ids, context):
                if not len(keys):
                    length = float(h.square().sum(1).mean())
                    thetas = thetas or [each / length for each in _SHARPNESS]
                    bandwidths = bandwidths or [None, *(math.sqrt(length / each) for each in _SHARPNESS)]
                    rates = rates or [each / length for each in _RATES]
                keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
                candidates = self._try(h, logits, targets, keys, labels, thetas or (), bandwidths or (), rates or ())
                for candidate, score in candidates:
                    scores.setdefault(candidate, []).append(score.double())
        return self._choose({candidate: torch.cat(parts) for candidate, parts in scores.items()})

    def _try(
        self,
        h: Tensor,
        logits: Tensor,
        targets: Tensor,
        keys: Tensor,
        labels: Tensor,
        thetas: Sequence[float],
        bandwidths: Sequence[float | None],
        rates: Sequence[float],
    ) -> Iterator[tuple[tuple[str, float | None], Tensor]]:
        """Yield candidates and their log p on parts of a window, in order, which is read by each once."""
        yield ("model", None), _log_prob(logits, targets)
        if self.mbpa is not None:
            before = self.mbpa.descent
            try:
                for rate in rates:
                    self.mbpa.descent = before._replace(lr=rate)
                    with self.mbpa._rewinding(len(h)) if rate != rates[-1] else contextlib.nullcontext():
                        yield ("mbpa", rate), self.mbpa.score(h, targets, logits)[1]
            finally:
                self.mbpa.descent = before
        for start, past in self._pasts(keys, labels, len(h)):
            some = slice(start, start + len(past.ages))
            if self.cache is not None:
                products = self.cache._recall(h[some], past)
                for theta in thetas:
                    scaled = products._replace(likeness=products.likeness * (theta / self.cache.theta))
                    yield ("cache", theta), self._share(scaled, targets[some])
            if self.knn is not None:
                before_width = self.knn.bandwidth
                try:
                    self.knn.bandwidth = math.sqrt(0.5)
                    squares = self.knn._recall(h[some], past)  # minus the squared distances
                    for bandwidth in bandwidths:
                        self.knn.bandwidth = bandwidth
                        scaled = squares._replace(likeness=squares.likeness / self.knn._scale(-squares.likeness))
                        yield ("knn", bandwidth), self._share(scaled, targets[some])
                finally:
                    self.knn.bandwidth = before_width

    def _choose(self, scores: dict[tuple[str, float | None], Tensor]) -> Tensor:
        """Take the best candidate of each memory, and fit the weights."""
        plain, chosen = scores["model", None], [scores["model", None]]
        for name in self.names[1:]:
            gains = {}
            for (memory, value), score in scores.items():
                if memory == name:
                    gains[value] = float(mix([plain, score], fit_weights([plain, score])).mean())
            best = max(gains, key=gains.__getitem__)
            chosen.append(scores[name, best])
            if name == "cache" and self.cache is not None and best is not None:
                self.cache.theta = best
            elif name == "mbpa" and self.mbpa is not None and best is not None:
                self.mbpa.descent = self.mbpa.descent._replace(lr=best)
            elif self.knn is not None:
                self.knn.bandwidth = best
        self.weights = fit_weights(chosen)
        return self._shares()

    # The model, and the disk

    def attach(self) -> None:
        """Go on with the model after `detach`."""
        self._network.attached = True

    def detach(self) -> None:
        """Leave the model alone: it answers as it did before, bit for bit, and this reads it no more until `attach`."""
        self._network.attached = False

    def close(self) -> None:
        """Detach the model, and let another process write to the memory, where it was opened."""
        self.detach()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save_pretrained(self, folder: str | PathLike[str], *, card: str | None = None) -> None:
        """Write the memory and all settings, without the model, to a folder; those of the same model are replaced.

        Args:
            folder: it is made. It has `language_model.json`, the files of `EpisodicMemory.save`, and a model card.
            card: the model card, `README.md`; None is a plain one, and leaves another that is there.

        Raises:
            MemoryFileError: the folder has the memory of another model or tokenizer, or a writer, or the disk refuses.
        """
        file.save(self, folder)
        words = (
            f"What a {type(self.model).__name__} has read: {len(self.store):,} positions, each a hidden state and the "
            "token after it. The model itself is not here, and must be the one that it was saved with. Whoever has "
            "both can tell much of the text."
        )
        code = (
            "from fastweights.memory import AdaptiveLanguageModel\n\n"
            f'lm = AdaptiveLanguageModel.from_pretrained(model, "{FOLDER}")'
        )
        put_card(folder, card, write_card("A language model's memory", words, code))

    @classmethod
    def from_pretrained(
        cls, model: nn.Module, name: str | PathLike[str], *, tokenizer: Any = None, **download: Any
    ) -> Self:
        """Load what `save_pretrained` or `push_to_hub` has written, for the same model; changes here stay here.

        Args:
            model: the model that it was saved with, with the same weights in the same precision.
            name: a folder, or "owner/name" on a hub.
            tokenizer: the model's; where one was there when it was saved, it must be the same.
            download: `revision`, `token`, `cache_dir` and `local_files_only` of a download.

        Raises:
            MemoryFileError: there is nothing, it is damaged, or of another model or tokenizer.
            HubError: there is neither a folder nor a repository of that name, or the hub cannot be reached.

        Examples:
            >>> import tempfile, torch, transformers
            >>> from fastweights import memory
            >>> config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
            >>> model, folder = transformers.GPT2LMHeadModel(config), tempfile.mkdtemp()
            >>> lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(1000, 50), weights=[0.9, 0.1])
            >>> lm.write(torch.randint(50, (1, 40)))
            >>> lm.save_pretrained(folder)
            >>> len(memory.AdaptiveLanguageModel.from_pretrained(model, folder).store)
            39
        """
        return file.load(cls, model, find_folder(name, **download), tokenizer, EpisodicMemory.load)

    @classmethod
    def open(cls, model: nn.Module, folder: str | PathLike[str], *, tokenizer: Any = None) -> Self:
        """Open what `save_pretrained` has written to change it: what `write` has remembered is on the disk.

        A kill loses nothing that `write` or `score` have returned from. One process at a time; use it in a `with`
        statement, or `close()` it. Settings change by `save_pretrained` alone.

        Raises:
            MemoryFileError: as `from_pretrained`, or there is another writer.
        """
        return file.load(cls, model, folder, tokenizer, EpisodicMemory.open)


def _log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p of targets [T] of logits [T,V], some at a time."""
    size = max(1, _PROBABILITIES // logits.shape[1])
    parts = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
    return torch.cat([-nn.functional.cross_entropy(some, words, reduction="none") for some, words in parts])


def _as_ids(given: Any) -> Tensor:
    """Return token ids as a tensor of integers."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"token ids must be integers, got {type(given).__name__}") from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"token ids must be integers, got {ids.dtype}")
    return ids
