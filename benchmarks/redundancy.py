"""Work pushed through tower, prefill and training against the least that is needed: by counters, and by hand.

    python benchmarks/redundancy.py RUN_FOLDER [--step N]

The hand count reads the journal and the commit, not the counters. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.episodes import read_finished
from argusrl.storage.layout import RunFolder
from argusrl.types import Trajectory, Turn

BLOCK_TOKENS = 32  # of the engine's prefix cache
COUNTERS = "compute/"


def committed_trajectories(folder: RunFolder, commit: Commit) -> list[Trajectory]:
    """What the commit names, in its order."""
    return [
        read_finished(folder, commit.segments[one.segment].path, one.offset, one.length).trajectory
        for one in commit.trajectories
    ]


def prompt_items(turn: Turn) -> Iterator[Hashable]:
    """The new prompt of a turn, where the tokens of an image are told apart by its content.

    An image is one token of the collapsed prompt and a run of that token in the expanded one.
    """
    stands_for_image = {
        token for token in set(turn.collapsed_ids) if turn.prompt_ids.count(token) > turn.collapsed_ids.count(token)
    }
    images = iter(turn.images)
    for token, run in itertools.groupby(turn.prompt_ids):
        if token in stands_for_image:
            image = next(images).sha256
            yield from ((image, number) for number, _ in enumerate(run))
        else:
            yield from run


def sequence(trajectory: Trajectory) -> list[Hashable]:
    """All tokens of an episode."""
    return [item for turn in trajectory.turns for item in (*prompt_items(turn), *turn.response_ids)]


def prefixes(items: Iterable[Hashable]) -> Iterator[int]:
    """A number for each prefix of the sequence; equal for equal prefixes."""
    state = 0
    for item in items:
        state = hash((state, item))
        yield state


def count_training(trajectories: Sequence[Trajectory], plan: dict[str, Any]) -> dict[str, int]:
    """Tokens that the plan's micro-batches hold where each prefix is computed once, against each once an update."""
    pushed = least = unshared = 0
    for update in plan["updates"]:
        whole: set[int] = set()
        for rank in update["ranks"]:
            for rows in rank:
                batch: set[int] = set()
                for row in rows:
                    items = sequence(trajectories[row])
                    unshared += len(items)
                    batch.update(prefixes(items))
                pushed += len(batch)
                whole |= batch
        least += len(whole)
    return {"plan_tokens": pushed, "least_tokens": least, "rows_tokens": unshared}


def count_prefill(trajectories: Sequence[Trajectory], block: int = BLOCK_TOKENS) -> dict[str, int]:
    """Prompt tokens that requests ask for, and that remain behind an ideal cache of whole blocks."""
    asked = least = 0
    cached: set[int] = set()
    for number in range(max(len(trajectory.turns) for trajectory in trajectories)):
        for trajectory in trajectories:
            if number >= len(trajectory.turns):
                continue
            before = [i for turn in trajectory.turns[:number] for i in (*prompt_items(turn), *turn.response_ids)]
            whole = list(prefixes([*before, *prompt_items(trajectory.turns[number])]))
            asked += len(whole)
            ends = whole[block - 1 :: block]
            usable = ends[: (len(whole) - 1) // block]
            known = next((place for place, end in enumerate(usable) if end not in cached), len(usable))
            least += len(whole) - known * block
            cached.update(ends)
        for trajectory in trajectories:  # replies, but for their last token, are in the cache when the next turn comes
            if number < len(trajectory.turns):
                done = [i for turn in trajectory.turns[: number + 1] for i in (*prompt_items(turn), *turn.response_ids)]
                cached.update(list(prefixes(done[:-1]))[block - 1 :: block])
    return {"asked_tokens": asked, "least_tokens": least}


def count_images(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Images that episodes show, and the different ones."""
    shown = [image.sha256 for trajectory in trajectories for turn in trajectory.turns for image in turn.images]
    return {"shown_images": len(shown), "unique_images": len(set(shown))}


def count(folder: RunFolder, step: int) -> dict[str, Any]:
    """Counters of the step and the hand count."""
    commit = CommitChain(folder).read(step)
    trajectories = committed_trajectories(folder, commit)
    prefill = count_prefill(trajectories)
    training = count_training(trajectories, commit.plan)
    cached_share = float(commit.metrics["rollout/cached_prompt_share"] or 0.0)
    computed = prefill["asked_tokens"] * (1.0 - cached_share)  # by vLLM's own statistics
    return {
        "step": step,
        "counters": {name: value for name, value in commit.metrics.items() if name.startswith(COUNTERS)},
        "by_hand": {
            "prefill": {**prefill, "computed_tokens": computed, "factor": computed / prefill["least_tokens"]},
            "training": {**training, "factor": training["plan_tokens"] / max(1, training["least_tokens"])},
            "images": count_images(trajectories),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(count(RunFolder(options.folder.absolute()), options.step), indent=1))


if __name__ == "__main__":
    main()
