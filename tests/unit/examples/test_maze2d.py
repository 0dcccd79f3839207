"""examples/maze2d.py: seeded mazes that can be solved, drawn as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

FILE = Path(__file__).resolve().parents[3] / "examples" / "maze2d.py"


@pytest.fixture(scope="module")
def maze2d() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maze2d_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_accepts_it(maze2d):
    check_env(maze2d.make({}), skip_render_check=False)


@pytest.mark.parametrize("seed", range(30))
def test_the_shortest_path_reaches_the_goal_and_pays_once_at_the_end(maze2d, seed):
    maze = maze2d.make({}, cells=5, max_distance=12)
    observation, info = maze.reset(seed=seed)
    goal = tuple(observation[2:].tolist())
    distances = maze.distances(goal)
    assert len(distances) == 25  # every cell can be reached
    assert 2 <= info["distance"] <= 12
    rewards, done = [], False
    while not done:
        before = distances[tuple(observation[:2].tolist())]
        for move in maze2d.MOVES:
            observation, reward, done, truncated, _ = maze.step(move)
            assert not truncated
            after = distances[tuple(observation[:2].tolist())]
            if after < before:
                rewards.append(reward)
                break
            if after > before:  # step back: the reverse of up (0) is down (1), of left (2) right (3)
                observation, *_ = maze.step(move ^ 1)
    assert rewards == [0.0] * (info["distance"] - 1) + [1.0]


def test_the_seed_decides_everything(maze2d):
    def picture(seed: int) -> np.ndarray:
        maze = maze2d.make({})
        maze.reset(seed=seed)
        return maze.render()

    assert np.array_equal(picture(1), picture(1))
    assert len({picture(seed).tobytes() for seed in range(40)}) == 40


def test_a_wall_stops_the_agent_and_the_picture_shows_where_it_is(maze2d):
    maze = maze2d.make({}, cells=3, tile_pixels=8)
    observation, _ = maze.reset(seed=0)
    picture = maze.render()
    assert picture.shape == (56, 56, 3)
    row, column = observation[:2].tolist()
    assert tuple(picture[(2 * row + 1) * 8 + 4, (2 * column + 1) * 8 + 4].tolist()) == maze2d.AGENT
    for move, (down, right) in maze2d.MOVES.items():
        wall = picture[(2 * row + 1 + down) * 8 + 4, (2 * column + 1 + right) * 8 + 4].tolist() == list(maze2d.WALL)
        maze.reset(seed=0)
        observation, *_ = maze.step(move)
        assert (observation[:2].tolist() == [row, column]) == wall
