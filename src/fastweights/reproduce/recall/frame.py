"""The frame of Zoology, which every layer is compared in: embedding, two blocks of mixer and MLP, and a tied head.

Arora et al. 2024, "Zoology: measuring and improving recall in efficient language models". A block adds to the features
what its mixer makes of them over time, and then what its MLP makes of each step, both of normalised features.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import FastWeightProgrammer
from fastweights.nn.short_convolution import ShortConvolution

BLOCKS = 2
_STD = 0.02  # deviation of the frame's own initial weights, as in Zoology
STD_OUT = _STD / math.sqrt(2 * BLOCKS)  # smaller for the layers that add to the features, the more of them there are


class Mixer(nn.Module, ABC):
    """The part of a block that works over time: x [B,T,E] -> y [B,T,E], whose y at a step knows no later x."""

    @abstractmethod
    def state_size(self, steps: int) -> int | None:
        """Return how many numbers are handed from one step to the next, the last of so many; None: it is unknown."""


class Frame(nn.Module):
    """Tokens [B,T] -> logits [B,T,V], or numbers [B,T,D] -> [B,T,1]; of the marked steps alone [M,V] or [M,1].

    Args:
        mixers: makes the mixer of a block.
        vocabulary_size: V, of the tokens and of the answers.
        numbers: D, the numbers of a step in place of a token: an affine map embeds them, and another gives the answer.
        embedding_size: E, the features of a step.
        positions: the steps that have a learnt embedding of their place; 0 for mixers that know the order.
        mlp_multiple: the hidden units of an MLP for each feature; 0 leaves the MLPs out.
        dropout: of the embedding.
        block_dropout: of what each mixer and each MLP adds, and of what the head reads.
    """

    def __init__(
        self,
        mixers: Callable[[], Mixer],
        *,
        vocabulary_size: int = 0,
        numbers: int = 0,
        embedding_size: int,
        positions: int = 0,
        mlp_multiple: int = 4,
        dropout: float = 0.0,
        block_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        # Of numbers it starts as torch's do, with biases: the blocks' norms would take a number's size away.
        self.embedding: nn.Linear | nn.Embedding = (
            nn.Linear(numbers, embedding_size) if numbers else nn.Embedding(vocabulary_size, embedding_size)
        )
        self.positions = nn.Embedding(positions, embedding_size) if positions else None
        self.dropout = nn.Dropout(dropout)
        hidden = mlp_multiple * embedding_size
        self.blocks = nn.ModuleList(_Block(mixers(), embedding_size, hidden, block_dropout) for _ in range(BLOCKS))
        self.norm, self.last_dropout = nn.LayerNorm(embedding_size), nn.Dropout(block_dropout)
        self.head = linear(embedding_size, 1) if numbers else None
        for table in (self.embedding, self.positions):
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=_STD)

    def forward(self, inputs: Tensor, marked: Tensor | None = None) -> Tensor:
        return self.read(self.encode(inputs, marked))

    def encode(self, inputs: Tensor, marked: Tensor | None = None) -> Tensor:
        """Return what the head reads: [B,T,E], or of the marked steps alone [M,E]."""
        x = self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions.weight[: inputs.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        # A head of 8,192 tokens costs more than all before it: only where an answer is due.
        y: Tensor = self.last_dropout(self.norm(x if marked is None else x[marked]))
        return y

    def read(self, x: Tensor) -> Tensor:
        """Return the outputs of what `encode` gave: [...,E] -> [...,V] or [...,1]."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def state_size(self, steps: int) -> int | None:
        """Return how many numbers the mixers hand from one step to the next, the last of so many; None: unknown."""
        sizes = [block.mixer.state_size(steps) for block in self.blocks if isinstance(block, _Block)]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


class _Block(nn.Module):
    def __init__(self, mixer: Mixer, embedding_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.mixer, self.mixer_norm = mixer, nn.LayerNorm(embedding_size)
        self.dropout = nn.Dropout(dropout)
        self.mlp: nn.Sequential | None = None
        if hidden_size:
            layers = linear(embedding_size, hidden_size), nn.GELU(), linear(hidden_size, embedding_size, std=STD_OUT)
            self.mlp, self.mlp_norm = nn.Sequential(*layers), nn.LayerNorm(embedding_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.mixer(self.mixer_norm(x)))
        return x if self.mlp is None else x + self.dropout(self.mlp(self.mlp_norm(x)))


def linear(inputs: int, outputs: int, *, std: float = _STD) -> nn.Linear:
    """Return an affine map that starts as Zoology's do."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


def start_as_zoology(layer: FastWeightProgrammer) -> FastWeightProgrammer:
    """Start the affine maps of a layer as Zoology's do, but the decay's bias, which stays as the layer starts it."""
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=STD_OUT if part is layer.out_proj else _STD)
            if part is not layer.decay:
                nn.init.zeros_(part.bias)
    return layer


class Attention(Mixer):
    """Causal softmax attention: x [B,T,E] -> y [B,T,E].

    Args:
        embedding_size: E.
        heads: divide the features.
        convolution: the steps that a short convolution of queries, keys and values reads; 0 leaves it out.
    """

    def __init__(self, embedding_size: int, heads: int = 1, convolution: int = 0) -> None:
        super().__init__()
        if embedding_size % heads:
            raise ValueError(f"attention_heads must divide the {embedding_size} features, got {heads}")
        self.heads, self.convolution = heads, convolution
        self.into = linear(embedding_size, 3 * embedding_size)
        self.short = ShortConvolution(3 * embedding_size, convolution) if convolution else None
        self.out = linear(embedding_size, embedding_size, std=STD_OUT)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.into(x)
        if self.short is not None:
            mixed, _ = self.short(mixed)
        mixed = mixed.view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)  # [B,heads,T,K]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def state_size(self, steps: int) -> int | None:
        features = self.out.in_features
        return 2 * steps * features + 3 * features * max(0, self.convolution - 1)


class Recurrence(Mixer):
    """A recurrent layer whose outputs [B,T,H] are brought back to the features: x [B,T,E] -> y [B,T,E].

    Args:
        layer: x -> its outputs and its state, with the batch first.
        out: from the outputs to the features.
        embedding_size: E.
    """

    def __init__(self, layer: nn.Module, out: nn.Module, embedding_size: int) -> None:
        super().__init__()
        self.layer, self.out, self.embedding_size = layer, out, embedding_size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(x)[0])
        return y

    def state_size(self, steps: int) -> int | None:
        weight = next(self.layer.parameters())
        with torch.no_grad():
            return _count(self.layer(weight.new_zeros(1, 1, self.embedding_size))[1])


def _count(state: Tensor | tuple[Tensor, ...]) -> int:
    return state.numel() if isinstance(state, Tensor) else sum(map(_count, state))
