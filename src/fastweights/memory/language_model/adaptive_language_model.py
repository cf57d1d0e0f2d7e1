"""A causal language model of transformers, adapted at test time from a memory of what it has read."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fastweights.checks import check_integers, check_sizes
from fastweights.hub import FOLDER, find_folder
from fastweights.memory.language_model import _file as file
from fastweights.memory.language_model._causal_model import (
    PROBABILITIES,
    CausalModel,
    Window,
    check_tokenizer,
    find_first_token,
    log_softmax,
)
from fastweights.memory.language_model._components import (
    check_readers,
    count_copied,
    make_components,
    make_default,
)
from fastweights.memory.language_model._fit import fit
from fastweights.memory.language_model._generation import generate
from fastweights.memory.predictors.caches import NeuralCache, UnboundedCache
from fastweights.memory.predictors.mixtures import mix
from fastweights.memory.predictors.ngram_cache import NGramCache
from fastweights.memory.predictors.past import Past
from fastweights.memory.predictors.predictor import Reader
from fastweights.memory.predictors.stream_mbpa import StreamMbPA
from fastweights.memory.store.checks import as_token_ids, check_prompts, check_texts, check_token_ids
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.saved import FILES, NOTHING, Saved

FEWEST_TOKENS = 50  # a shorter text says next to nothing of how a memory is to be weighed
_COPIED = 64  # tokens of which matches are compared where a text is copied
_FOLLOWED = 256  # entries of the memory that are copied at once


class AdaptiveLanguageModel(Saved):
    """A causal language model that remembers the text it reads, and predicts from the memory, too.

    The memory is a list of hidden states, the inputs of the model's output embedding, with the token that followed on
    each. Up to four predictors read it, and are mixed with the model itself:
    p = w_0 p_model + w_1 p_cache + w_2 p_mbpa + w_3 p_knn + w_4 p_ngram. They are the continuous cache of Grave et al.
    2016 (`NeuralCache`), memory-based parameter adaptation of Sprechmann et al. 2018 (`StreamMbPA`), the nearest
    neighbours of Khandelwal et al. 2020 (`UnboundedCache` with a bandwidth), and a cache of n-grams (`NGramCache`). A
    `Reader` of your own is mixed with them. A position is always scored before it is stored.

    The model itself is never changed: a hook at its output embedding, for the time of a call, is all that it gets. So
    this works for every model that has an output embedding, whatever it is made of, and
    in bfloat16 too. Memories raise recall of what was read, not reasoning; of a text that fits into the model's context
    they add little.

    Args:
        model: a causal language model of transformers.
        cache: a `NeuralCache` of the model's V classes; what it remembers is kept in step with `store`.
        mbpa: a `StreamMbPA` around `model.get_output_embeddings()`, with one step; kept in step as well.
        knn: an `UnboundedCache`, whose memory is `store`.
        ngram: an `NGramCache`, whose memory is `store` too. Where none of the four is given, and no reader, all are
            made: a cache of the last 2,000 positions, MbPA of the last 4,096 (fewer if their predictions took over half
            a GiB; those of the block that is scored come on top), kNN of the last 100,000, both with 64 neighbours, and
            n-grams of those.
        readers: predictors of your own, each a `Reader`, by names that the others do not have.
        weights: of the model, then of the memories that are given, in the order cache, mbpa, knn, ngram, then of the
            readers in theirs; their sum is 1. Of all that are made n-grams are left out where there is no weight for
            them. None: `fit` finds them.
        store: the memory; by default that of `knn` or `ngram`, else one in this process with room for the cache and
            MbPA, or for 100,000 positions if there are readers.
        tokenizer: the model's, for methods that are given text.
        bos_token_id: the token that every text of the model's training began with, such as Llama's and Gemma's: every
            window that is read gets it in front, unless it begins with it, and it is not scored. "auto": the one that
            `tokenizer` begins texts with, if it does. None: no such token.

    Attributes:
        store: the `EpisodicMemory` of hidden states [m,d] and next tokens [m]. It may be read, and what was written
            under a tag be undone, at any time.
        readers: those that were given.

    Raises:
        ValueError: no causal language model, memories of other sizes than the model's, readers without a method
            `recall` or with a name that is taken, weights that are no mixture, a tokenizer of another vocabulary, a
            `bos_token_id` that is no token, or hidden states that are not finite.

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
        >>> lm.generate(text[:, :3], min_new_tokens=5, max_new_tokens=5, pad_token_id=0).shape
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
        ngram: NGramCache | None = None,
        readers: Mapping[str, Reader] | None = None,
        weights: Sequence[float] | Tensor | None = None,
        store: EpisodicMemory | None = None,
        tokenizer: Any = None,
        bos_token_id: int | Literal["auto"] | None = "auto",
    ) -> None:
        self._network = network = CausalModel(model)
        self.model, self.tokenizer = model, tokenizer
        self.readers = check_readers(readers)
        given: dict[str, Any] = {"cache": cache, "mbpa": mbpa, "knn": knn, "ngram": ngram}
        if not self.readers and all(each is None for each in given.values()):
            given = make_default(network, store)
            if weights is not None and len(weights) == sum(each is not None for each in given.values()):
                given["ngram"] = None  # until there were n-grams, all were these
        self._components, self.store = make_components(network, given, self.readers, store)
        self.cache: NeuralCache | None = given["cache"]
        self.mbpa: StreamMbPA | None = given["mbpa"]
        self.knn: UnboundedCache | None = given["knn"]
        self.ngram: NGramCache | None = given["ngram"]
        self._forget()
        self.weights = weights
        if tokenizer is not None:
            check_tokenizer(tokenizer, self._network.classes)
        if bos_token_id == "auto":
            bos_token_id = find_first_token(tokenizer)
        if bos_token_id is not None:
            check_integers(0, bos_token_id=bos_token_id)
            if bos_token_id >= self.num_classes:
                raise ValueError(
                    f"bos_token_id must be one of the model's {self.num_classes} tokens, got {bos_token_id}"
                )
        self._network.bos_token_id = bos_token_id

    @property
    def weights(self) -> Tensor | None:
        """The weights of the mixture, float64: of the model, then of the memories that are given; None before `fit`."""
        return self._weights

    @weights.setter
    def weights(self, weights: Sequence[float] | Tensor | None) -> None:
        if weights is not None:
            weights = torch.as_tensor(weights, dtype=torch.float64)
            mix([torch.zeros(1)] * len(self.names), weights)  # refuses weights that cannot be
        self._weights = weights

    @property
    def settings(self) -> dict[str, float | None]:
        """The settings that `fit` chooses: theta of cache, rate of mbpa, bandwidth of knn, growth, prior of ngram."""
        return {name: value for each in self._components for name, value in each.settings.items()}

    @property
    def names(self) -> list[str]:
        """The predictors, in the order of the weights: "model", those of the four that are given, and the readers."""
        return ["model", *(each.name for each in self._components)]

    @property
    def num_classes(self) -> int:
        """The number of tokens that the model predicts, V."""
        return self._network.classes

    @property
    def longest(self) -> int | None:
        """The greatest number of tokens that the model reads at once; None if there is no limit."""
        return self._network.longest

    @property
    def bos_token_id(self) -> int | None:
        """The token that every window begins with; None if there is none."""
        return self._network.bos_token_id

    @property
    def attached(self) -> bool:
        """True until `detach`: the model is adapted."""
        return self._network.attached

    @property
    def memory_bytes(self) -> int:
        """The bytes of what the memories hold, the room for more included."""
        return self.store.nbytes + sum(copy.nbytes for copy in self._copies)

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
        input_ids: Any,
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
            input_ids: texts [B,T] of token ids; a string, which needs a tokenizer, is one text; or what the tokenizer
                returns of texts, ids and mask.
            attention_mask: [B,T], 0 where there is padding, on either side.
            remember: False to leave the memory as it was: then every row has one of its own, for the time of the call.
            context: the tokens that the model reads at once, `bos_token_id` among them, of a longer text one window
                after another; by default as many as it can.
            tag: a name under which `undo` takes back what is remembered.

        Returns:
            log p of each next token, in nats, [B,T-1] float32; 0 where there is padding.

        Raises:
            ValueError: no tokens of the model, rows of fewer than two tokens, hidden states that are not finite,
                weights of the mixture that were not fitted, weights of the model that were changed after the memory was
                written, or a reader that returns something else than log p of all tokens; nothing is remembered then.
            MemoryFileError: the disk refuses; nothing is remembered.
        """
        self._check_ready(context)
        found = self.score_each(input_ids, attention_mask, remember, context=context, tag=tag)
        return mix(list(found.values()), self._shares())

    @torch.no_grad()
    def score_each(
        self,
        input_ids: Any,
        attention_mask: Tensor | None = None,
        remember: bool = True,
        *,
        context: int | None = None,
        tag: str | None = None,
    ) -> dict[str, Tensor]:
        """Score as `score` does, in the same pass, but by the model and by each memory alone: needs no weights.

        Returns:
            log p of each next token, [B,T-1] float32, of "model", "cache", "mbpa", "knn" and "ngram", those that are
            given, and of each reader; minus infinity where a memory rules a token out.

        Raises:
            ValueError, MemoryFileError: as `score`.
        """
        input_ids, attention_mask = self._take_apart(input_ids, attention_mask)
        rows = check_texts(input_ids, attention_mask, self.num_classes, self._network.device)
        self._check_attached(context)
        self._follow()
        shape = len(rows), as_token_ids(input_ids).shape[1] - 1
        scores = {name: torch.zeros(shape, device=self._network.device) for name in self.names}
        texts, alone = [], remember and len(rows) == 1
        for row, (ids, places) in enumerate(rows):
            found, window = self._score_text(ids, context, stays=alone)
            for name, log_probs in found.items():
                scores[name][row, places[1:] - 1] = log_probs
            texts.append((window.keys, window.labels))
        if remember:
            self._remember(texts, tag, scored=alone)
        return scores

    def _score_text(self, ids: Tensor, context: int | None, *, stays: bool) -> tuple[dict[str, Tensor], Window]:
        """Return log p [T-1] of the model and of each predictor on a text [T], and its last window.

        Args:
            ids: the text.
            context: the tokens of a window.
            stays: whether the text is remembered: MbPA has it by scoring it.
        """
        scores: dict[str, list[Tensor]] = {name: [] for name in self.names}
        with contextlib.ExitStack() as stack:
            if stays:
                stack.callback(self._forget)  # an error leaves MbPA out of step
            else:
                for each in self._components:
                    stack.enter_context(each.rewinding(len(ids)))
            for window in self._windows(ids, context):
                for each in self._components:
                    scores[each.name].append(each.score(window))
                scores["model"].append(window.plain)
            if stays:
                stack.pop_all()
        return {name: torch.cat(parts).float() for name, parts in scores.items()}, window

    def _windows(self, ids: Tensor, context: int | None) -> Iterator[Window]:
        """Return the windows of a text, with as much of it before each position as the predictors look at."""
        reaches = [each.reach for each in self._components]
        known = [each for each in reaches if each is not None]
        return self._network.windows(ids, context, reach=max(known) if len(known) == len(reaches) else None)

    @torch.no_grad()
    def score_plain(self, input_ids: Any, *, context: int | None = None) -> Tensor:
        """Return what the model itself gives to each next token, log p [B,T-1] float32, read as `score` reads it.

        Raises:
            ValueError: as `score`.
        """
        rows = self._read_equal(input_ids)
        self._check_attached(context)
        windows = (window for ids, _ in rows for window in self._network.windows(ids, context))
        return torch.cat([window.plain for window in windows]).view(len(rows), -1).float()

    @torch.no_grad()
    def distribution(self, input_ids: Any, *, context: int | None = None) -> Tensor:
        """Return log p of all tokens after each token of texts [B,T]: [B,T-1,V] float32, each position's sum is one.

        Rows are as those of `score`, of one length; nothing is remembered.

        Raises:
            ValueError: as `score`.
        """
        rows = self._read_equal(input_ids)
        self._check_ready(context)
        self._follow()
        found = []
        size = max(1, PROBABILITIES // self._network.classes)
        for ids, _ in rows:
            predictions: list[Tensor] = []
            for window in self._network.windows(ids, context):
                if self.mbpa is not None:
                    predictions = [torch.cat([*predictions, self.mbpa.soften(window.logits)])]
                for some, past in window.parts(size):
                    past = past._replace(predictions=predictions[0] if predictions else None)
                    found.append(self.soften(window.h[some], window.logits[some], past))
        return torch.cat(found).view(len(rows), -1, self._network.classes).float()

    def generate(self, input_ids: Any = None, *, copy_after: int | None = None, **options: Any) -> Any:
        """Continue texts by the model's own `generate`, with all that it can do, from the mixture.

        Sequences see what the memory held before the call, and their own past: of a beam, its own; padding is not
        remembered. The processors that `generate` makes of its settings, such as penalties and temperature, come after
        the mixture. Nothing is remembered: `write` what is to stay.

        Args:
            input_ids: texts [B,T], a string, which needs a tokenizer, or what the tokenizer returns of texts.
            copy_after: where this many of the last tokens, or more, stand together in the memory, what followed on the
                longest match comes again, of 64 tokens at most. So lines are recalled word for word that the
                mixture, which must be right about new text too, continues in another way. None for the mixture alone.
            options: the other arguments of the model's `generate`.

        Raises:
            ValueError: `copy_after` out of range, weights that were not fitted, no tokens of the model, hidden states
                that are not finite, or a way to generate that is no part of transformers.
        """
        self._check_ready(None)
        self._follow()
        if input_ids is not None:
            options["inputs"], mask = self._take_apart(input_ids, options.get("attention_mask"))
            check_prompts(options["inputs"], self.num_classes)
            if mask is not None:
                options["attention_mask"] = mask
        predict = self.soften if copy_after is None else self._copy_after(copy_after)
        soften = None if self.mbpa is None else self.mbpa.soften
        return generate(self._network, predict, soften=soften, **options)

    def _copy_after(self, count: int) -> Callable[[Tensor, Tensor, Past], Tensor]:
        """Return what predicts as `soften` does, but where so many tokens match: there what followed them comes."""
        check_sizes(copy_after=count)
        if count > _COPIED:
            raise ValueError(f"copy_after must be at most {_COPIED}, got {count}")
        # The longest match counts more than all shorter ones together. The text that is being written is no source: it
        # would be copied again and again.
        matches = NGramCache(self.store, self.num_classes, order=_COPIED, growth=1000.0, prior=1.0)

        def predict(h: Tensor, logits: Tensor, past: Past) -> Tensor:
            each = self._predict(h, logits, past)
            copies = (matches.measure_longest(past) >= count).unsqueeze(1)
            copied = matches.recall(each[0], past, own=False).to(logits.dtype)
            return torch.where(copies, copied, mix(each, self._shares()))

        return predict

    def soften(self, h: Tensor, logits: Tensor, past: Past) -> Tensor:
        """Return log p of all tokens [Q,V], from hidden states [Q,d] and the model's logits there [Q,V]."""
        return mix(self._predict(h, logits, past), self._shares())

    def _predict(self, h: Tensor, logits: Tensor, past: Past) -> list[Tensor]:
        """Return log p of all tokens, [Q,V] each, of the model and of each predictor."""
        log_model = log_softmax(logits)
        found = [each.predict(h, logits, log_model, past) for each in self._components]
        return [each.to(logits.dtype) for each in (log_model, *found)]

    # Checks

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
            ValueError: an empty text, no tokens of the model, hidden states that are not finite, or weights of the
                model that were changed after the memory was written; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        ids = self._encode(text)
        self._check_attached(context)
        self._follow()
        for window in self._network.windows(ids, context, wants_logits=False):
            keys, labels = window.keys, window.labels  # of the last one those of all
        self._remember([(keys, labels)], tag, scored=False)

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

    @property
    def _copies(self) -> list[NeuralCache | StreamMbPA]:
        """The predictors that keep a copy of the memory's end, which `_follow` brings into step with it."""
        return [each.predictor for each in self._components if each.copies]

    def _copied_numbers(self) -> Tensor:
        """Return the numbers of the entries that the copies are to have, ascending."""
        numbers, most = self.store.numbers, count_copied(self._components)
        return numbers if most is None else numbers[max(0, len(numbers) - most) :]

    def _remember(self, texts: list[tuple[Tensor, Tensor]], tag: str | None, *, scored: bool) -> None:
        """Write the hidden states [n,d] and next tokens [n] of texts to the memory.

        Args:
            texts: states and tokens of each.
            tag: as of `EpisodicMemory.write`.
            scored: whether they are one text that was scored to stay; of others the next to read takes copies.
        """
        keys, labels = (torch.cat(part) for part in zip(*texts, strict=True))
        try:
            self.store.write(keys, labels, tag)
            if not scored:
                return
            for each in self._components:
                each.remember(keys, labels, scored=True)
            self._seen = self._copied_numbers()
            if any(len(copy) > len(self._seen) for copy in self._copies):
                self._forget()  # the memory has room for fewer: what it has lost they must not know either
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Empty the copies; the next to read fills them."""
        for copy in self._copies:
            copy.clear()
        self._seen = torch.empty(0, dtype=torch.int64)  # numbers of the entries that they have

    def _follow(self) -> None:
        """Bring the copies into step with a memory that was changed, undone or read again.

        Raises:
            ValueError: as `_check_weights`.
        """
        self._check_weights()
        with self.store.lock:
            numbers = self._copied_numbers()
            if torch.equal(numbers, self._seen):
                return
            old = numbers[numbers <= self._seen[-1]] if len(self._seen) else numbers[:0]
            if not (len(old) and torch.equal(old, self._seen[-len(old) :])):
                self._forget()
                old = numbers[:0]
            ring, first = self.store.entries(), len(self.store) - len(numbers) + len(old)
            for part in torch.split(torch.arange(first, len(self.store), device=self.store.device), _FOLLOWED):
                keys, labels = ring.keys_at(part).float(), ring.values_at(part).long()
                for each in self._components:
                    each.remember(keys, labels, scored=False)
            self._seen = numbers

    def _check_weights(self) -> None:
        """Refuse a memory that was written with other weights than the model has now."""
        if not self._network.changed():
            return
        if len(self.store):
            raise ValueError(
                f"the model's weights were changed, and the {len(self.store):,} entries of the memory are hidden "
                "states of those that it had: give the model its old weights back, undo() what was written, or make "
                "an AdaptiveLanguageModel with a new memory"
            )
        self._network.accept_weights()

    def _read_equal(self, texts: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens of texts of one length, and their places."""
        rows = check_texts(*self._take_apart(texts, None), self.num_classes, self._network.device)
        if len({len(ids) for ids, _ in rows}) > 1:
            raise ValueError(
                f"texts must have one length, got rows of {', '.join(str(len(ids)) for ids, _ in rows)} tokens without "
                "padding: give them one by one"
            )
        return rows

    def _take_apart(self, texts: Any, mask: Tensor | None) -> tuple[Any, Tensor | None]:
        """Return the token ids and the mask of texts: ids, a string, or what a tokenizer returns."""
        if isinstance(texts, str):
            return self._encode(texts, least=1).unsqueeze(0), mask
        if isinstance(texts, Mapping):
            return texts["input_ids"], texts.get("attention_mask") if mask is None else mask
        return texts, mask

    def _encode(self, text: Any, least: int = 2) -> Tensor:
        """Return the tokens of a text, [T]."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("a string needs the tokenizer: make the model with tokenizer=..., or give token ids")
            ids = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        else:
            ids = as_token_ids(text)
            ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or len(ids) < least:
            wanted = "one token" if least == 1 else "two tokens"
            raise ValueError(f"a text must have at least {wanted}, [T]; got {list(ids.shape)} of {str(text)[:40]!r}")
        return check_token_ids(ids, self.num_classes).to(self._network.device)

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
        """Choose all settings of the memories and the weights of the mixture on a validation text, in one pass.

        The text is read once, as `score` reads it, by every memory with all of its candidates side by side. Of each
        memory the candidate is taken that makes the text most likely in a mixture with the model; then the weights of
        all are fitted, those of readers too, as if each were right once more, so that of N tokens none of P predictors
        gets less than 1 / (N + P). Nothing is remembered.

        Args:
            text: a validation text: a string, or token ids [T] or [1,T]. Some thousand tokens are enough.
            thetas: candidates of the cache; by default 1 to 256 over the mean squared length of a hidden state.
            bandwidths: candidates of knn, None for the distance of the farthest neighbour; by default None, and those
                that fall off as the cache does.
            rates: candidates of MbPA's `lr`; by default 0.1 to 1,000 over that length.
            context: as of `score`; give what the model is to be used with.

        Returns:
            The weights, which are those of this model from now on, in the order of `names`.

        Warns:
            UserWarning: the text has fewer than 50 tokens.

        Raises:
            ValueError: as `score`, or candidates out of range.
        """
        ids = self._encode(text)
        self._check_attached(context)
        self._follow()
        windows = self._windows(ids, context)
        self.weights = fit(self._components, windows, len(ids), thetas=thetas, bandwidths=bandwidths, rates=rates)
        if len(ids) < FEWEST_TOKENS:
            warnings.warn(
                f"fit() chose by a text of {len(ids)} tokens, which says little: give at least {FEWEST_TOKENS}, better "
                "some thousand",
                stacklevel=2,
            )
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

    def save(self, path: str | PathLike[str], *, beside: Mapping[str, bytes] = NOTHING) -> None:
        """Write the memory and all settings, without the model, to a folder; those of the same model are replaced.

        Args:
            path: a folder; it is made. It has `language_model.json` and the files of `EpisodicMemory.save`.
            beside: other files of the folder, by name, which are replaced in the same step.

        Raises:
            ValueError: the model's weights were changed after the memory was written.
            MemoryFileError: the folder has the memory of another model or tokenizer, or a writer, or the disk refuses.
        """
        self._check_weights()
        file.save(self, self._network, self._components, path, beside)

    def _describe(self) -> tuple[str, str, str]:
        words = (
            f"The memory of a {type(self.model).__name__}: {len(self.store):,} positions that it has read, each a "
            "hidden state and the token after it. The model itself is not here, and must be the one that it was saved "
            "with. Whoever has both can tell much of the text."
        )
        own = ", ".join(f'"{name}": ...' for name in self.readers)
        readers = f", readers={{{own}}}" if own else ""
        code = (
            "from fastweights.memory import AdaptiveLanguageModel\n\n"
            f'lm = AdaptiveLanguageModel.from_pretrained(model, "{FOLDER}"{readers})'
        )
        return "A language model's memory", words, code

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        name: str | PathLike[str],
        *,
        tokenizer: Any = None,
        readers: Mapping[str, Reader] | None = None,
        **download: Any,
    ) -> Self:
        """Load what `save_pretrained` or `push_to_hub` has written, for the same model; changes here stay here.

        Args:
            model: the model that it was saved with, with the same weights in the same precision.
            name: a folder, or "owner/name" on a hub.
            tokenizer: the model's; where one was there when it was saved, it must be the same.
            readers: those that it was saved with, by their names: of them nothing else is saved.
            download: `revision`, `token`, `cache_dir` and `local_files_only` of a download.

        Raises:
            ValueError: readers without a method `recall`, or of a name that is taken.
            MemoryFileError: there is nothing, it is damaged, or of another model or tokenizer or other readers.
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
        folder = find_folder(name, (file.FILE, *FILES), **download)
        return file.load(cls, model, folder, tokenizer, readers, EpisodicMemory.load)

    @classmethod
    def open(
        cls,
        model: nn.Module,
        folder: str | PathLike[str],
        *,
        tokenizer: Any = None,
        readers: Mapping[str, Reader] | None = None,
    ) -> Self:
        """Open what `save_pretrained` has written to change it: what `write` has remembered is on the disk.

        A kill loses nothing that `write` or `score` have returned from. One process at a time; use it in a `with`
        statement, or `close()` it. Settings change by `save_pretrained` alone.

        Raises:
            ValueError: as `from_pretrained`.
            MemoryFileError: as `from_pretrained`, or there is another writer.
        """
        return file.load(cls, model, folder, tokenizer, readers, EpisodicMemory.open)
