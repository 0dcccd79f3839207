"""What must hold of a published adapter around loading it. A failure is an AdapterRefused that names the version."""

from __future__ import annotations

import json
from collections.abc import Sequence

from argusrl.errors import AdapterRefused
from argusrl.rollout.engine import EngineSettings
from argusrl.types import AdapterRef


def check_lora_config(ref: AdapterRef, config: bytes, settings: EngineSettings) -> None:
    try:
        asked = json.loads(config)
        found, wanted = (asked.get("r"), asked.get("lora_alpha")), (settings.lora_rank, settings.lora_alpha)
    except (ValueError, AttributeError) as error:
        raise AdapterRefused(f"adapter version {ref.version}: adapter_config.json: {error}") from error
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
