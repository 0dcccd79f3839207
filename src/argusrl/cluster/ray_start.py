"""`python -m argusrl.cluster.ray_start start …` is Ray's own `ray start`, with a fourth of its imports.

What its command line cannot say is in a hook that it calls (RAY_START_HOOK).
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

# Commands that Ray adds where they can be imported: with them come pandas, FastAPI and aiohttp, before anything starts.
_OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def without_client_server(parameters: Any, _head: bool) -> None:
    """Start no server for `ray://` clients: nobody needs it here, and two runs would fight for its port."""
    parameters.ray_client_server_port = None


if __name__ == "__main__":
    sys.modules |= dict.fromkeys(_OTHER_COMMANDS)  # type: ignore[arg-type]  # None: importing it fails
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)
