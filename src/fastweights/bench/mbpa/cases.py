"""What is timed."""

from dataclasses import dataclass

OURS, ANEW = "fastweights", "fastweights, nothing stored"
LOOP, VMAP = "autograd loop", "torch.func.vmap"
RIVALS = (OURS, ANEW, LOOP, VMAP)
OUTPUTS = ("linear", "mlp")
OPTIMIZERS = ("sgd", "rmsprop")


@dataclass(frozen=True)
class Case:
    """A model with its memory."""

    steps: int  # T
    output: str = "linear"
    optimizer: str = "sgd"
    classes: int = 10_000  # V
    key_size: int = 400  # d
    neighbours: int = 256  # K
    entries: int = 5000  # N
    batch: int = 256  # queries at once

    def __str__(self) -> str:
        return f"{self.output} under {self.optimizer}, T={self.steps}, V={self.classes}, d={self.key_size}"

    @property
    def rivals(self) -> tuple[str, ...]:
        """What is stored are the outputs of an affine map."""
        closed = self.output == "linear" and self.optimizer == "sgd"
        return tuple(rival for rival in RIVALS if closed or rival != ANEW)

    def queries(self, rival: str) -> int:
        """How many a timed call answers: of the slow ones fewer."""
        if self.classes * self.key_size > 2**20:
            most = {OURS: 256 if self.steps == 1 else 16, ANEW: 16, LOOP: 2, VMAP: 2}
        else:
            most = {LOOP: 16, VMAP: 64}
        return min(self.batch, most.get(rival, self.batch))


SMALL = {"classes": 100, "key_size": 64, "neighbours": 50}


@dataclass(frozen=True)
class Selection:
    """What a run of the command times: the language model's softmax, and small networks that have no closed form."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (1, 5)
    rounds: int = 15
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[Case]:
        found = [Case(steps, batch=batch) for steps in self.steps for batch in ((256, 1) if steps == 1 else (256,))]
        for output, optimizer in (("linear", "rmsprop"), ("mlp", "rmsprop"), ("mlp", "sgd")):
            found += [Case(steps, output, optimizer, **SMALL) for steps in self.steps]
        return found


QUICK = Selection()
FULL = Selection(steps=(1, 5, 20))
