"""FrozenLake without holes, played from pixels: every start and goal of a small lake, some layouts held out.

In a recipe:

    data:
      kind: generated
      generator: examples/frozen_lake.py:start
    environment:
      kind: gymnasium
      factory: examples/frozen_lake.py:make
      actions: {left: 0, down: 1, right: 2, up: 3}
      image_size: 96
      max_turns: 6

A layout is a start cell and a goal cell at least two moves apart. A 3x3 lake has 48 of them: 36 are trained on and 12
are held out. Held out means that no training episode begins with that start and goal; it does not mean that the
single frames are all new, since an agent that has moved can stand where a held-out layout begins.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from argusrl.types import Prompt

if TYPE_CHECKING:
    import gymnasium

ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
MIN_DISTANCE = 2
HELDOUT_SHARE = 4  # one layout in four is held out

Cell = tuple[int, int]  # row, column


def distance(start: Cell, goal: Cell) -> int:
    """Fewest moves from start to goal: there are no holes, so it is the Manhattan distance."""
    return abs(start[0] - goal[0]) + abs(start[1] - goal[1])


def lake(start: Cell, goal: Cell, size: int) -> list[str]:
    """The map as Gymnasium reads it, e.g. ["SFF", "FFF", "FFG"]."""
    letters = {start: "S", goal: "G"}
    return ["".join(letters.get((row, column), "F") for column in range(size)) for row in range(size)]


def layouts(size: int = 3) -> tuple[list[list[str]], list[list[str]]]:
    """All maps in a fixed shuffled order, split into training maps and held-out maps."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    pairs = [(start, goal) for start in cells for goal in cells if distance(start, goal) >= MIN_DISTANCE]
    random.Random(0).shuffle(pairs)
    cut = len(pairs) // HELDOUT_SHARE
    maps = [lake(start, goal, size) for start, goal in pairs]
    return maps[cut:], maps[:cut]


def train_starts(size: int = 3) -> list[dict[str, Any]]:
    """What `environment.starts` would list: 36 starts for a 3x3 lake."""
    return [{"seed": 0, "options": {"desc": desc}} for desc in layouts(size)[0]]


def heldout_starts(size: int = 3) -> list[dict[str, Any]]:
    """The same for evaluation: 12 starts for a 3x3 lake, none of them a training start."""
    return [{"seed": 0, "options": {"desc": desc}} for desc in layouts(size)[1]]


def start(index: int, split: str, size: int = 3) -> Prompt:
    """The start number `index` of a split ("train" or "heldout"); after the last layout the first comes again."""
    starts = train_starts(size) if split == "train" else heldout_starts(size)
    return Prompt(id=f"{split}-{index}", info=starts[index % len(starts)])


def find(desc: list[str], letter: str) -> Cell:
    """The cell of the map that holds `letter`."""
    return next((row, line.index(letter)) for row, line in enumerate(desc) if letter in line)


def make(_info: dict[str, Any], desc: list[str], spare_moves: int = 1) -> gymnasium.Env:
    """The environment of one start: ice is not slippery, and the time is the distance plus `spare_moves`."""
    import gymnasium

    limit = distance(find(desc, "S"), find(desc, "G")) + spare_moves
    return gymnasium.make(
        "FrozenLake-v1", desc=desc, is_slippery=False, max_episode_steps=limit, render_mode="rgb_array"
    )
