"""A seeded 2D maze as a Gymnasium environment: red agent, green goal, one picture after every move.

In a recipe:

    data:
      kind: environment
      train_size: 256
      heldout_size: 64
    environment:
      kind: gymnasium
      factory: examples/maze2d.py:make
      options: {cells: 5}
      actions: {up: 0, down: 1, left: 2, right: 3}
      max_turns: 15

The seed of `reset` makes the maze, the start and the goal; the same seed always makes the same ones. Every cell can be
reached on exactly one path. A move into a wall leaves the agent where it is. Reaching the goal pays 1 and ends the
episode; nothing else pays.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np

Cell = tuple[int, int]  # row, column

MOVES: dict[int, Cell] = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}  # up, down, left, right
FLOOR, WALL = (235, 235, 235), (40, 44, 52)
AGENT, GOAL = (214, 48, 49), (0, 148, 80)


class Maze2D(gymnasium.Env):
    """`cells` x `cells` rooms; rendered with walls as tiles of their own, so (2 * cells + 1) tiles a side.

    `max_distance` bounds the shortest path from start to goal in moves, so that an episode can be won in
    `environment.max_turns` turns. The observation is (agent row, agent column, goal row, goal column).
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 (Gymnasium declares an instance variable)

    def __init__(
        self, cells: int = 5, max_distance: int = 12, tile_pixels: int = 20, render_mode: str | None = "rgb_array"
    ) -> None:
        if cells < 2 or max_distance < 1 or tile_pixels < 2:
            raise ValueError(
                f"maze of {cells} cells, distance {max_distance}, tiles of {tile_pixels} pixels: too small"
            )
        self.cells, self.max_distance, self.tile_pixels = cells, max_distance, tile_pixels
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.observation_space = gymnasium.spaces.MultiDiscrete([cells] * 4)
        self._open: set[frozenset[Cell]] = set()  # pairs of neighbours without a wall between them
        self._agent: Cell = (0, 0)
        self._goal: Cell = (0, 0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._open = self._carve()
        self._agent = self._random_cell()
        distances = self.distances(self._agent)
        reachable = sorted(cell for cell, moves in distances.items() if 2 <= moves <= self.max_distance)
        choices = reachable or sorted(cell for cell in distances if cell != self._agent)
        self._goal = choices[int(self.np_random.integers(len(choices)))]
        return self._observation(), {"distance": distances[self._goal]}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        target = self._neighbour(self._agent, int(action))
        if frozenset((self._agent, target)) in self._open:
            self._agent = target
        solved = self._agent == self._goal
        return self._observation(), float(solved), solved, False, {}

    def render(self) -> np.ndarray:
        """[side, side, 3] uint8 with side = (2 * cells + 1) * tile_pixels."""
        tiles = np.full((2 * self.cells + 1, 2 * self.cells + 1, 3), WALL, dtype=np.uint8)
        tiles[1::2, 1::2] = FLOOR
        for first, second in map(tuple, self._open):
            tiles[first[0] + second[0] + 1, first[1] + second[1] + 1] = FLOOR
        picture = tiles.repeat(self.tile_pixels, axis=0).repeat(self.tile_pixels, axis=1)
        self._paint(picture, self._goal, GOAL, round_corners=False)
        self._paint(picture, self._agent, AGENT, round_corners=True)
        return picture

    def distances(self, start: Cell) -> dict[Cell, int]:
        """Fewest moves from `start` to every cell."""
        found = {start: 0}
        queue = deque([start])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                target = self._neighbour(cell, move)
                if target not in found and frozenset((cell, target)) in self._open:
                    found[target] = found[cell] + 1
                    queue.append(target)
        return found

    def _carve(self) -> set[frozenset[Cell]]:
        """A random spanning tree of the grid, by a depth-first walk that opens a wall to each new cell."""
        stack = [self._random_cell()]
        seen = set(stack)
        passages: set[frozenset[Cell]] = set()
        while stack:
            targets = [self._neighbour(stack[-1], move) for move in MOVES]
            fresh = [cell for cell in targets if cell not in seen and all(0 <= at < self.cells for at in cell)]
            if not fresh:
                stack.pop()
                continue
            target = fresh[int(self.np_random.integers(len(fresh)))]
            passages.add(frozenset((stack[-1], target)))
            seen.add(target)
            stack.append(target)
        return passages

    def _paint(self, picture: np.ndarray, cell: Cell, colour: tuple[int, int, int], round_corners: bool) -> None:
        top, left = ((2 * at + 1) * self.tile_pixels for at in cell)
        tile = picture[top : top + self.tile_pixels, left : left + self.tile_pixels]
        offsets = (np.arange(self.tile_pixels) + 0.5) / self.tile_pixels - 0.5  # of pixel centres, in tiles
        rows, columns = np.abs(offsets)[:, None], np.abs(offsets)[None, :]
        inside = np.hypot(rows, columns) < 0.42 if round_corners else np.maximum(rows, columns) < 0.42
        tile[inside] = colour

    def _neighbour(self, cell: Cell, move: int) -> Cell:
        return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]

    def _random_cell(self) -> Cell:
        row, column = self.np_random.integers(self.cells, size=2).tolist()
        return row, column

    def _observation(self) -> np.ndarray:
        return np.array([*self._agent, *self._goal], dtype=np.int64)


def make(_info: dict[str, Any], **options: Any) -> Maze2D:
    """The environment of one start, as `environment.factory` calls it."""
    return Maze2D(**options)
