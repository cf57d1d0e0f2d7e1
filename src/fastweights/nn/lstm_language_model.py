"""A language model of LSTM layers, with the dropout of Melis et al. 2017 and a plain or a Hebbian softmax."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_dropout, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._lstm import LSTM, LSTMState, draw_mask
from fastweights.nn._recurrent import Recurrent, check_lengths, mask_of
from fastweights.nn.hebbian_softmax import HebbianSoftmax
from fastweights.nn.hebbian_softmax.loss import IGNORED, check_inputs, cross_entropy, flatten

_LSTM = LSTM  # as pickles name it that were written when the layer stood here


class LSTMLanguageModelState(LSTMState):
    """The state of a language model between two pieces of a text: `hidden, cell = state`.

    Attributes:
        hidden: [layers,B,H].
        cell: [layers,B,H].
    """


class LSTMLanguageModel(Recurrent[LSTMLanguageModelState]):
    """Predict each next token of a text: embedding, LSTM layers, a projection and a softmax over the vocabulary.

    The softmax shares the embedding's weights (Press & Wolf 2017; Inan et al. 2017), and its input h is what a cache
    or MbPA remembers: `encode` gives it. With `embedding_size=268, hidden_size=1194` and 10,000 tokens it is the model
    of Sprechmann et al. 2018, appendix B: 9,997,280 parameters. All dropout is as Melis et al. 2017 have it: a mask is
    drawn for a sequence and kept over its steps, but for the softmax's, which is drawn for each token. A call is one
    such sequence. Evaluation mode drops nothing.

    Args:
        vocabulary_size: V, the number of tokens.
        embedding_size: E, the features of a token, and of the input of the softmax where they share weights.
        hidden_size: H, the units of a layer; a projection follows where H is not E.
        num_layers: the number of layers on top of one another.
        tied: the softmax and the embedding share one weight [V,E].
        embedding_dropout: the probability that a token of the vocabulary is dropped wherever it stands (Gal &
            Ghahramani 2016).
        input_dropout: the probability of dropout on the first layer's inputs.
        layer_dropout: the probability of dropout between two layers.
        state_dropout: the probability of dropout on the hidden state that a step reads.
        output_dropout: the probability of dropout on the input of the softmax.
        layer_norm: normalise the gates and the cell of each layer (Ba, Kiros & Hinton 2016), as Rae et al. 2018 do.
        hebbian: arguments of a `HebbianSoftmax` such as `{"gamma": 0.1, "limit": 500}`; None for a plain softmax.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        embedding: `torch.nn.Embedding`, weight [V,E].
        layers: the LSTM layers, which compute `fastweights.ops.lstm.lstm`; each has weight_ih [4H,D], weight_hh [4H,H]
            and bias [4H], in torch's order of gates.
        projection: `torch.nn.Linear` without bias, weight [E,H], or None.
        head: the softmax, weight [V,E] and bias [V]: a `torch.nn.Linear` or a `HebbianSoftmax`.

    Raises:
        ValueError: a size is not an integer of at least 1, a probability is not one of at least 0 and less than 1, or
            `HebbianSoftmax` refuses its arguments.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> model = nn.LSTMLanguageModel(10_000, embedding_size=64, hidden_size=128, output_dropout=0.5)
        >>> tokens = torch.randint(10_000, (36, 8))          # [T+1,B]: eight pieces of text side by side
        >>> loss, state = model.loss(tokens[:-1], tokens[1:])  # the mean over all tokens, in nats
        >>> loss.backward()
        >>> logits, state = model.eval()(tokens[:1], state.detach())
        >>> logits.shape, state.hidden.shape                 # [T,B,V], [layers,B,H]
        (torch.Size([1, 8, 10000]), torch.Size([1, 8, 128]))
        >>> rare = nn.LSTMLanguageModel(10_000, 64, 128, hebbian={"gamma": 0.1, "limit": 100})
        >>> handle = rare.head.attach(torch.optim.Adam(rare.parameters()))  # every step smooths the words of its batch
    """

    _state_type = LSTMLanguageModelState
    _batch_axis = 1

    def __init__(
        self,
        vocabulary_size: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        tied: bool = True,
        embedding_dropout: float = 0.0,
        input_dropout: float = 0.0,
        layer_dropout: float = 0.0,
        state_dropout: float = 0.0,
        output_dropout: float = 0.0,
        layer_norm: bool = False,
        hebbian: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(
            vocabulary_size=vocabulary_size,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )
        check_dropout(
            embedding_dropout=embedding_dropout,
            input_dropout=input_dropout,
            layer_dropout=layer_dropout,
            state_dropout=state_dropout,
            output_dropout=output_dropout,
        )
        self.vocabulary_size, self.embedding_size, self.hidden_size = vocabulary_size, embedding_size, hidden_size
        self.num_layers, self.tied, self.layer_norm = num_layers, tied, layer_norm
        self.embedding_dropout, self.input_dropout, self.layer_dropout = embedding_dropout, input_dropout, layer_dropout
        self.output_dropout = output_dropout
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, **options)
        widths = [embedding_size, *[hidden_size] * (num_layers - 1)]
        chosen = {"layer_norm": layer_norm, "state_dropout": state_dropout, **options}
        self.layers = nn.ModuleList(LSTM(width, hidden_size, **chosen) for width in widths)
        self.projection = (
            None if hidden_size == embedding_size else nn.Linear(hidden_size, embedding_size, bias=False, **options)
        )
        self.head: nn.Linear | HebbianSoftmax
        if hebbian is None:
            self.head = nn.Linear(embedding_size, vocabulary_size, **options)
        else:
            arguments = {"bias": True, "dropout": output_dropout} | hebbian
            self.head = HebbianSoftmax(embedding_size, vocabulary_size, **arguments, **options)
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters: embeddings uniform within 0.1, no bias of the softmax, layers as `torch.nn.LSTM`'s."""
        for part in (*self.layers, self.head, self.projection):
            if part is not None:
                part.reset_parameters()
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def forward(
        self,
        tokens: Tensor,
        state: LSTMLanguageModelState | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the logits of each next token, and the state.

        Args:
            tokens: [T,B] int64; whatever stands past a length is not read.
            state: where the piece before ended; None starts from zeros.
            lengths: the tokens of each text, [B] integers from 0 to T; a text of 0 tokens keeps its state.
            starts: the tokens before which another text begins, bool [T,B]: the state is zeros there, and no gradient
                goes further back. None is nowhere.

        Returns:
            The logits [T,B,V], zero past each length, and the state after each last token.

        Raises:
            ValueError: tokens, state, lengths or starts have another shape, or a token is not in the vocabulary.
            TypeError: the state is another layer's, lengths are not integers, or starts not bool.
        """
        h, state = self.encode(tokens, state, lengths=lengths, starts=starts)
        logits = self.head(self._drop_output(h))
        if lengths is not None:
            logits = logits.masked_fill(~mask_of(lengths.to(h.device), h.shape[0]).unsqueeze(2), 0)
        return logits, state

    def encode(
        self,
        tokens: Tensor,
        state: LSTMLanguageModelState | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the input of the softmax at each token, before its dropout, and the state: tokens [T,B] -> [T,B,E].

        The arguments and errors are those of `forward`; past each length the input is zero too.
        """
        y, state = self.read(tokens, state, lengths=lengths, starts=starts)
        return self.project(y), state

    def project(self, y: Tensor) -> Tensor:
        """Return the input of the softmax [...,E] of hidden states of the last layer [...,H], which `read` returns."""
        return y if self.projection is None else self.projection(y)

    def read(
        self,
        tokens: Tensor,
        state: LSTMLanguageModelState | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the hidden state of the last layer at each token, and the state: tokens [T,B] -> [T,B,H].

        A cache that compares these in place of the softmax's input recalls more (`evaluation.score_text`'s `by_state`).
        The arguments and errors are those of `forward`; past each length the hidden state is zero too.
        """
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[0] == 0:
            raise ValueError(
                f"tokens must be [T,B] int64 with at least one step, got {list(tokens.shape)} {tokens.dtype}"
            )
        if lengths is not None:
            lengths = check_lengths(lengths, tokens, unbatched=False)
            tokens = torch.where(mask_of(lengths, tokens.shape[0]), tokens, 0)
        if tokens.numel() and not torch.compiler.is_compiling():  # a graph has no numbers to look at
            least, most = map(int, torch.aminmax(tokens))
            if least < 0 or most >= self.vocabulary_size:
                raise ValueError(
                    f"tokens must be indices of the vocabulary, 0 to {self.vocabulary_size - 1}, got {least} to "
                    f"{most}: is the text encoded with another vocabulary?"
                )
        if state is not None:
            state = self._check_state(state, (tokens.shape[1],))
        x = F.embedding(tokens, self.embedding.weight)
        if self.training and self.embedding_dropout > 0:
            x = x * draw_mask(x, (self.vocabulary_size, 1), self.embedding_dropout)[tokens]
        return self._run(x, state, lengths, starts)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: LSTMLanguageModelState | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the mean cross entropy of each next token, in nats, and the state.

        The state is cut from the graph: the next piece's gradient ends where that piece begins. A Hebbian softmax
        remembers, in training, as `HebbianSoftmax.loss` does.

        Args:
            tokens: [T,B] int64.
            targets: the token after each of them, [T,B] int64; one of -100, as one past a length, does not count.
            state: as `forward` takes it; so are `lengths` and `starts`.

        Raises:
            ValueError: as `forward`, or the targets have another shape or are none of the vocabulary.
            TypeError: as `forward`.
        """
        h, state = self.encode(tokens, state, lengths=lengths, starts=starts)
        if lengths is not None and targets.shape == tokens.shape:  # another shape is refused below
            targets = torch.where(mask_of(lengths.to(h.device), h.shape[0]), targets, IGNORED)
        if isinstance(self.head, HebbianSoftmax):
            return self.head.loss(h, targets), state.detach()
        if not isinstance(self.head.weight, Tensor):  # of a quantised layer it is a method
            logits = self.head(self._drop_output(h))
            check_inputs(h, targets, h.new_empty(logits.shape[2], h.shape[2]), ignore_index=IGNORED)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED), state.detach()
        check_inputs(h, targets, self.head.weight, ignore_index=IGNORED)
        h, targets = flatten(self._drop_output(h), targets)
        return cross_entropy(h, self.head.weight, self.head.bias, targets, label_smoothing=0.0), state.detach()

    @property
    def state_dropout(self) -> float:
        """The probability of dropout on the hidden state that a step of any layer reads."""
        return self.layers[0].state_dropout  # type: ignore[return-value]

    @state_dropout.setter
    def state_dropout(self, probability: float) -> None:
        for layer in self.layers:
            layer.state_dropout = probability  # type: ignore[assignment]

    @property
    def hebbian(self) -> dict[str, Any] | None:
        """The arguments of the Hebbian softmax beside its sizes, or None."""
        if not isinstance(self.head, HebbianSoftmax):
            return None
        return {name: value for name, value in self.head.settings.items() if name not in ("in_features", "num_classes")}

    def extra_repr(self) -> str:
        values = vars(self) | {"state_dropout": self.state_dropout}
        names = ("embedding_dropout", "input_dropout", "layer_dropout", "state_dropout", "output_dropout")
        defaults: dict[str, Any] = dict.fromkeys(names, 0.0)
        sizes = ("vocabulary_size", "embedding_size", "hidden_size")
        return describe(values, sizes, num_layers=1, tied=True, layer_norm=False, **defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "state_dropout" in state:  # a model that was pickled when it drew the masks of its layers itself
            self.state_dropout = self.__dict__.pop("state_dropout")

    @property
    def _dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        shape = (self.num_layers, *batch, self.hidden_size)
        return {"hidden": shape, "cell": shape}

    def _run(
        self, x: Tensor, state: LSTMLanguageModelState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        befores = [None] * self.num_layers if state is None else map(LSTMState, *state)
        ends = []
        for number, (layer, before) in enumerate(zip(self.layers, befores, strict=True)):
            dropout = self.layer_dropout if number else self.input_dropout
            if self.training and dropout > 0:
                # A mask in the dtype of the weights: under autocast x has fewer digits, and so would 1 / (1 - dropout).
                x = x * draw_mask(self.embedding.weight, (1, *x.shape[1:]), dropout)
            x, end = layer(x, before, lengths=lengths, starts=starts)
            ends.append(end)
        return x, LSTMLanguageModelState(*map(torch.stack, zip(*ends, strict=True)))

    def _drop_output(self, h: Tensor) -> Tensor:
        # A Hebbian softmax applies dropout itself, because it remembers the activations before dropout.
        return h if isinstance(self.head, HebbianSoftmax) else F.dropout(h, self.output_dropout, self.training)
