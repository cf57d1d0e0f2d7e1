"""The model's own `generate`, with a mixture in place of what the model predicts at each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.memory.language_model._causal_model import CausalModel, check_states
from fastweights.memory.predictors.past import Past

Predict = Callable[[Tensor, Tensor, Past], Tensor]  # hidden states [Q,d], logits [Q,V], what they see -> log p [Q,V]


def generate(model: CausalModel, predict: Predict, *, soften: Callable[[Tensor], Tensor] | None, **options: Any) -> Any:
    """Call the model's own `generate`, with `predict` before its own processors of logits, such as penalties.

    A processor that a user gives to `generate` comes after those of its settings. So the way to decode that `generate`
    has chosen is wrapped, as it allows by `custom_generate`, and the mixture put first.

    Args:
        model: the model.
        predict: the mixture.
        soften: makes the softmax of logits [n,V] that `predict` reads of every position; None if it reads none.
        options: those of `generate`.
    """
    if options.get("inputs_embeds") is not None and options.get("inputs") is None:
        raise ValueError("the memory needs the tokens themselves: give input_ids, not inputs_embeds alone")
    from transformers import LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    # generate() keeps these from a decoding method that is not its own.
    of_method = {name: options[name] for name in ("streamer", "assistant_model") if options.get(name) is not None}
    of_method |= {name: options.pop(name) for name in ("tokenizer", "assistant_tokenizer") if name in options}
    if (stops := options.pop("stop_strings", None)) is not None:
        if of_method.get("tokenizer") is None:
            raise ValueError(f"stop_strings={stops!r} need the tokenizer: give it to generate()")
        criteria = options.get("stopping_criteria") or []
        stop = StopStringCriteria(of_method["tokenizer"], stops)
        options["stopping_criteria"] = StoppingCriteriaList([*criteria, stop])

    def decode(
        own: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **rest: Any
    ) -> Any:
        mode = generation_config.get_generation_mode(options.get("assistant_model"))
        method = GENERATION_MODES_MAPPING[mode]
        if "/" in method:
            raise ValueError(f"{mode.value} is no part of transformers itself any more: generate in another way")
        assisted = method == "_assisted_decoding"
        if assisted:
            rest["inputs_tensor"] = input_ids
        rest.pop("logits_to_keep", None)  # the memory needs all hidden states
        follower = _Follower(predict, rest.get("attention_mask"), assisted)

        def see_output(model: Any, inputs: Any, output: Any) -> None:
            assert soften is not None
            logits = output.logits.float()
            follower.see_predictions(soften(logits.flatten(0, 1)).view(logits.shape))

        hook = None if soften is None else own.register_forward_hook(see_output)

        def see(h: Tensor) -> Tensor:
            follower.see(h)
            return h if assisted or soften is not None else h[:, -1:]  # only the last one's logits are read

        try:
            with model.seeing(see):
                return getattr(type(own), method)(
                    own,
                    input_ids,
                    logits_processor=LogitsProcessorList([follower, *logits_processor, follower.end_step]),
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    **rest,
                    **of_method,
                )
        finally:
            if hook is not None:
                hook.remove()

    return model.model.generate(custom_generate=decode, **options)


class _Follower:
    """A processor of logits that keeps the past of every sequence: it follows beams as they branch and end."""

    def __init__(self, predict: Predict, mask: Tensor | None, assisted: bool) -> None:
        self.predict, self.mask, self.assisted = predict, mask, assisted
        self._new: list[Tensor] = []  # hidden states of the last pass, [R,n,d]
        self._new_predictions: list[Tensor] = []
        self._ids: Tensor | None = None  # [R,L]: the sequences at the last step
        self._states: Tensor | None = None  # [R,n,d], of the positions from _start on
        self._predictions = _Rows()
        self._places: Tensor | None = None  # [R,n], where in those each position's is
        self._start = 0  # more, where the user's own cache has the text before

    def see(self, h: Tensor) -> None:
        """Take the hidden states of a pass, [R,n,d]."""
        self._new.append(check_states(h.flatten(0, 1)).view(h.shape))

    def see_predictions(self, predictions: Tensor) -> None:
        """Take the model's softmax at the positions of a pass, [R,n,V]."""
        self._new_predictions.append(predictions)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return log p [R,V] of the next token of each sequence, from the model's logits or log p."""
        self._follow(input_ids)
        start, at = self._start, input_ids.shape[1] - 1 - self._start
        if self._states is None or at >= self._states.shape[1]:
            return scores  # they are a draft's: the model has not read it yet
        ages = torch.arange(at, 0, -1, device=self._states.device).repeat(len(input_ids), 1)
        if self.mask is not None:
            valid = self.mask[:, start : start + at].to(ages.device)
            ages[:, : valid.shape[1]] *= valid != 0
        past = Past(
            self._states[:, :at].flatten(0, 1),
            input_ids[:, start + 1 :].flatten().to(ages.device),
            torch.block_diag(*ages) if at else ages,  # type: ignore[no-untyped-call]
            None if self._places is None else self._predictions.rows,
            None if self._places is None else self._places[:, :at].flatten(),
        )
        return self.predict(self._states[:, at], scores, past).to(scores.dtype)

    def end_step(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Forget passes that other processors have made, as that of classifier-free guidance does: the last of them."""
        self._new, self._new_predictions = [], []
        return scores

    def _follow(self, ids: Tensor) -> None:
        """Take what the last pass of the model has seen, and give each sequence the past that it grew from."""
        if self._new:
            new, length = torch.cat(self._new, 1), ids.shape[1]
            predictions = torch.cat(self._new_predictions, 1) if self._new_predictions else None
            self._new, self._new_predictions = [], []
            # The last position is that of the last token; of a draft the first one is, once the prompt was read.
            start = length - new.shape[1]
            if self.assisted:
                start = 0 if self._states is None else length - 1
            whole = self._states is None or start <= self._start
            if whole:
                self._predictions.clear()
            places = None if predictions is None else self._predictions.append(predictions)
            if whole:
                self._start = start
            else:
                assert self._states is not None
                parents, kept = self._find_parents(ids[:, :start]), start - self._start
                new = torch.cat([self._states[parents, :kept], new], 1)
                if places is not None and self._places is not None:
                    places = torch.cat([self._places[parents, :kept], places], 1)
            self._states, self._places = new, places
        self._ids = ids

    def _find_parents(self, ids: Tensor) -> Tensor:
        """Return which sequence of the last step each one is the continuation of, [R]."""
        assert self._ids is not None
        same = (self._ids[:, None, : ids.shape[1]] == ids[None]).all(2)  # [before,now]
        if self.mask is not None:  # the same tokens are another text where other ones are padding
            same &= (self.mask[:, None] == self.mask[None]).all(2).to(same.device)
        rows = torch.arange(len(ids), device=ids.device)
        nearness = len(ids) - (rows[:, None] - rows).abs()  # among equal rows the one of the same text is nearest
        return (same * nearness).argmax(0)


class _Rows:
    """Predictions [N,V] that are added to one after another, and not moved for each: they are most of what is held."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self._count = 0

    @property
    def rows(self) -> Tensor:
        """The predictions that were added and not cleared, [N,V]."""
        assert self._room is not None
        return self._room[: self._count]

    def append(self, predictions: Tensor) -> Tensor:
        """Add predictions [R,n,V], and return which rows they are now, [R,n]."""
        added = predictions.flatten(0, 1)
        first, self._count = self._count, self._count + len(added)
        if self._room is None:
            self._room = added
        elif self._count > len(self._room):
            room = added.new_empty(2 * self._count, added.shape[1])
            room[:first] = self._room[:first]
            self._room = room
        self._room[first : self._count] = added
        return torch.arange(first, self._count, device=added.device).view(predictions.shape[:2])
