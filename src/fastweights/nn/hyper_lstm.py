"""The HyperLSTM of Ha et al. 2016: a small LSTM that rescales the weights of a larger one at every step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_normalized, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentLayer, RecurrentState, mask_of, run_steps, run_without_autocast

_EPSILON = 1e-3  # added to the variances, as in the authors' code: the paper names none


class _Parts(NamedTuple):
    hidden: Tensor
    cell: Tensor
    hyper_hidden: Tensor
    hyper_cell: Tensor


class HyperLSTMState(RecurrentState, _Parts):
    """The state that a HyperLSTM hands from one piece of a sequence to the next.

    For an unbatched sequence all four lack the batch axis.

    Attributes:
        hidden: [B,H].
        cell: [B,H].
        hyper_hidden: [B,N].
        hyper_cell: [B,N].

    Examples:
        >>> import torch
        >>> from fastweights.nn import HyperLSTMState
        >>> large, small = torch.zeros(2, 6), torch.zeros(2, 3)
        >>> state = HyperLSTMState(hidden=large, cell=large, hyper_hidden=small, hyper_cell=small)
        >>> state.detach().hyper_cell.shape
        torch.Size([2, 3])
    """


class HyperLSTM(RecurrentLayer[HyperLSTMState]):
    """One layer of an LSTM whose weight rows are rescaled at every step by a small LSTM (Ha et al. 2016, A.2).

    The small LSTM reads what the large one reads. With ^ on what is its own, and for each gate y of i, f, o and g:

        ^x = [h(t-1); x(t)]                                                         [H+D]
        ^y = LN(^W_x ^x + ^W_h ^h(t-1) + ^b)                                        [N]
        ^c(t) = sigmoid(^f) ^c(t-1) + sigmoid(^i) tanh(^g)
        ^h(t) = sigmoid(^o) tanh(LN(^c(t)))
        z_h = U_h ^h(t) + u_h,  z_x = U_x ^h(t) + u_x,  z_b = U_b ^h(t)             [E], others for each y
        y = LN((W_hz z_h) * (W_h h(t-1)) + (W_xz z_x) * (W_x x(t)) + W_bz z_b + b)  [H]
        c(t) = sigmoid(f) c(t-1) + sigmoid(i) tanh(g)
        h(t) = sigmoid(o) tanh(LN(c(t)))

    where * is elementwise, and LN has a gain and a bias of its own for each gate and each cell; `layer_norm=False`
    leaves out all of them.

    Parameters, 4H(H+D+1) + 4N(N+H+D+1) + 4E(3N+2) + 12HE of them, and 10(H+N) more with layer norm, in blocks for
    i, f, o and g. The large LSTM: `weight_ih` [4H,D], `weight_hh` [4H,H], `bias` [4H]. The small one:
    `hyper_weight_ih` [4N,H+D], `hyper_weight_hh` [4N,N], `hyper_bias` [4N]. Between them: `embedding_weight` [3,4E,N]
    for U_h, U_x and U_b, `embedding_bias` [2,4E], and `scale_weight` [3,4,E,H] for W_hz, W_xz and W_bz transposed.
    Layer norm: `norm_weight` and `norm_bias` [5,H], `hyper_norm_weight` and `hyper_norm_bias` [5,N]; the fifth is the
    cell's.

    All start as the paper says: W_x, W_h, ^W_x and ^W_h orthogonal, gate by gate; U_h and U_x zero, u_h and u_x one,
    W_hz and W_xz 0.1/E, so that every row is scaled by 0.1; U_b normal with a deviation of 0.01; W_bz and all biases
    zero. From this start the E components of a z_h, or of a z_x, get the same gradient at every step and stay alike, as
    if E were 1; small random values in `embedding_weight` tell them apart.

    Our reading, where the paper and the authors' code differ or leave room: the embeddings see ^h(t), as in the code;
    the paper writes ^h(t-1). The forget gates of both LSTMs start with a bias of 1, which the code adds to them: in
    their layer norm's bias, or in `bias` and `hyper_bias` without layer norm. Variances get 1e-3 added, as in the code.
    ^b stands beside layer norm, and W_x starts orthogonal, as in the paper but not in the code. The paper's dropout of
    tanh(g) is left out.

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of units of the large LSTM, which are the output.
        hyper_hidden_size: N, the number of units of the small LSTM.
        hyper_embedding_size: E, the size of an embedding; both defaults are the paper's for Penn Treebank, H = 1,000.
        layer_norm: normalise the gates and cells of both LSTMs.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.HyperLSTM(input_size=10, hidden_size=20, hyper_hidden_size=8)
        >>> y, state = layer(torch.randn(7, 3, 10))            # x [T,B,D]
        >>> y.shape, state.cell.shape, state.hyper_cell.shape  # [T,B,H], [B,H], [B,N]
        (torch.Size([7, 3, 20]), torch.Size([3, 20]), torch.Size([3, 8]))
        >>> y, state = layer(torch.randn(5, 3, 10), state)     # goes on where the first piece ended
    """

    norm_weight: Tensor  # this and the next three are None without layer norm
    norm_bias: Tensor
    hyper_norm_weight: Tensor
    hyper_norm_bias: Tensor
    _state_type = HyperLSTMState

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        hyper_hidden_size: int = 128,
        hyper_embedding_size: int = 4,
        layer_norm: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(
            input_size=input_size,
            hidden_size=hidden_size,
            hyper_hidden_size=hyper_hidden_size,
            hyper_embedding_size=hyper_embedding_size,
        )
        if layer_norm:
            check_normalized(hidden_size=hidden_size, hyper_hidden_size=hyper_hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.hyper_hidden_size, self.hyper_embedding_size = hyper_hidden_size, hyper_embedding_size
        self.layer_norm, self.batch_first = layer_norm, batch_first

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        large, small, embedding = hidden_size, hyper_hidden_size, hyper_embedding_size
        self.weight_ih = parameter(4 * large, input_size)
        self.weight_hh = parameter(4 * large, large)
        self.bias = parameter(4 * large)
        self.hyper_weight_ih = parameter(4 * small, large + input_size)
        self.hyper_weight_hh = parameter(4 * small, small)
        self.hyper_bias = parameter(4 * small)
        self.embedding_weight = parameter(3, 4 * embedding, small)
        self.embedding_bias = parameter(2, 4 * embedding)
        self.scale_weight = parameter(3, 4, embedding, large)
        for name, units in (("norm", large), ("hyper_norm", small)):
            for kind in ("weight", "bias"):
                self.register_parameter(f"{name}_{kind}", parameter(5, units) if layer_norm else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the parameters, as the paper does."""
        for weight in (self.weight_ih, self.weight_hh, self.hyper_weight_ih, self.hyper_weight_hh):
            for gate in weight.chunk(4):
                # In bfloat16 there is no such start: it is drawn in float32.
                wide = torch.empty_like(gate, dtype=torch.promote_types(gate.dtype, torch.float32))
                gate.copy_(nn.init.orthogonal_(wide))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("norm_weight"):
                nn.init.ones_(parameter)
        nn.init.ones_(self.embedding_bias)
        nn.init.zeros_(self.embedding_weight[:2])
        nn.init.normal_(self.embedding_weight[2], std=0.01)
        nn.init.constant_(self.scale_weight[:2], 0.1 / self.hyper_embedding_size)
        nn.init.zeros_(self.scale_weight[2])
        for bias, norm in ((self.bias, self.norm_bias), (self.hyper_bias, self.hyper_norm_bias)):
            nn.init.ones_(norm[1] if self.layer_norm else bias.chunk(4)[1])  # the forget gate

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_hh.dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        large, small = (*batch, self.hidden_size), (*batch, self.hyper_hidden_size)
        return {"hidden": large, "cell": large, "hyper_hidden": small, "hyper_cell": small}

    def _run(
        self, x: Tensor, state: HyperLSTMState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, HyperLSTMState]:
        steps, batch = x.shape[:2]
        # The large LSTM works on [4,B,H], one gate after another in memory: its gates are scaled by batched products.
        rows = x.reshape(1, steps * batch, self.input_size).expand(4, -1, -1)
        weights = self.weight_ih.view(4, self.hidden_size, self.input_size).transpose(1, 2)
        drive = torch.bmm(rows, weights).view(4, steps, batch, self.hidden_size).transpose(0, 1)
        hyper_drive = F.linear(x, self.hyper_weight_ih[:, self.hidden_size :], self.hyper_bias)
        return run_without_autocast(self._recur, (drive, hyper_drive), self._dtype, state, lengths, starts)

    def _recur(
        self,
        drive: Tensor,
        hyper_drive: Tensor,
        state: HyperLSTMState | None,
        lengths: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, HyperLSTMState]:
        """Run over time: drive [T,4,B,H] and hyper_drive [T,B,4N] -> outputs [T,B,H] and the last state."""
        steps, _, batch, size = drive.shape
        if state is None:
            large, small = drive.new_zeros(batch, size), drive.new_zeros(batch, self.hyper_hidden_size)
            state = HyperLSTMState(large, large, small, small)
        else:
            state = state._map(lambda tensor: tensor.to(drive.dtype))
        valid = None if lengths is None else mask_of(lengths, steps).unsqueeze(2)
        starts = None if starts is None else starts.unsqueeze(2)
        weights = self._weights()
        drives = zip(drive.unbind(0), hyper_drive.unbind(0), strict=True)
        outputs, end = run_steps(lambda now, before: self._step(weights, *now, *before), drives, state, valid, starts)
        y = torch.stack(outputs)
        if valid is not None:
            y = torch.where(valid, y, torch.zeros_like(y))
        return y, HyperLSTMState(*end)

    def _weights(self) -> "_Weights":
        """Cut the parts that every step needs from the parameters, once: a cut's gradient is as large as its source."""
        norms = [(self.norm_weight, self.norm_bias), (self.hyper_norm_weight, self.hyper_norm_bias)]
        cut = [(gain.unbind(0), bias.unbind(0)) if self.layer_norm else None for gain, bias in norms]
        return _Weights(
            to_hyper=self.hyper_weight_ih[:, : self.hidden_size].t(),
            embedding=self.embedding_weight.flatten(0, 1).t(),
            embedding_bias=F.pad(self.embedding_bias.flatten(), (0, 4 * self.hyper_embedding_size)),  # z_b has none
            scales=self.scale_weight.unbind(0),
            norm=cut[0],
            hyper_norm=cut[1],
        )

    def _step(
        self,
        weights: "_Weights",
        drive: Tensor,
        hyper_drive: Tensor,
        hidden: Tensor,
        cell: Tensor,
        hyper_hidden: Tensor,
        hyper_cell: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take one step: drive [4,B,H], hyper_drive [B,4N] and a state -> the next"""
        batch, size = hidden.shape
        # The small LSTM.
        gates = torch.addmm(hyper_drive, hidden, weights.to_hyper)
        gates = torch.addmm(gates, hyper_hidden, self.hyper_weight_hh.t()).view(batch, 4, self.hyper_hidden_size)
        hyper_hidden, hyper_cell = _lstm(gates.unbind(1), hyper_cell, weights.hyper_norm)
        # Its embeddings, [4,B,E] each; from them scales of the hidden rows and of the input rows, and biases, [4,B,H].
        embeddings = torch.addmm(weights.embedding_bias, hyper_hidden, weights.embedding)
        z_h, z_x, z_b = embeddings.view(batch, 3, 4, self.hyper_embedding_size).permute(1, 2, 0, 3).unbind(0)
        of_hidden, of_input, of_bias = weights.scales
        # The large LSTM.
        product = torch.mm(hidden, self.weight_hh.t()).view(batch, 4, size).transpose(0, 1)
        gates = torch.baddbmm(self.bias.view(4, 1, size), z_b, of_bias)
        gates = gates + torch.bmm(z_h, of_hidden) * product + torch.bmm(z_x, of_input) * drive
        hidden, cell = _lstm(gates.unbind(0), cell, weights.norm)
        return hidden, cell, hyper_hidden, hyper_cell

    def extra_repr(self) -> str:
        sizes, shown = ["input_size", "hidden_size"], ["hyper_hidden_size", "hyper_embedding_size"]
        return describe(vars(self), sizes, shown, layer_norm=True, batch_first=False)


_Norm = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # gains and biases of the four gates and the cell, [K] each


class _Weights(NamedTuple):
    to_hyper: Tensor  # [H,4N]
    embedding: Tensor  # [N,12E]
    embedding_bias: Tensor  # [12E]
    scales: tuple[Tensor, ...]  # three of [4,E,H]
    norm: _Norm | None
    hyper_norm: _Norm | None


def _lstm(gates: Sequence[Tensor], cell: Tensor, norm: _Norm | None) -> tuple[Tensor, Tensor]:
    """Take a step of an LSTM: four gates [B,K] and a cell [B,K] -> the hidden state and the new cell."""
    units = cell.shape[-1:]
    if norm is not None:
        # The gains of the four gates; the fifth is the cell's.
        normed = zip(gates, *norm, strict=False)
        gates = [F.layer_norm(gate, units, gain, bias, _EPSILON) for gate, gain, bias in normed]
    write, keep, show, new = gates
    cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
    shown = cell if norm is None else F.layer_norm(cell, units, norm[0][4], norm[1][4], _EPSILON)
    return show.sigmoid() * shown.tanh(), cell
