"""Hebbian Softmax of Rae et al. 2018: a classifier that remembers its rare classes and learns its common ones."""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from fastweights.checks import check_between, check_choice, check_dropout, check_sizes, is_integer
from fastweights.nn._describe import describe
from fastweights.nn.compiler import outside_graphs, torch_func_is_active
from fastweights.nn.hebbian_softmax.loss import IGNORED, check_inputs, cross_entropy, flatten, select_batch
from fastweights.nn.hebbian_softmax.objectives import InnerObjective, ObjectiveName
from fastweights.nn.hebbian_softmax.recorder import Recorder, gather_batches
from fastweights.ops.hebbian import COUNTINGS, Counting, smooth
from fastweights.pretrained import Pretrained

_PATIENCE = 100  # passes in training after which a head that has remembered nothing says so


class HebbianSoftmax(Pretrained, nn.Module):
    """A linear layer with cross entropy whose class vectors are also smoothed towards the activations of their class.

    After each step of the optimizer, every class i that was in its batch is drawn to the mean of its activations
    (Rae et al. 2018, algorithm 1)::

        theta[i] <- lambda_i hbar_i + (1 - lambda_i) theta[i]      lambda_i = max(1 / c[i], gamma) if c[i] < T else 0
        c[i]     <- c[i] + n_i

    c counts a class's occurrences, n_i of them in this batch: a new class is remembered at first sight (1 / 0 stands
    for 1), and one that has been seen T times is learnt by gradient descent alone. Activations are remembered as they
    are before dropout: so the head has the dropout itself. The bias and the optimizer's own state are not smoothed.
    A head that is trained without its `loss`, or never attached, is a plain softmax, and warns of it once.

    Args:
        in_features: d, the width of the activations.
        num_classes: V.
        gamma: the least rate at which a class seen fewer than `limit` times takes its activations, 0 to 1. The paper's
            advice: 1 / (least occurrences of a class in an epoch).
        limit: T, the occurrences after which a class is smoothed no more; 0 makes the head a plain softmax. The paper's
            advice: (least occurrences of a class in an epoch) * (epochs to convergence). The default is for texts, in
            which common words come thousands of times. A class that comes fewer than T times in all of training is
            never learnt by gradient descent alone, and pays for the rare ones: of 500 classes of twenty examples beside
            500 of one, six epochs, 53 % of the former were right in place of a softmax's 97, and 71 with `limit` 6. It
            may be set at any time: a language model whose learning rate falls to zero was better with 0 in its last
            pass.
        bias: add a bias to the logits.
        dropout: the probability of dropout on the activations that the logits are computed from, in training.
        objective: what a class's weights are smoothed towards: "l2" (its mean activation), "inner_product", "svm",
            "sparse_softmax", all within a norm of 10; or an `InnerObjective`, or its arguments.
        counting: "literal", as above; "running_mean": lambda_i = max(n_i / (c[i] + n_i), gamma), with which a class
            seen fewer than 1 / gamma times holds the plain mean of its activations, however they came in batches; or
            "constant": lambda_i = gamma from the first time to the last below `limit`, so that 0 never smooths.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Attributes:
        weight: [V,d], theta; may be tied (`head.weight = embedding.weight`), and is then smoothed in both places.
        bias: [V], or None.
        counts: [V] int64, c.

    Raises:
        ValueError: a number out of range, or an unknown name.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> generator = torch.manual_seed(0)
        >>> body, head = torch.nn.Linear(20, 64), nn.HebbianSoftmax(64, 1000, gamma=0.1, limit=100)
        >>> optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
        >>> handle = head.attach(optimizer)                  # from now on every step smooths
        >>> x, target = torch.randn(8, 20), torch.arange(8)  # x [B,D], target [B]
        >>> head.loss(body(x), target).backward()            # in place of cross_entropy(linear(h), target)
        >>> optimizer.step()
        >>> head.counts[:10].tolist()
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
        >>> head(body(x)).argmax(1).tolist()                 # each bound at first sight; logits [B,V]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    weight: Tensor
    bias: Tensor | None
    counts: Tensor
    _passes = 0  # in training, as far as nothing was sure to be remembered

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        gamma: float = 0.25,
        limit: int = 500,
        bias: bool = False,
        dropout: float = 0.0,
        objective: ObjectiveName | InnerObjective | dict[str, Any] = "l2",
        counting: Counting = "literal",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, num_classes=num_classes)
        check_between(0, 1, gamma=gamma)
        if not limit >= 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        check_dropout(dropout=dropout)
        check_choice(COUNTINGS, counting=counting)
        if isinstance(objective, dict):
            objective = InnerObjective(**objective)
        self.objective = objective if isinstance(objective, InnerObjective) else InnerObjective(objective)
        self.in_features, self.num_classes = in_features, num_classes
        self.gamma, self.limit, self.dropout, self.counting = gamma, limit, dropout, counting
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        )
        self.register_buffer("counts", torch.zeros(num_classes, dtype=torch.int64, device=device))
        self._recorder = Recorder()
        self._handle: RemovableHandle | None = None
        self._optimizer: Any = None  # a weak reference
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start over: the weights of Glorot & Bengio 2010, no bias, no class seen."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.counts.zero_()
        self._recorder.clear()

    def forward(self, h: Tensor) -> Tensor:
        """Return the logits of activations, h [...,d] -> [...,V]; nothing is remembered."""
        if not torch.compiler.is_compiling() and self._is_trained() and not torch_func_is_active():
            self._warn_of_forgetting()
        return F.linear(F.dropout(h, self.dropout, self.training), self.weight, self.bias)

    def loss(
        self,
        h: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the cross entropy of activations and class indices, and remember them for the next step in training.

        The keywords are those of `torch.nn.functional.cross_entropy`. Activations are remembered in training mode with
        gradients on, once also under activation checkpointing, and not under `torch.func` or while the weight is
        frozen; those whose target is `ignore_index` are not. Past 2^24 logits, or 2^25 of at most 256 activations, the
        logits are computed in pieces of 256 activations, and a loss goes backward once, without second derivatives
        (`torch.nn.functional.linear_cross_entropy`, where PyTorch has it; not under `torch.func`, nor with label
        smoothing). Under `torch.compile` the checks and the remembering are left out of the compiled graph.

        Args:
            h: activations [...,d], before dropout.
            target: [...] int64, 0 to V - 1 or `ignore_index`.
            weight: the weight of each class in the loss, [V]; the smoothing does not know of it.
            ignore_index: the target of activations that do not count.
            reduction: "mean", "sum" or "none".
            label_smoothing: 0 to 1.

        Returns:
            A number, in nats, or [...] with reduction "none".

        Raises:
            ValueError: h or target of another shape or dtype, a target out of range, or, while training, activations
                that are not finite; nothing is remembered then.
        """
        under_func = torch_func_is_active()
        ignores = not under_func and check_inputs(h, target, self.weight, ignore_index)
        flat, labels = flatten(h, target)
        dropped = F.dropout(flat, self.dropout, self.training) if self.dropout > 0 else flat
        options: dict[str, Any] = {
            "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing
        }  # fmt: skip
        loss = cross_entropy(dropped, self.weight, self.bias, labels, **options)
        if self._is_trained() and not under_func:
            self._remember(flat, labels, loss, ignore_index if ignores else None)
        return loss.reshape(target.shape) if reduction == "none" else loss

    def remember(self, h: Tensor, target: Tensor, loss: Tensor) -> None:
        """Remember activations for the next step, in training, whose loss is not `loss`: a sampled softmax, say.

        `loss(h, target)` remembers what it is computed from; call this for no other than a loss of your own.

        Args:
            h: activations [...,d], before dropout.
            target: [...] int64, 0 to V - 1, or -100 where there is nothing to remember.
            loss: their loss, a number, or a number for each; it depends on the weight, and its backward pass counts.

        Raises:
            ValueError: h or target of another shape or dtype, a target out of range, or activations that are not
                finite; nothing is remembered then.

        Examples:
            >>> import torch
            >>> from fastweights import nn
            >>> head = nn.HebbianSoftmax(16, 1000, dropout=0.2)
            >>> handle = head.attach(optimizer := torch.optim.SGD(head.parameters(), lr=0.1))
            >>> h, target = torch.randn(8, 16), torch.arange(8)       # [B,d], [B]
            >>> loss = torch.nn.functional.nll_loss(head(h).log_softmax(1), target)
            >>> head.remember(h, target, loss)
            >>> loss.backward()
            >>> optimizer.step()
            >>> int(head.counts.sum())
            8
        """
        ignores = check_inputs(h, target, self.weight, IGNORED)
        if self._is_trained() and not torch_func_is_active():
            self._remember(*flatten(h, target), loss, IGNORED if ignores else None)

    @outside_graphs
    def _remember(self, h: Tensor, labels: Tensor, loss: Tensor, ignore_index: int | None) -> None:
        self._recorder.add(*select_batch(h, labels, loss, ignore_index), loss, self.weight)
        if self._attached() is None:
            self._warn_of_forgetting()

    def _is_trained(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.weight.requires_grad

    def _warn_of_forgetting(self) -> None:
        """Warn once, after many passes in training, if not a single class has been remembered."""
        self._passes += 1
        if self._passes == _PATIENCE and self.limit > 0 and not bool(self.counts.any()):
            warnings.warn(
                f"this HebbianSoftmax has remembered nothing in {_PATIENCE} passes in training, and is a plain softmax "
                "so far: train on head.loss(h, target), not on the cross entropy of head(h), and call "
                "head.attach(optimizer) before, or head.memorize() after each step",
                stacklevel=3,
            )

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Smooth after every step of an optimizer, from now on.

        A step smooths once, over all batches whose losses went backward since the step before; a step that gradient
        scaling skips, for an overflow, smooths nothing. An accelerated optimizer is unwrapped.

        Args:
            optimizer: any of torch's, or one that wraps it as `.optimizer`; it holds this head's weight.

        Returns:
            A handle whose `remove()` ends it.

        Raises:
            TypeError: no optimizer of torch's.
            RuntimeError: the head is attached already.
            ValueError: the optimizer does not hold this head's weight.
        """
        inner = _unwrap(optimizer)
        attached = self._attached()
        if attached is not None:
            raise RuntimeError(
                f"this head is attached to an optimizer already ({type(attached).__name__}): one step would smooth "
                "twice. Call remove() on the handle that attach returned first"
            )
        if not _holds(inner, self.weight):
            raise ValueError(
                f"{type(inner).__name__} does not hold this head's weight {list(self.weight.shape)}: give it "
                "head.parameters(), and attach after moving or replacing the weight"
            )
        self._handle = inner.register_step_post_hook(self._after_step)
        self._optimizer = weakref.ref(inner)
        return self._handle

    def _attached(self) -> torch.optim.Optimizer | None:
        """Return the optimizer whose steps smooth, None where there is none (any more)."""
        optimizer: torch.optim.Optimizer | None = self._optimizer and self._optimizer()
        if optimizer is None or self._handle is None:
            return None
        hooks = self._handle.hooks_dict_ref()
        return optimizer if hooks is not None and self._handle.id in hooks else None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # set by gradient scaling around a step that looks itself
        if overflow is not None and bool(overflow):
            self._recorder.clear()
            return
        if not _holds(optimizer, self.weight):
            raise RuntimeError(
                f"the {type(optimizer).__name__} that this head is attached to no longer holds its weight, which was "
                "replaced: make a new optimizer, and attach to that"
            )
        self._memorize(*self._recorder.take(self.weight, "step"))

    def memorize(self) -> None:
        """Smooth the activations of all losses since the last call into the weights, as a step does once attached.

        Those of the losses that went backward count, or of all where none did. A loss in training mode that is neither
        differentiated nor memorized keeps its activations: evaluate in `eval()` mode or without gradients.

        Where `torch.distributed` is initialised, every process must call it: activations and labels of all are
        gathered, so that as many processes give what one gives.

        Raises:
            RuntimeError: activations were written over since their loss; the weights stay as they are.
        """
        self._memorize(*self._recorder.take(self.weight, "hand"))

    def _memorize(self, activations: list[Tensor], labels: list[Tensor]) -> None:
        activations, labels = gather_batches(activations, labels, self.weight)
        smooth(
            self.weight,
            self.counts,
            activations,
            labels,
            gamma=self.gamma,
            limit=self.limit,
            counting=self.counting,
            largest_norm=self.objective.largest_norm,
            targets=None if self.objective.name == "l2" else self.objective.maximum,
        )

    @torch.no_grad()
    def grow(self, n: int) -> None:
        """Add n classes that have never been seen, behind the others, also to the state of the attached optimizer.

        The weight stays the same parameter, so that optimizers and ties keep it; what wraps the model and knows its
        shapes (`DistributedDataParallel`) has to be made again. Call it between steps: a loss that has yet to go
        backward knows the weight as it was.

        Args:
            n: the number of new classes.

        Raises:
            ValueError: n is not a positive integer, or the optimizer keeps what cannot grow; nothing has changed then.
        """
        if not is_integer(n) or n < 1:
            raise ValueError(f"grow takes a number of classes, an integer of at least 1, got {n!r}")
        n, optimizer = int(n), self._attached()
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        states = [{} if optimizer is None else _grow_state(optimizer, parameter, n) for parameter in parameters]
        fresh = nn.init.xavier_uniform_(self.weight.new_empty(self.num_classes + n, self.in_features))
        for parameter, state in zip(parameters, states, strict=True):
            new = fresh[self.num_classes :] if parameter is self.weight else parameter.new_zeros(n)
            gradient, parameter.grad = parameter.grad, None
            parameter.data = torch.cat([parameter.data, new])
            if gradient is not None:
                parameter.grad = torch.cat([gradient, torch.zeros_like(new)])
            if optimizer is not None:
                optimizer.state[parameter].update(state)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(n)])
        self.num_classes += n

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a head read back from a file, is attached to no optimizer and has yet to see a batch.
        return self.__dict__ | {"_recorder": Recorder(), "_handle": None, "_optimizer": None}

    def extra_repr(self) -> str:
        return describe(
            vars(self) | {"objective": self.objective.name, "bias": self.bias is not None},
            ["in_features", "num_classes"],
            ["gamma", "limit"],
            dropout=0.0,
            counting="literal",
            objective="l2",
            bias=False,
        )


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer from a wrapper that holds it as `.optimizer` (accelerate's does).

    Raises:
        TypeError: there is none inside.
    """
    inner = optimizer
    # A wrapper may itself claim to be an optimizer, and its hooks would never run.
    while (wrapped := getattr(inner, "optimizer", None)) is not None:
        inner = wrapped
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"attach takes an optimizer of torch.optim, got {type(optimizer).__name__}")
    return inner


