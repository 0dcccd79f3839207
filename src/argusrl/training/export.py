"""Exports a committed adapter and loads the result back: the canary's log-probabilities must be those of the commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from argusrl.config.sections import Config
from argusrl.errors import CorruptionError
from argusrl.journal.commits import Commit
from argusrl.journal.episodes import read_trajectory
from argusrl.journal.images import read_image
from argusrl.policy.settings import PolicySettings
from argusrl.storage.layout import RunFolder
from argusrl.types import TrajectoryRef

_TOLERANCE = 1e-3  # float32; a merged bfloat16 model rounds the merged weights
_TOLERANCE_BFLOAT16 = 0.25


def export_run(folder: RunFolder, config: Config, commit: Commit, to: Path, *, merge: bool) -> dict[str, Any]:
    """Write `to`, load it back, compare. Raises CorruptionError where what was written is not what was trained."""
    from argusrl.policy.export import write_merged, write_peft
    from argusrl.policy.group import connect, disconnect, host_store
    from argusrl.policy.policy import Policy

    settings = PolicySettings.from_config(config, device="cpu")
    adapter = folder.absolute(commit.adapter.path)
    if merge:
        write_merged(settings, adapter, to)
        loaded = replace(settings, model=str(to), initial=None)
    else:
        write_peft(settings, adapter, to)
        loaded = replace(settings, initial=to)
    store = host_store()
    connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="export")
    try:
        policy = Policy(loaded)
        found = _canary(policy, folder, commit)
        policy.close()
    finally:
        disconnect()
    expected = commit.algorithm_state["canary_logprobs"]
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    tolerance = _TOLERANCE if settings.dtype == "float32" else _TOLERANCE_BFLOAT16
    if not difference <= tolerance:
        raise CorruptionError(
            f"{to} loads, but its log-probabilities differ from the trained ones by up to {difference:.3g}",
            "do model.path and library versions still match those of the run?",
        )
    return {
        "path": str(to),
        "kind": "merged" if merge else "peft",
        "step": commit.step,
        "adapter_sha256": commit.adapter.sha256,
        "largest_difference": difference,
    }


def _canary(policy: Any, folder: RunFolder, commit: Commit) -> list[float]:
    reference = msgspec.convert(commit.algorithm_state["canary"], TrajectoryRef)
    turn = read_trajectory(folder, reference).turns[0]
    images = [read_image(folder, ref) for ref in turn.images]
    values: list[float] = policy.canary(turn.prompt_ids, images, turn.response_ids)
    return values
