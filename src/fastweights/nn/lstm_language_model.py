"""A language model of LSTM layers, with the dropout of Melis et al. 2017 and a plain or a Hebbian softmax."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentState
from fastweights.nn._scan import scan_steps
from fastweights.nn.hebbian_softmax import HebbianSoftmax
from fastweights.nn.hebbian_softmax.loss import check_inputs, cross_entropy, flatten
from fastweights.ops.autocast import autocast_is_on, without_autocast
from fastweights.ops.exporting import is_exporting_onnx
from fastweights.ops.products import RepeatedProduct, multiply
from fastweights.pretrained import Pretrained

_NORM_EPSILON = 1e-5


def _draw_mask(like: Tensor, shape: Sequence[int], dropout: float) -> Tensor:
    """Draw what dropout multiplies by, 0 or what keeps the mean."""
    return like.new_empty(*shape).bernoulli_(1 - dropout).div_(1 - dropout)


class _Pair(NamedTuple):
    hidden: Tensor
    cell: Tensor


class LSTMLanguageModelState(RecurrentState, _Pair):
    """The state of a language model between two pieces of a text: `hidden, cell = state`.

    Attributes:
        hidden: [layers,B,H].
        cell: [layers,B,H].
    """


class LSTMLanguageModel(Pretrained, nn.Module):
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
        layers: the LSTM layers; each has weight_ih [4H,D], weight_hh [4H,H] and bias [4H], in torch's order of gates.
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
        sizes = {"vocabulary_size": vocabulary_size, "embedding_size": embedding_size, "hidden_size": hidden_size}
        check_sizes(**sizes, num_layers=num_layers)
        for name in ("embedding_dropout", "input_dropout", "layer_dropout", "state_dropout", "output_dropout"):
            if not 0 <= locals()[name] < 1:
                raise ValueError(f"{name} must be a probability less than 1, got {locals()[name]}")
        self.vocabulary_size, self.embedding_size, self.hidden_size = sizes.values()
        self.num_layers, self.tied, self.layer_norm = num_layers, tied, layer_norm
        self.embedding_dropout, self.input_dropout, self.layer_dropout = embedding_dropout, input_dropout, layer_dropout
        self.state_dropout, self.output_dropout = state_dropout, output_dropout
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(vocabulary_size, embedding_size, **options)
        widths = [embedding_size, *[hidden_size] * (num_layers - 1)]
        self.layers = nn.ModuleList(_LSTM(width, hidden_size, layer_norm, **options) for width in widths)
        self.projection = (
            None if hidden_size == embedding_size else nn.Linear(hidden_size, embedding_size, bias=False, **options)
        )
        self.head: nn.Linear | HebbianSoftmax
        if hebbian is None:
            self.head = nn.Linear(embedding_size, vocabulary_size, **options)
        else:
            chosen = {"bias": True, "dropout": output_dropout} | hebbian
            self.head = HebbianSoftmax(embedding_size, vocabulary_size, **chosen, **options)
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: embeddings uniform within 0.1, no bias of the softmax, layers as `torch.nn.LSTM`'s."""
        for part in (*self.layers, self.head, self.projection):
            if part is not None:
                part.reset_parameters()
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: Tensor, state: LSTMLanguageModelState | None = None
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the logits of each next token, and the state: tokens [T,B] int64 -> [T,B,V].

        Raises:
            ValueError: tokens or the state have another shape, or a token is none of the vocabulary.
        """
        h, state = self.encode(tokens, state)
        return self.head(self._drop_output(h)), state

    def encode(
        self, tokens: Tensor, state: LSTMLanguageModelState | None = None
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the input of the softmax at each token, before its dropout, and the state: tokens [T,B] -> [T,B,E].

        Raises:
            ValueError: tokens or the state have another shape, or a token is none of the vocabulary.
        """
        state = self._check(tokens, state)
        x = F.embedding(tokens, self.embedding.weight)
        if self.training and self.embedding_dropout > 0:
            x = x * _draw_mask(x, (self.vocabulary_size, 1), self.embedding_dropout)[tokens]
        ends = []
        for number, layer in enumerate(self.layers):
            dropout = self.layer_dropout if number else self.input_dropout
            if self.training and dropout > 0:
                x = x * _draw_mask(x, (1, *x.shape[1:]), dropout)
            mask = None
            if self.training and self.state_dropout > 0:
                mask = _draw_mask(x, (x.shape[1], self.hidden_size), self.state_dropout)
            x, end = layer(x, state.hidden[number], state.cell[number], mask)
            ends.append(end)
        h = x if self.projection is None else self.projection(x)
        hidden, cell = (torch.stack(each) for each in zip(*ends, strict=True))
        return h, LSTMLanguageModelState(hidden, cell)

    def loss(
        self, tokens: Tensor, targets: Tensor, state: LSTMLanguageModelState | None = None
    ) -> tuple[Tensor, LSTMLanguageModelState]:
        """Return the mean cross entropy of each next token, in nats, and the state.

        The state is cut from the graph: the next piece's gradient ends where that piece begins. A Hebbian softmax
        remembers, in training, as `HebbianSoftmax.loss` does.

        Args:
            tokens: [T,B] int64.
            targets: the token after each of them, [T,B] int64.
            state: where the piece before ended; None starts from zeros.

        Raises:
            ValueError: tokens, targets or the state have another shape, or a token is none of the vocabulary.
        """
        h, state = self.encode(tokens, state)
        if isinstance(self.head, HebbianSoftmax):
            return self.head.loss(h, targets), state.detach()
        check_inputs(h, targets, self.head.weight, ignore_index=-1)
        h, targets = flatten(self._drop_output(h), targets)
        return cross_entropy(h, self.head.weight, self.head.bias, targets, label_smoothing=0.0), state.detach()

    def zero_state(self, batch_size: int) -> LSTMLanguageModelState:
        """Return the state before the first token of a text, zeros: hidden and cell [layers,B,H]."""
        weight = self.embedding.weight
        zeros = weight.new_zeros(self.num_layers, batch_size, self.hidden_size)
        return LSTMLanguageModelState(zeros, zeros)

    @property
    def hebbian(self) -> dict[str, Any] | None:
        """The arguments of the Hebbian softmax beside its sizes, or None."""
        if not isinstance(self.head, HebbianSoftmax):
            return None
        return {name: value for name, value in self.head.settings.items() if name not in ("in_features", "num_classes")}

    def extra_repr(self) -> str:
        defaults: dict[str, Any] = {name: 0.0 for name in vars(self) if name.endswith("_dropout")}
        sizes = ("vocabulary_size", "embedding_size", "hidden_size")
        return describe(vars(self), sizes, num_layers=1, tied=True, layer_norm=False, **defaults)

    def _drop_output(self, h: Tensor) -> Tensor:
        # A Hebbian softmax applies dropout itself, because it remembers the activations before dropout.
        return h if isinstance(self.head, HebbianSoftmax) else F.dropout(h, self.output_dropout, self.training)

    def _check(self, tokens: Tensor, state: LSTMLanguageModelState | None) -> LSTMLanguageModelState:
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[0] == 0:
            raise ValueError(
                f"tokens must be [T,B] int64 with at least one step, got {list(tokens.shape)} {tokens.dtype}"
            )
        if tokens.numel() and not torch.compiler.is_compiling():  # a graph has no numbers to look at
            least, most = map(int, torch.aminmax(tokens))
            if least < 0 or most >= self.vocabulary_size:
                raise ValueError(
                    f"tokens must be indices of the vocabulary, 0 to {self.vocabulary_size - 1}, got {least} to "
                    f"{most}: is the text encoded with another vocabulary?"
                )
        if state is None:
            return self.zero_state(tokens.shape[1])
        state = LSTMLanguageModelState(*state)  # a plain tuple is welcome
        shape = [self.num_layers, tokens.shape[1], self.hidden_size]
        for name, tensor in zip(("hidden", "cell"), state, strict=True):
            if list(tensor.shape) != shape:
                raise ValueError(f"state.{name} must be {shape} for these tokens, got {list(tensor.shape)}")
        return state


