"""Seeds of a simulation, played here or in processes; those that fail are told so that each can be played again."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

PROCESSES = int(os.environ.get("ARGUSRL_FAULT_PROCESSES", "1"))
ONLY = os.environ.get("ARGUSRL_SEED")
SHOWN = 10  # failures; more say nothing more


def failing(simulate: Callable[[int], Any], broken: type[Exception], first: int, last: int) -> list[str]:
    """Play seeds first … last - 1; one line for each that fails."""
    found = []
    for seed in range(first, last):
        try:
            simulate(seed)
        except broken as failure:
            found.append(f"ARGUSRL_SEED={seed}: {failure}")
        if len(found) == SHOWN:
            break
    return found


def failures_of(play: Callable[[int, int], list[str]], seeds: int, chunk: int) -> list[str]:
    """What `play(first, last)`, a function of a module, finds in all seeds, or in the one that is asked for."""
    if ONLY:
        return play(int(ONLY), int(ONLY) + 1)
    if PROCESSES == 1:
        return play(0, seeds)
    starts = range(0, seeds, chunk)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        parts = pool.map(play, starts, [min(start + chunk, seeds) for start in starts])
        return [line for part in parts for line in part]
