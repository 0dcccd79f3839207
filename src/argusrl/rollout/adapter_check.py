"""What must hold of a published adapter around loading it. A failure is an AdapterRefused that names the version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from argusrl.errors import AdapterRefused, CorruptionError
from argusrl.rollout.engine import EngineSettings
from argusrl.storage.manifest import has_manifest, read_manifest
from argusrl.types import AdapterRef


def check_published(ref: AdapterRef, folder: Path) -> None:
    try:
        if not has_manifest(folder):
            raise CorruptionError(f"{folder} has no manifest: it was not published to its end")
        read_manifest(folder)
    except CorruptionError as error:
        raise AdapterRefused(f"adapter version {ref.version}: {error.message}", error.hint) from error


def check_lora_config(ref: AdapterRef, folder: Path, settings: EngineSettings) -> None:
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"adapter version {ref.version}: adapter_config.json: {error}") from error
    found, wanted = (config.get("r"), config.get("lora_alpha")), (settings.lora_rank, settings.lora_alpha)
    if found != wanted:
        raise AdapterRefused(
            f"adapter version {ref.version} has rank {found[0]} and alpha {found[1]}, "
            f"the engine was started for rank {wanted[0]} and alpha {wanted[1]}"
        )


def check_reports(ref: AdapterRef, reports: Sequence[dict[str, str]]) -> None:
    for worker, report in enumerate(reports):
        if "problem" in report:
            raise AdapterRefused(f"adapter version {ref.version}: {report['problem']} (worker {worker})")
        if report["sha256"] != ref.sha256:
            raise AdapterRefused(
                f"adapter version {ref.version}: worker {worker} loaded {report['sha256']}, {ref.sha256} was published"
            )


def refusal(ref: AdapterRef, error: Exception) -> AdapterRefused:
    if isinstance(error, AdapterRefused):
        return error
    return AdapterRefused(f"adapter version {ref.version} was refused by vLLM: {type(error).__name__}: {error}")