class _LSTM(nn.Module):
    """A layer whose hidden state passes a mask before a step reads it, at no cost to speak of."""

    def __init__(self, input_size: int, hidden_size: int, layer_norm: bool, *, device: Any, dtype: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size, **options))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size, **options))
        # The input's part, the state's part and the cell, each with a gain and a bias of its own.
        self.norms = (
            nn.ModuleList(
                nn.LayerNorm(width, eps=_NORM_EPSILON, **options)
                for width in (4 * hidden_size, 4 * hidden_size, hidden_size)
            )
            if layer_norm
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(H), as `torch.nn.LSTM`; what a unit forgets starts at a bias of 1."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.uniform_(self.weight_hh, -bound, bound)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.bias.data[self.hidden_size : 2 * self.hidden_size])
        for part in self.norms or ():
            if isinstance(part, nn.LayerNorm):
                part.reset_parameters()

    def forward(
        self, x: Tensor, hidden: Tensor, cell: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run over x [T,B,D] from a state [B,H], [B,H] -> outputs [T,B,H] and the state after the last step."""
        if is_exporting_onnx():
            return self._run_as_scan(x, hidden, cell)
        if self.norms is not None or torch.compiler.is_exporting():
            return self._run_steps(x, hidden, cell, mask)
        # Under autocast the products alone are in its dtype: the gates and the state keep the weights' own.
        device = x.device.type
        products = torch.get_autocast_dtype(device) if autocast_is_on(device) else self.weight_hh.dtype
        with without_autocast(device):
            y, last = _LSTMFunction.apply(  # type: ignore[no-untyped-call]
                x, self.weight_ih, self.bias, self.weight_hh, hidden, cell, mask, products
            )
        return y, (y[-1], last)

    def _run_steps(
        self, x: Tensor, hidden: Tensor, cell: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = []
        for drive in self._drive(x):
            hidden, cell = self._step(drive, hidden if mask is None else hidden * mask, cell)
            outputs.append(hidden)
        return torch.stack(outputs), (hidden, cell)

    def _run_as_scan(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        def step(inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
            after = self._step(*inputs, *state)
            return after[0], after

        y, (hidden, cell) = scan_steps(self, step, [hidden, cell], [self._drive(x)])
        return y, (hidden, cell)

    def _drive(self, x: Tensor) -> Tensor:
        """Return what the inputs [T,B,D] add to the gates of every step [T,B,4H]."""
        product = F.linear(x, self.weight_ih)
        return (product if self.norms is None else self.norms[0](product)) + self.bias

    def _step(self, drive: Tensor, read: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step: drive [B,4H], the hidden state that is read [B,H] and the cell -> the next of both."""
        of_state, of_cell = (nn.Identity(), nn.Identity()) if self.norms is None else self.norms[1:]
        i, f, g, o = (drive + of_state(F.linear(read, self.weight_hh))).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * of_cell(cell).tanh(), cell


class _LSTMFunction(torch.autograd.Function):
    """The recurrence of an LSTM, with the backward pass written out.

    What does not depend on the step before is computed for all steps at once: the input's products, the slopes of the
    gates, and the gradients of the weights. A step then is one product and a few operations on [B,4H], and the mask
    costs one on [B,H].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_ih: Tensor,
        bias: Tensor,
        weight_hh: Tensor,
        hidden: Tensor,
        cell: Tensor,
        mask: Tensor | None,
        products: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        x, weight_ih, weight = x.to(products), weight_ih.to(products), weight_hh.to(products)
        drive = multiply(x, weight_ih).to(cell.dtype).add_(bias)
        steps, batch, width = drive.shape
        size = width // 4
        gates = drive  # written over step by step
        cells, outputs = drive.new_empty(steps + 1, batch, size), drive.new_empty(steps, batch, size)
        tanhs = torch.empty_like(outputs)
        read = outputs if mask is None else torch.empty_like(outputs)  # outputs as the next step reads them
        cells[0] = cell
        first = now = hidden if mask is None else hidden * mask
        recur = RepeatedProduct(weight, batch, steps)
        for step in range(steps):
            gate = gates[step].add_(recur(now.to(products)))
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            torch.mul(f, cells[step], out=cells[step + 1]).addcmul_(i, g)
            torch.tanh(cells[step + 1], out=tanhs[step])
            now = torch.mul(o, tanhs[step], out=outputs[step])
            if mask is not None:
                now = torch.mul(now, mask, out=read[step])
        ctx.save_for_backward(x, weight_ih, weight, gates, cells, tanhs, read, first, mask)
        return outputs, cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_outputs: Tensor, of_cell: Tensor) -> Any:
        x, weight_ih, weight, gates, cells, tanhs, read, first, mask = ctx.saved_tensors
        steps, batch, size = tanhs.shape
        i, f, g, o = gates.chunk(4, 2)
        # By how much each gate's drive moves the cell, and for the last the hidden state.
        slopes = torch.empty_like(gates)
        of_i, of_f, of_g, of_o = slopes.chunk(4, 2)
        torch.mul(i, g, out=of_i).addcmul_(of_i, i, value=-1)
        torch.mul(cells[:-1], f, out=of_f).addcmul_(of_f, f, value=-1)
        torch.mul(g, g, out=of_g).neg_().add_(1).mul_(i)
        torch.mul(tanhs, o, out=of_o).addcmul_(of_o, o, value=-1)
        through = (1 - tanhs.square()).mul_(o)  # from the hidden state to the cell
        of_drive = slopes  # written over step by step
        cell = of_cell.clone()
        hidden = torch.zeros_like(cell)
        recur = RepeatedProduct(weight.t(), batch, steps)
        for step in reversed(range(steps)):
            hidden += of_outputs[step]
            cell.addcmul_(hidden, through[step])
            moved = of_drive[step]
            moved[:, 3 * size :].mul_(hidden)
            moved[:, : 3 * size].view(batch, 3, size).mul_(cell.unsqueeze(1))
            cell.mul_(f[step])
            hidden = recur(moved.to(weight.dtype)).to(cell.dtype)
            if mask is not None:
                hidden.mul_(mask)
        flat = of_drive.view(steps * batch, 4 * size)
        of_x = of_weight_ih = of_bias = of_weight_hh = None
        if ctx.needs_input_grad[0]:
            of_x = multiply(of_drive.to(weight.dtype), weight_ih.t())
        if any(ctx.needs_input_grad[1:4]):
            before = torch.cat([first.unsqueeze(0), read[:-1]]).to(weight.dtype)
            rows = torch.cat([x, before], 2).view(steps * batch, -1)
            of_weights = multiply(flat.t().to(weight.dtype), rows.t()).to(cell.dtype)
            of_weight_ih, of_weight_hh = of_weights[:, : x.shape[2]], of_weights[:, x.shape[2] :]
            of_bias = flat.sum(0)
        return of_x, of_weight_ih, of_bias, of_weight_hh, hidden, cell, None, None
