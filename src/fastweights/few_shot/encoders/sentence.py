"""The recurrent encoder of the few-shot networks (Munkhdalai & Trischler 2018, section 5.2)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fastweights.checks import check_sizes, is_integer
from fastweights.few_shot._layers import autocast_to_bfloat16
from fastweights.nn.compiler import outside_graphs, torch_func_is_active
from fastweights.ops.autocast import lstm_takes_bfloat16
from fastweights.pretrained import Pretrained

# A batch is cut into this many parts by length. Where the longest sentence has three times the mean length, that takes
# a quarter of the time.
_PARTS = 4


class SentenceEncoder(Pretrained, nn.Module):
    """Embeddings and an LSTM of several layers: sentences -> the top layer's state after the last word, or at a gap.

    It is the encoder of LSTM + fwMLP (Munkhdalai & Trischler 2018, table 5): two layers of 200 units for one shot, 300
    for two and three. Words are numbers from 1 on; a sentence is filled up with 0 on the right, which changes nothing.

    Our reading, where the paper leaves room: the LSTM reads left to right and is read once. What comes after the place
    where it is read changes nothing. The LSTM's weights are drawn as He et al. 2015, as the paper says of all weights;
    its biases are zero but for 1 at the forget gates, and embeddings are drawn from a standard normal distribution,
    both as the paper's framework does where it is told nothing else.

    Args:
        vocabulary_size: the number of words, padding (0) included.
        embedding_size: features of a word.
        hidden_size: H, units of a layer.
        num_layers: the number of layers of the LSTM.
        blank: the word that stands for one that is missing: the LSTM is read beside its first place; None reads after
            the last word of a sentence.
        read_after: so many words after the blank, or after the last word where the sentence ends before.
        half: compute in bfloat16 where that is safe (autocast): three to four times as fast on a processor that
            multiplies matrices of it (AMX), slow on others; without effect on one without AVX-512.

    Attributes:
        features: H, the width of the output.

    Raises:
        ValueError: a size less than 1; from the call, words of another shape, dtype or range, a sentence without words,
            0 before a word, or a sentence without a blank.

    Shapes: words [N,T] int64 -> [N,H].

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> encoder = few_shot.SentenceEncoder(vocabulary_size=10000)
        >>> encoder(torch.tensor([[17, 4, 9105, 23], [8, 12, 0, 0]])).shape    # four words, and two
        torch.Size([2, 200])
    """

    def __init__(
        self,
        vocabulary_size: int,
        *,
        embedding_size: int = 300,
        hidden_size: int = 200,
        num_layers: int = 2,
        blank: int | None = None,
        read_after: int = 0,
        half: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            vocabulary_size=vocabulary_size,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )
        if blank is not None and (not is_integer(blank) or not 0 < blank < vocabulary_size):
            raise ValueError(f"blank must be a word, 1 to {vocabulary_size - 1}, or None; got {blank!r}")
        if not is_integer(read_after) or read_after < 0 or (read_after and blank is None):
            raise ValueError(
                f"read_after must be an integer of 0 and up, and 0 without a blank to count from; got {read_after!r}"
            )
        self.features, self.blank, self.read_after, self.half_precision = hidden_size, blank, read_after, half
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, padding_idx=0)  # standard normal
        self.lstm = nn.LSTM(embedding_size, hidden_size, num_layers, batch_first=True)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.kaiming_normal_(parameter)
            else:
                nn.init.zeros_(parameter)
                if name.startswith("bias_ih"):
                    nn.init.ones_(parameter.chunk(4)[1])  # gates are in the order input, forget, cell, output

    def forward(self, words: Tensor) -> Tensor:
        lengths = self._lengths(words)
        if self.half_precision or torch_func_is_active():  # torch.func knows no packed sentences
            return self._in_parts(words, lengths)
        # Packed, no step is spent on padding. Beside the padded batch, on one core with 400 sentences of 22 words, the
        # longest of 80: a third of the time without gradients, four fifths with. The words are packed, not their
        # embeddings, which are 300 times as much.
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed._replace(data=self.embedding(packed.data)))
        top: Tensor = hidden[-1]
        return top

    def _in_parts(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Run the LSTM over padded parts of like lengths: in bfloat16 packed sentences are slower."""
        order = lengths.argsort()
        outputs = []
        for part in torch.split(order, math.ceil(len(order) / _PARTS)):
            part_lengths = lengths[part]
            with autocast_to_bfloat16(words.device, self.half_precision and lstm_takes_bfloat16(words.device.type)):
                states, _ = self.lstm(self.embedding(words[part, : int(part_lengths.max())]))
            outputs.append(
                states[torch.arange(len(part), device=words.device), part_lengths - 1].to(self.embedding.weight.dtype)
            )
        return torch.cat(outputs)[order.argsort()]

    @outside_graphs
    def _lengths(self, words: Tensor) -> Tensor:
        """Return how many words of each sentence the LSTM reads.

        Raises:
            ValueError: the words have another shape, dtype, range or order than the class documents.
        """
        if words.dim() != 2 or words.dtype != torch.int64 or words.numel() == 0:
            raise ValueError(
                f"words must be [N,T] int64, N and T at least 1: N sentences of T words or fewer, filled up with 0; "
                f"got {list(words.shape)} {words.dtype}"
            )
        least, most = (int(bound) for bound in words.aminmax())
        count = self.embedding.num_embeddings
        if least < 0 or most >= count:
            raise ValueError(f"words must lie between 0, for padding, and {count - 1}; got {least} to {most}")
        is_word = words != 0
        lengths = is_word.sum(1)
        if not lengths.all():
            raise ValueError(f"sentence {int(lengths.argmin())} is empty: give it at least one word")
        broken = (is_word[:, 1:] & ~is_word[:, :-1]).any(1)
        if broken.any():
            raise ValueError(
                f"a sentence's words must come before its padding of 0; sentence "
                f"{int(broken.int().argmax())} has 0 before a word"
            )
        if self.blank is None:
            return lengths
        is_blank = words == self.blank
        if not is_blank.any(1).all():
            raise ValueError(
                f"a sentence must have the blank, {self.blank}; sentence {int(is_blank.any(1).int().argmin())} has none"
            )
        return torch.minimum(is_blank.int().argmax(1) + 1 + self.read_after, lengths)