def _holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer steps a parameter."""
    return _group(optimizer, parameter) is not None


def _grow_state(optimizer: torch.optim.Optimizer, parameter: Tensor, rows: int) -> dict[str, Tensor]:
    """Return an optimizer's state of a parameter [V,...] with more rows, as if these had never been stepped.

    Raises:
        ValueError: it keeps a state that has no row for each of the parameter's, as LBFGS does.
    """
    group = _group(optimizer, parameter)
    if group is None:
        return {}
    state = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == parameter.shape[0]:
            # The state of these two does not begin at zero.
            start = {"sum": group.get("initial_accumulator_value", 0.0), "step_size": group["lr"]}.get(name, 0.0)
            new = value.new_full((rows, *value.shape[1:]), float(start))
            state[name] = torch.cat([value, new])
        elif isinstance(value, list) or (isinstance(value, Tensor) and value.dim() == 1):
            # A line of all parameters; numbers, and sums over the rows, stay as they are.
            raise ValueError(
                f"{type(optimizer).__name__} keeps {name!r} of all weights together, which cannot grow with one: grow "
                "the head before the first step, or make a new optimizer afterwards"
            )
    return state


def _group(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    groups = (group for group in optimizer.param_groups if any(other is parameter for other in group["params"]))
    return next(groups, None)
