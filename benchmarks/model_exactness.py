"""How exact whole models of transformers are with our kernels: python benchmarks/model_exactness.py [MODEL ...].

Each model of `fastweights bench gated-models`, with 512 and with 1,024 hidden units, computes with our kernels, with
transformers' own functions, and with these in double precision. Two texts of 130 tokens, the first padded on the left,
give logits and the gradient of every weight, once more under checkpoints and under torch.compile; then each continues
two padded prompts, greedily and with beams, with the cache and without. A line for each model goes to
benchmarks/model_exactness.csv; docs/fill.py makes the table of the guide of it.
"""

import argparse
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastweights.bench.gated_models import MADE, load
from fastweights.bench.parity import distance
from fastweights.bench.run import append_csv, machine_columns
from fastweights.integrations.transformers import patch_transformers

STEPS, PADDED = 130, 30  # tokens of a text, and how many of the first text's are padding
PROMPT, TOKENS = 20, 64  # tokens of a prompt, and tokens that continue it
BEAMS = 4
Gradients = dict[str, Tensor]


class InDouble(TorchFunctionMode):
    """A mode in which what asks for single precision gets double precision."""

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function is torch._grouped_mm:  # which has no double precision
            return torch.ops.transformers.grouped_mm_fallback(*arguments, offs=(options or {})["offs"])
        wider = {torch.float32: torch.float64}
        arguments = [wider.get(each, each) if isinstance(each, torch.dtype) else each for each in arguments]
        options = {
            name: wider.get(each, each) if isinstance(each, torch.dtype) else each
            for name, each in (options or {}).items()
        }
        return function(*arguments, **options)


def draw_texts(steps: int, padded: int) -> dict[str, Tensor]:
    """Return two texts [2,steps] and their mask, the first with padding on its left."""
    ids = torch.randint(3, 1000, (2, steps), generator=torch.Generator().manual_seed(steps))
    mask = torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def train(model: Any, forward: Callable[..., Any] | None = None) -> tuple[Tensor, Gradients]:
    """Return the logits of what is no padding, and the gradient of every weight."""
    texts = draw_texts(STEPS, PADDED)
    real = texts["attention_mask"].bool()
    labels = texts["input_ids"].where(real, -100)
    results = (model if forward is None else forward)(**texts, labels=labels, use_cache=False)
    results.loss.backward()
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    model.zero_grad()
    return results.logits.detach()[real], gradients


def train_in_double(model: Any) -> tuple[Tensor, Gradients]:
    """Do the same in double precision, with transformers' own functions; the model is as before afterwards."""
    own = {name: part.data for name, part in (*model.named_parameters(), *model.named_buffers())}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with InDouble():
            return train(model.double())
    finally:
        torch.set_default_dtype(default)
        for name, part in (*model.named_parameters(), *model.named_buffers()):
            part.data = own[name]


@contextlib.contextmanager
def checkpoints(model: Any) -> Iterator[None]:
    """Let a model compute each layer again in the backward pass, and see that it does."""
    calls: Counter[nn.Module] = Counter()
    hooks = [part.register_forward_hook(lambda part, *_: calls.update([part])) for part in model.modules()]
    model.train()  # without it transformers keeps everything
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        for hook in hooks:
            hook.remove()
    if 2 not in calls.values():
        raise SystemExit("no layer is computed twice: there are no checkpoints")


def worst(gradients: Gradients, right: Gradients) -> tuple[float, str]:
    """Return the largest difference of a weight's gradient, of its norm, and the weight's name; NaN is the largest."""
    found = [(distance(gradients[name], right[name].double()), name) for name in right if right[name].norm() > 0]
    return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def whole(gradients: Gradients, right: Gradients) -> float:
    """Return the difference of the gradient of all weights together, of its norm."""
    ours, theirs = (torch.cat([each[name].double().flatten() for name in right]) for each in (gradients, right))
    return distance(ours, theirs)


def continue_prompts(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the continuations [2,steps] by their kind, and the logits of the greedy one."""
    options = draw_texts(PROMPT, PROMPT // 3) | {
        "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    greedy = model.generate(**options, output_logits=True, return_dict_in_generate=True)
    continued = {
        "greedy": greedy.sequences,
        "without_cache": model.generate(**options, use_cache=False),
        "beams": model.generate(**options, num_beams=BEAMS),
    }
    return continued, torch.stack(greedy.logits)


def same(ours: Tensor, theirs: Tensor) -> int:
    """Return how many tokens of the continuations, in both texts, are the same before the first that differs."""
    differs = (ours != theirs).any(0)
    return (int(differs.int().argmax()) if differs.any() else ours.shape[1]) - PROMPT


def measure(name: str) -> dict[str, Any]:
    model = load(name)
    theirs = train(model)
    exact = train_in_double(model)
    with patch_transformers():
        ours = train(model)
        with checkpoints(model):
            recomputed = train(model)
        torch.compiler.reset()  # of so many models torch would compile the first alone
        compiled = train(model, torch.compile(model))
        continued, logits = continue_prompts(model)
    expected, right = continue_prompts(model)
    (ours_worst, ours_name), (theirs_worst, theirs_name) = (worst(each[1], exact[1]) for each in (ours, theirs))
    errors = {
        "logits": distance(ours[0], theirs[0].double()),
        "gradient": whole(ours[1], exact[1]),
        "gradient_transformers": whole(theirs[1], exact[1]),
        "worst": ours_worst,
        "worst_weight": ours_name,
        "worst_transformers": theirs_worst,
        "worst_weight_transformers": theirs_name,
        "checkpointed": worst(recomputed[1], ours[1])[0],
        "compiled": worst(compiled[1], ours[1])[0],
        "logits_of_tokens": distance(logits, right.double()),
    }
    if not all(torch.tensor([each for each in errors.values() if isinstance(each, float)]).isfinite()):
        raise SystemExit(f"{name}: a number is not finite: {errors}")
    tokens = {kind: same(each, expected[kind]) for kind, each in continued.items()}
    return {name: float(f"{each:.2e}") if isinstance(each, float) else each for name, each in errors.items()} | tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the bench, by default all", default=[*MADE])
    for name in parser.parse_args().models:
        row = {"model": name, "tokens": TOKENS, **measure(name)}
        print(row, flush=True)
        append_csv(Path(__file__).with_suffix(".csv"), [machine_columns() | row])


if __name__ == "__main__":
    main()
