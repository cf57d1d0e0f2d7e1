"""Draw a fast matrix that is written, decays and is read, as a moving picture: docs/figures/write_decay_read.svg.

python docs/write_decay_read.py
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PATH = Path(__file__).parent / "figures" / "write_decay_read.svg"
PAIRS = (("c", "9"), ("k", "8"), ("j", "3"), ("f", "1"))
QUERY = "c"
KEY_SIZE, VALUE_SIZE, DECAY = 8, 6, 0.8

# Seconds of a state, and of the change to it.
SECONDS = {"write": 1.9, "decay": 1.1, "read": 5.0}
CHANGE = 0.5
TIMES = 3  # then it stands still

CELL, LEFT, TOP = 34, 110, 158
VALUE_X, ANSWER_X, LIST_X, BAR = LEFT - 46, LEFT + KEY_SIZE * CELL + 12, 452, 56
STRONGEST = 0.65  # an entry of this size has its full colour

STYLE = """\
svg { --card: #fff; --ink: #1f2328; --grey: #666; --line: #c9ccd1; --plus: #d55e00; --minus: #0072b2; }
@media (prefers-color-scheme: dark) {
  svg { --card: #1c1f29; --ink: #e6e6e6; --grey: #a6a9b3; --line: #474b57; --plus: #ff8c42; --minus: #56b4e9; }
}
text { font: 20px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.small { font-size: 18px; fill: var(--grey); }
.text { font: 600 27px ui-monospace, monospace; fill: var(--grey); }
.caption { font-size: 22px; font-weight: 600; }
.list { text-anchor: start; }
.end { text-anchor: end; font-size: 18px; }
.hidden { fill-opacity: 0; }
.best { font-weight: 700; fill: var(--plus); }
.frame { fill: none; stroke: var(--line); }
.card { fill: var(--card); }
.plus, .bar { fill: var(--plus); }
.minus { fill: var(--minus); }
"""


class State(NamedTuple):
    """What the picture shows for a while."""

    kind: str  # of SECONDS
    caption: str
    memory: Tensor  # [VALUE_SIZE,KEY_SIZE]
    key: Tensor | None = None  # [KEY_SIZE]
    value: Tensor | None = None  # [VALUE_SIZE]
    read: tuple[int, ...] = ()  # the letters of the text that are read now


class Reading(NamedTuple):
    """The whole of what is drawn."""

    states: list[State]
    keys: Tensor  # [pairs,KEY_SIZE]
    values: Tensor  # [pairs,VALUE_SIZE]
    answer: Tensor  # [VALUE_SIZE]: what the query reads
    likeness: Tensor  # [pairs]: its cosine with every value


def read_and_write() -> Reading:
    """Write every pair into the matrix, which decays before each, and ask for one of them."""
    # Keys that resemble one another mix up their values: with this seed they hardly do.
    generator = torch.Generator().manual_seed(31)
    keys = torch.nn.functional.normalize(torch.randn(len(PAIRS), KEY_SIZE, generator=generator), dim=1)
    values = torch.randn(len(PAIRS), VALUE_SIZE, generator=generator).sign()
    memory = torch.zeros(VALUE_SIZE, KEY_SIZE)
    states = []
    for index, (letter, digit) in enumerate(PAIRS):
        if index:
            memory = DECAY * memory
            states.append(State("decay", f"decay:  A ← {DECAY} A", memory))
        memory = memory + torch.outer(values[index], keys[index])
        caption = f"write {letter} → {digit}:  A ← A + v kᵀ"
        states.append(State("write", caption, memory, keys[index], values[index], (2 * index, 2 * index + 1)))
    query = keys[[letter for letter, _ in PAIRS].index(QUERY)]
    answer = memory @ query
    likeness = torch.cosine_similarity(values, answer[None])
    caption = f"read {QUERY}:  A k is most like {PAIRS[int(likeness.argmax())][1]}"
    states.append(State("read", caption, memory, query, read=(2 * len(PAIRS) + 2,)))
    return Reading(states, keys, values, answer, likeness)


class Drawing:
    """The parts of the picture, and how each changes from state to state."""

    def __init__(self, states: list[State]) -> None:
        self.kinds = [state.kind for state in states]
        self.parts: list[str] = []
        self.frames: list[str] = []
        self._names: dict[str, str] = {}  # of movements that several parts make

    @property
    def seconds(self) -> float:
        return sum(SECONDS[kind] for kind in self.kinds)

    def move(self, looks: list[str], change: float = CHANGE) -> str:
        """Return the attribute of a part that has one look, declarations of CSS, in each state."""
        begin, stops = 0.0, []
        for kind, look in zip(self.kinds, looks, strict=True):
            end = begin + SECONDS[kind]
            stops.append(f"{100 * (begin + change) / self.seconds:.1f}%,{100 * end / self.seconds:.1f}%{{{look}}}")
            begin = end
        movement = "".join(stops)
        if movement not in self._names:
            self._names[movement] = f"m{len(self._names)}"
            self.frames.append(f"@keyframes {self._names[movement]}{{0%{{{looks[0]}}}{movement}}}")
        return f'style="animation-name:{self._names[movement]}"'

    def add_cell(self, x: float, y: float, numbers: list[float]) -> None:
        """Draw a number as a square: orange above zero, blue below, the stronger the larger."""
        looks = [
            f"fill:var(--{'minus' if number < 0 else 'plus'});fill-opacity:{min(1.0, abs(number) / STRONGEST):.2f}"
            for number in numbers
        ]
        sign, last = ("minus" if numbers[-1] < 0 else "plus"), looks[-1].rpartition(":")[2]
        place = f'x="{x:g}" y="{y:g}" width="{CELL - 2}" height="{CELL - 2}" rx="4"'
        self.parts.append(f'<rect class="frame" {place}/>')
        self.parts.append(f'<rect class="{sign}" fill-opacity="{last}" {place} {self.move(looks)}/>')

    def add_text(self, x: float, y: float, words: str, look: str, shown: list[bool] | None = None) -> None:
        """Write words, in all states or in some."""
        if shown is None:
            self.parts.append(f'<text class="{look}" x="{x:g}" y="{y:g}">{words}</text>')
            return
        hidden = "" if shown[-1] else " hidden"
        moved = self.move([f"fill-opacity:{int(now)}" for now in shown], change=0.1)  # so that no words lie on others
        self.parts.append(f'<text class="{look}{hidden}" x="{x:g}" y="{y:g}" {moved}>{words}</text>')


def svg(reading: Reading) -> str:
    """Return the picture; where nothing moves, it shows the last state."""
    states, drawing = reading.states, Drawing(reading.states)
    asked = [state.kind == "read" for state in states]
    middle = LEFT + KEY_SIZE * CELL / 2

    text = "".join(letter + digit for letter, digit in PAIRS) + "??" + QUERY
    for index, letter in enumerate(text):
        x = 300 + 30 * (index - (len(text) - 1) / 2)
        now = [index in state.read for state in states]
        drawing.add_text(x, 44, letter, "text")
        drawing.add_text(x, 44, letter, "text best", now)
    for caption in dict.fromkeys(state.caption for state in states):
        drawing.add_text(300, 88, caption, "caption", [state.caption == caption for state in states])

    for column in range(KEY_SIZE):
        numbers = [0.0 if state.key is None else float(state.key[column]) for state in states]
        drawing.add_cell(LEFT + CELL * column, TOP - 46, numbers)
    for row in range(VALUE_SIZE):
        y = TOP + CELL * row
        # Values and answers are larger than entries of the matrix: they are drawn half as strong.
        numbers = [0.0 if state.value is None else float(state.value[row]) / 2 for state in states]
        drawing.add_cell(VALUE_X, y, numbers)
        for column in range(KEY_SIZE):
            drawing.add_cell(LEFT + CELL * column, y, [float(state.memory[row, column]) for state in states])
        drawing.add_cell(ANSWER_X, y, [float(reading.answer[row]) / 2 if now else 0.0 for now in asked])

    below = TOP + VALUE_SIZE * CELL + 22
    drawing.add_text(LEFT - 14, TOP - 23, "key k", "small end")
    drawing.add_text(VALUE_X + 16, below, "value v", "small")
    drawing.add_text(middle, below, "fast matrix A", "small")
    drawing.add_text(ANSWER_X + 16, below, "A k", "small")
    drawing.add_text(LIST_X, TOP - 14, "A k is like", "small list", asked)
    for index, (_, digit) in enumerate(PAIRS):
        y, likeness = TOP + 51 * index + 25, float(reading.likeness[index])
        best = " best" if index == int(reading.likeness.argmax()) else ""
        drawing.add_text(LIST_X, y + 7, digit, f"list{best}", asked)
        place = f'x="{LIST_X + 20}" y="{y - 9}" width="{BAR * max(0.0, likeness):.1f}" height="18" rx="3"'
        moved = drawing.move([f"fill-opacity:{int(now)}" for now in asked])
        drawing.parts.append(f'<rect class="bar" {place} {moved}/>')
        drawing.add_text(585, y + 6, f"{likeness:.2f}".replace("-", "\u2212"), f"end{best}", asked)

    moving = f"[style] {{ animation: {drawing.seconds:g}s ease-in-out {TIMES} both; }}"
    still = "@media (prefers-reduced-motion: reduce) { [style] { animation: none !important; } }"
    words = "A key and a value are written into a matrix, which fades before the next; a key then reads its value."
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 400" role="img">',
            f"<title>{words}</title>",
            f"<style>\n{STYLE}{moving}\n{still}",
            *drawing.frames,
            "</style>",
            '<rect class="card" width="600" height="400" rx="10"/>',
            *drawing.parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PATH.write_text(svg(read_and_write()))
