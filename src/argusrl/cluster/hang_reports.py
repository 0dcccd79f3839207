"""HyperPod's job monitoring agent hears of runs that hang: it watches the output of a Ray worker for lines of progress.

The agent is told by AWS's own library, where an image has it (toolkit-for-ray-on-sagemaker-ai), and only to notify:
what is done about a run that hangs is for the run's own watch, which knows more.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

AGENT_VARIABLE = "HYPERPOD_JMA_HOST"  # in every pod of a run: the host, where the agent listens
LIBRARY = "toolkit_for_ray_on_sagemaker_ai.log_monitoring"
PROGRESS_PATTERN = r"argusrl step [0-9]+ of [0-9]+: "
END_PATTERN = r"argusrl ends: "


def progress_line(step: int, steps: int, phase: str) -> str:
    """What PROGRESS_PATTERN finds; `step` is the one that is worked on."""
    return f"argusrl step {step} of {steps}: {phase}"


def end_line(reason: str) -> str:
    """What END_PATTERN finds: from then on no progress is expected."""
    return f"argusrl ends: {reason}"


def rule(quiet_seconds: float, start_seconds: float) -> dict[str, Any]:
    """No line for so long, or none at all at the start, is a hang."""
    return {
        "name": "argusrl_progress",
        "type": "log_pattern",
        "enabled": True,
        "log_pattern": PROGRESS_PATTERN,
        "timeout_minutes": round(quiet_seconds / 60, 2),
        "start_timeout_minutes": round(start_seconds / 60, 2),
        "stop_pattern": END_PATTERN,
        "fault_on_match": False,
    }


def start_hang_reports(quiet_seconds: float, start_seconds: float) -> str:
    """Tell the agent to watch the output of this Ray worker. What came of it, for a log; never raises."""
    if not os.environ.get(AGENT_VARIABLE):
        return f"{AGENT_VARIABLE} is not set: no agent to tell"
    try:
        library = importlib.import_module(LIBRARY)
        config = library.LogMonitorConfig(enabled=True, rules=[rule(quiet_seconds, start_seconds)], action="notify")
        result = library.SageMakerLogMonitoring(config=config).start().result
    except ImportError:
        return "toolkit-for-ray-on-sagemaker-ai is not installed: the agent is not told"
    except Exception as error:  # theirs to break, not the run's
        return f"the agent was not told: {type(error).__name__}: {error}"
    return f"job monitoring agent: {result}"
