"""The Triton kernels of the associative recurrence: checks every tensor, cuts time into chunks, launches.

A chunk is a run of steps that begins with the fast matrix M and reads it by attention (`_kernels.py`):

    A(t) v = decay^(k+1) M v + sum_{n <= k} rate decay^(k-n) h(n) (h(n).v),   k, n counted within the chunk.

The attention form is one chunk, with M the initial memory, if there is one. The matrix form is chunks of K steps, and
between them

    M' = decay^K M + rate sum_n decay^(K-1-n) h(n) h(n)^T,

one batched product; where a sequence restarts within the chunk, the sum begins there and M is left out. The backward
pass makes every M again from the outputs, forwards (no division by the decay), then goes through the chunks from the
last to the first: `recurrence` replays the inside of all steps at once, `gradients` goes back through them, and
products outside give the gradients of M, of what is written into it, and of W. Those products are PyTorch's own and
follow its setting of float32 precision (IEEE unless the user asked for less); in the kernels there is no TF32. Nothing
depends on the order in which programs run: the same bits every time.

Scratch, in elements: forward, (T+1) B H, and 2 B H^2 in the matrix form. Backward, T B H for the hidden states and
(4 S + 2) K B H for the inside of a chunk with S inner steps; in the matrix form also B H^2 T/K for the matrices M,
which with K = H or more is at most what the outputs take: never T H^2.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.ops._native import lay_out, lay_out_lengths
from fastweights.ops._triton import launching_on, power_of_two, require
from fastweights.ops.associative.reference import (
    FIXED,
    Constants,
    Inputs,
    clear,
    input_shapes,
    lay_out_flags,
    oldest_read,
)

FORMS = ("attention", "matrix")
SHORTEST_CHUNK = 64
SEGMENT = 8  # steps of a program that replays: they share its load of W and M


def choose_form(drive: Tensor, keep_memory: bool) -> str:
    """Return the form that was faster on an H100; up to as many steps as units the matrix form is attention too."""
    steps, _, size = drive.shape
    return "attention" if steps <= (256 if size <= SHORTEST_CHUNK else 128) else "matrix"


def forward(inputs: Inputs, constants: Constants, form: str) -> Tensor:
    """Run the kernel in the "attention" or the "matrix" form; the shapes are those of `reference.attention_form`."""
    call = _Call(inputs, constants, form)
    # Rows past a length are never written.
    outputs = torch.zeros_like(call.drive) if call.lengths is not None else torch.empty_like(call.drive)
    if outputs.numel() == 0:
        return outputs
    stored = call.drive.new_empty(call.steps + 1, call.batch, call.size)
    stored[0] = call.hidden
    start = call.memory
    with call.device:
        for first, count in call.chunks:
            call.recurrence(first, count, start, stored, outputs)
            if first + count < call.steps:
                start = call.advance(start, stored, first, count)
    return outputs


def backward(
    grad_outputs: Tensor, outputs: Tensor, inputs: Inputs, constants: Constants, form: str
) -> list[Tensor | None]:
    """Return the gradients of all inputs that have one, None for an input that is None."""
    call = _Call(inputs, constants, form)
    drive = call.drive
    shapes = {"grad_outputs": drive.shape, "outputs": drive.shape}
    grad_outputs, outputs = lay_out((grad_outputs, outputs), shapes, drive, "drive")
    if drive.numel() == 0:
        return [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs[:-FIXED]]
    with call.device:
        return call.gradients(grad_outputs, outputs, inputs.memory is not None)


def chunk_length(steps: int, size: int, form: str) -> int:
    """Return the steps of a chunk: all of them, or in the matrix form as many as the matrix has rows.

    Then attention within a chunk costs about as much as the matrix, and the matrices that the backward pass keeps take
    no more than the outputs.
    """
    return steps if form == "attention" else min(steps, max(size, SHORTEST_CHUNK))


def options(
    size: int,
    dtype: torch.dtype,
    constants: Constants,
    *,
    norm: bool,
    memory: bool,
    strengths: bool,
    lengths: bool,
    starts: bool,
    clears: bool,
) -> dict[str, Any]:
    """Return the constants that both kernels are compiled for; the flags say which inputs are there."""
    block = power_of_two(size)
    return {
        "SIZE": size,
        "BLOCK": block,
        "ROWS": 32 if block <= 128 else 16,
        "TANH": constants.nonlinearity == "tanh",
        "NORM": norm,
        "NORM_INITIAL": norm and constants.normalize_initial,
        "MEMORY": memory,
        "STRENGTHS": strengths,
        "LENGTHS": lengths,
        "STARTS": starts,
        "CLEARS": clears,
        # W and M stay in registers where each takes up to 64 KiB; else they come from L2, this many rows at a time.
        "PANEL": block if block * block * dtype.itemsize <= 65536 else max(1, 65536 // (block * dtype.itemsize)),
        "num_warps": 4 if block <= 64 else 8 if block <= 128 else 16,
        "num_stages": 1,
        "enable_fp_fusion": True,  # a product and its sum rounded once: Triton's default changes with its versions
    }


class _Call:
    """The inputs as the kernels take them, contiguous and of fitting shapes, and how to launch."""

    def __init__(self, inputs: Inputs, constants: Constants, form: str) -> None:
        drive = inputs.drive
        require(drive)
        check_choice(FORMS, form=form)
        tensors = lay_out(inputs[:-FIXED], input_shapes(inputs), drive, "drive")
        self.drive, self.weight_hh, self.gain, self.bias, self.hidden, self.memory, self.strengths = tensors
        self.starts, self.clears = lay_out_flags(inputs)
        self.oldest = None if self.starts is None else oldest_read(self.starts).int()
        steps, batch, size = self.steps, self.batch, self.size = drive.shape
        lengths = lay_out_lengths(inputs.lengths, batch, None, drive.device)
        if steps * constants.inner_steps >= 2**31:
            raise ValueError(
                f"T times inner_steps must stay below 2^31 in the triton kernel, got {steps} x {constants.inner_steps}"
            )
        self.lengths, self.constants = lengths, constants

        length = max(1, chunk_length(steps, size, form))
        self.chunks = [(first, min(length, steps - first)) for first in range(0, steps, length)]
        if self.memory is None and len(self.chunks) > 1:
            self.memory = drive.new_zeros(batch, size, size)
        # In double for every dtype: a small error in the decay becomes a large one in its powers.
        powers = torch.pow(constants.decay, torch.arange(length + 1, dtype=torch.float64, device=drive.device))
        self.weights = (constants.rate * powers[:-1]).to(drive.dtype)
        self.kept = powers[1:].to(drive.dtype)
        self.device = launching_on(drive)

        self.options = options(
            size,
            drive.dtype,
            constants,
            norm=self.gain is not None,
            memory=self.memory is not None,
            strengths=self.strengths is not None,
            lengths=lengths is not None,
            starts=self.starts is not None,
            clears=self.clears is not None,
        )

    def recurrence(
        self, first: int, count: int, memory: Tensor | None, stored: Tensor, outputs: Tensor, *inside: Tensor
    ) -> None:
        """Run one chunk forwards from the first of its `stored` hidden states, or replay it into `inside`."""
        from fastweights.ops.associative import _kernels

        segment = SEGMENT if inside else count
        _kernels.recurrence[(self.batch * -(-count // segment),)](
            self.drive,
            self.weight_hh,
            *(self._or_drive(tensor) for tensor in (self.gain, self.bias, memory)),
            stored,
            *self._steps(),
            self.weights,
            self.kept,
            outputs,
            *(inside or (self.drive,) * 3),
            first,
            count,
            self.batch,
            self.constants.inner_steps,
            segment,
            self.chunks[0][1],
            EPS=self.constants.eps,
            REPLAY=bool(inside),
            **self.options,
        )

    def _or_drive(self, tensor: Tensor | None) -> Tensor:
        return self.drive if tensor is None else tensor  # some pointer, which the kernel's options keep it from using

    def _steps(self) -> tuple[Tensor, ...]:
        return tuple(map(self._or_drive, (self.strengths, self.lengths, self.oldest, self.clears)))

    def written(self, stored: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states that a chunk writes into the next M [B,K,H], and what each weighs, [K,1]."""
        rows = stored[first : first + count].transpose(0, 1)
        if self.oldest is not None:
            index = torch.arange(first, first + count, device=rows.device)
            rows = clear(index < self.oldest[first + count - 1].unsqueeze(1), rows)
        return rows, self.weights[:count].flip(0).unsqueeze(1)

    def strengthen(self, weights: Tensor, first: int, count: int) -> Tensor:
        """Multiply the weights [K,1] of a chunk's hidden states by their strengths, to [B,K,1] where there are any."""
        if self.strengths is None:
            return weights
        strengths: Tensor = self.strengths[first : first + count].T.unsqueeze(2)
        return weights * strengths

    def carry_over(self, memory: Tensor, first: int, count: int) -> Tensor:
        """Return M, or its gradient, with zeros where a sequence restarts within the chunk."""
        if self.oldest is None:
            return memory
        read_from = self.oldest[first + count - 1]
        return clear(read_from > first, memory)

    def advance(self, memory: Tensor | None, stored: Tensor, first: int, count: int) -> Tensor:
        """Return M at the end of a chunk, whose hidden states are `stored` from `first` on."""
        assert memory is not None
        rows, weights = self.written(stored, first, count)
        weighted = rows * self.strengthen(weights, first, count)
        memory = self.carry_over(memory, first, count)
        return torch.baddbmm(memory, weighted.mT, rows, beta=self.constants.decay**count).contiguous()

    def gradients(self, grad_outputs: Tensor, outputs: Tensor, has_memory: bool) -> list[Tensor | None]:
        from fastweights.ops.associative import _kernels

        inner, (_, length) = self.constants.inner_steps, self.chunks[0]
        stored = torch.cat([self.hidden.unsqueeze(0), outputs[:-1]])
        starts = [self.memory]
        for first, count in self.chunks[:-1]:
            starts.append(self.advance(starts[-1], stored, first, count))

        # Rows past a length are never written, and the sums over a chunk below must not see them: they stay zero, since
        # from the last chunk to the first such rows only become fewer.
        states = self.drive.new_zeros(self.batch, length, inner, self.size)
        grad_reads = torch.zeros_like(states)
        slots = inner + 1 if self.gain is not None else 0
        normals = self.drive.new_empty(self.batch, length, slots, self.size)
        inside = (states, normals, normals.new_empty(normals.shape[:-1]))
        written = self.drive.new_zeros(self.batch, length, self.size) if len(self.chunks) > 1 else None
        grad_drive = torch.zeros_like(self.drive) if self.lengths is not None else torch.empty_like(self.drive)
        grad_norm = self.drive.new_empty(len(self.chunks), 2, self.batch, self.size)
        grad_strengths = None if self.strengths is None else torch.zeros_like(self.strengths)
        carry = torch.zeros_like(self.hidden)
        grad_memory: Tensor | None = None
        for chunk, (first, count) in reversed(list(enumerate(self.chunks))):
            of_strengths: Tensor | None = None  # the part of the gradient that comes from later chunks
            if grad_memory is not None:
                rows, weights = self.written(stored, first, count)
                read = rows @ (grad_memory + grad_memory.mT)
                written = (self.strengthen(weights, first, count) * read).contiguous()
                of_strengths = (weights * rows * read).sum(2).T / 2
            self.recurrence(first, count, starts[chunk], stored, outputs, *inside)
            _kernels.gradients[(self.batch,)](
                grad_outputs,
                outputs,
                self.weight_hh,
                self._or_drive(self.gain),
                self._or_drive(starts[chunk]),
                stored,
                *self._steps(),
                self.weights,
                self.kept,
                *inside,
                self._or_drive(written),
                grad_reads,
                grad_drive,
                grad_norm,
                self._or_drive(grad_strengths),
                carry,
                chunk,
                first,
                count,
                self.batch,
                inner,
                length,
                WRITTEN=written is not None,
                **self.options,
            )
            if grad_strengths is not None and of_strengths is not None:
                grad_strengths[first : first + count] += of_strengths
            if has_memory or chunk > 0:
                asked = self.kept.view(-1, 1, 1) * grad_reads
                if self.oldest is not None:
                    read_from = self.oldest[first : first + count].T
                    asked[:, :count] = clear(read_from > first, asked[:, :count])
                answer = asked.flatten(1, 2).mT @ states.flatten(1, 2)
                if grad_memory is not None:
                    answer += self.constants.decay**count * self.carry_over(grad_memory, first, count)
                grad_memory = answer
        for flags in (self.starts, self.clears):  # steps that W did not see have no part in its gradient
            stored = stored if flags is None else clear(flags, stored)
        grad_weight = grad_drive.flatten(0, 1).T @ stored.flatten(0, 1)
        normed = self.gain is not None  # two sums, because results may not share memory
        grad_gain, grad_bias = (grad_norm[:, i].sum((0, 1)) if normed else None for i in range(2))
        of_memory = grad_memory if has_memory else None
        return [grad_drive, grad_weight, grad_gain, grad_bias, carry, of_memory, grad_strengths]
