"""MiniGrid's empty room, played from pixels: the agent starts anywhere and walks to the green square.

In a recipe:

    data:
      kind: generated
      generator: examples/minigrid_empty.py:start
    environment:
      kind: gymnasium
      id: MiniGrid-Empty-Random-5x5-v0
      options: {highlight: false}
      actions: {left: 0, right: 1, forward: 2}
      image_size: 160
      max_turns: 8

The seed decides where the agent stands and looks. A 5x5 room has nine free cells, one of them the goal, and four
directions: 32 starts. Training and held-out seeds are split by start, so no held-out start is trained on.
"""

from __future__ import annotations

from typing import Any

from argusrl.types import Prompt

ACTIONS = {"left": 0, "right": 1, "forward": 2}
ID = "MiniGrid-Empty-Random-5x5-v0"
HELDOUT_SHARE = 4  # one start in four is held out

_seeds: dict[str, list[int]] = {}


def seeds_by_split() -> dict[str, list[int]]:
    """One seed for each start of the room, split into "train" (24) and "heldout" (8)."""
    if not _seeds:
        import gymnasium
        import minigrid  # noqa: F401  (registers its environments)

        env = gymnasium.make(ID)
        seed_of: dict[tuple[int, int, int], int] = {}
        for seed in range(1_000):
            env.reset(seed=seed)
            room: Any = env.unwrapped
            seed_of.setdefault((int(room.agent_pos[0]), int(room.agent_pos[1]), int(room.agent_dir)), seed)
        env.close()
        # Which seeds come first has nothing to do with where the agent stands: a fair split.
        seeds = sorted(seed_of.values())
        cut = len(seeds) // HELDOUT_SHARE
        _seeds.update(train=seeds[cut:], heldout=seeds[:cut])
    return _seeds


def start(index: int, split: str) -> Prompt:
    """The start number `index` of a split ("train" or "heldout"); after the last one the first comes again."""
    seeds = seeds_by_split()[split]
    return Prompt(id=f"{split}-{index}", info={"seed": seeds[index % len(seeds)]})
