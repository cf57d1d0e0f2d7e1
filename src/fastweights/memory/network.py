"""A trained network that is read and told from others, never changed."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.errors import one_line
from fastweights.nn.modes import evaluating


def check_network(body: nn.Module, head: nn.Module | None) -> None:
    """Refuse a body that is no module, or a head that is none.

    Raises:
        ValueError: one of them is something else, such as a function.
    """
    if not isinstance(body, nn.Module):
        raise ValueError(f"body must be a torch.nn.Module, got {body!r}: wrap a function in one")
    if head is not None and not isinstance(head, nn.Module):
        raise ValueError(f"head must be a torch.nn.Module or None, got {head!r}: wrap a function in one")


class Network:
    """A body, which makes features [B,d] from a batch, and a head that makes logits [B,V] of them, or None."""

    def __init__(self, body: nn.Module, head: nn.Module | None, classes: int) -> None:
        check_network(body, head)
        self.body, self.head, self.classes = body, head, classes

    @torch.no_grad()
    def read(self, inputs: Any, width: int | None, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the features and the logits of a batch, on the CPU, after checking them.

        Args:
            inputs: one batch for the body.
            width: d, or None if any will do.
            first: how many inputs came before this batch.
        """
        with evaluating(self.body):
            try:
                features = self.body(inputs)
            except (AttributeError, TypeError) as error:
                if not isinstance(inputs, list | tuple) or not inputs:
                    raise
                raise ValueError(
                    f"body cannot take a list of {type(inputs[0]).__name__}: {one_line(error)}; give a tensor, or "
                    "transform=, which makes one of each item"
                ) from error
        if not isinstance(features, Tensor):
            hint = ", which are its inputs: give it tensors" if features is inputs else ""
            raise ValueError(f"body must return a tensor of features [B,d], got a {type(features).__name__}{hint}")
        if features.is_complex():
            raise ValueError(f"body must return features that are real numbers, got {features.dtype}")
        if features.dim() != 2 or (width is not None and features.shape[1] != width):
            raise ValueError(f"body must return features [B,{width or 'd'}], got {list(features.shape)}")
        logits = self._answer(features)
        features = features.detach().cpu()
        finite = features.isfinite().all(1)
        if logits is not None:
            finite &= logits.isfinite().all(1)
        if not bool(finite.all()):
            raise ValueError(f"the network's output is not finite for input {first + int((~finite).nonzero()[0])}")
        return features.float(), logits

    @torch.no_grad()
    def answer(self, features: Tensor) -> Tensor:
        """Return the logits [n,V] float64 of features that were read before, of no columns where there is no head."""
        if self.head is None or not len(features):
            return features.new_zeros(len(features), 0 if self.head is None else self.classes, dtype=torch.float64)
        weight = next((each for each in self.head.parameters() if each.is_floating_point()), features)
        logits = self._answer(features.to(weight.device, weight.dtype))
        assert logits is not None
        return logits.double()

    def _answer(self, features: Tensor) -> Tensor | None:
        if self.head is None:
            return None
        try:
            with evaluating(self.head):
                logits = self.head(features)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of other widths or dtypes than the head was made for
            raise ValueError(
                f"head cannot take the features [B,{features.shape[1]}] of {features.dtype} that body returns: "
                f"{one_line(error)}"
            ) from error
        if not isinstance(logits, Tensor) or logits.shape != (len(features), self.classes):
            shape = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"head must return logits [B,{self.classes}], one for each of classes; got {shape} for "
                f"{len(features)} inputs"
            )
        return logits.detach().cpu()

    def fingerprint(self) -> str:
        """Return a checksum over the kinds of all modules and all weights."""
        digest = hashlib.sha256()
        for part in self._parts():
            for name, module in part.named_modules():
                digest.update(f"{name} {type(module).__qualname__}\n".encode())
            for name, tensor in part.state_dict().items():
                if isinstance(tensor, Tensor):
                    whole = tensor.detach().cpu().contiguous()
                    digest.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
                    digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def versions(self) -> list[tuple[int, int]]:
        """Return what changes, in nearly every way of changing weights, when a weight does: cheaper than a checksum."""
        return [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for _, tensor in self._named_tensors()
        ]

    def glance(self) -> list[tuple[str, str]]:
        """Return some numbers of every weight, spread over it: cheaper than a checksum, and any training changes them.

        A copy of the weights on another device has the same; of a weight that is kept elsewhere there are none.
        """
        return [(name, _glance(tensor)) for name, tensor in self._named_tensors()]

    def marks(self) -> tuple[list[tuple[int, int]], list[tuple[str, str]]]:
        """Return `versions` and `glance`: writing to `.data` changes no version, but nearly always some numbers."""
        return self.versions(), self.glance()

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        found = [item for part in self._parts() for item in part.state_dict().items()]
        return [(name, tensor) for name, tensor in found if isinstance(tensor, Tensor)]

    def _parts(self) -> list[nn.Module]:
        """Return body and head; a part that torch.compile has wrapped has the weights of the one inside."""
        return [getattr(part, "_orig_mod", part) for part in (self.body, self.head) if part is not None]


def _glance(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    flat = (tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()).reshape(-1)
    return f"{tensor.dtype} {list(tensor.shape)} {flat[:: len(flat) // 64 + 1].tolist()}"
