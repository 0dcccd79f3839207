"""Called by `ray start` itself (RAY_START_HOOK): what its command line cannot say."""

from __future__ import annotations

from typing import Any


def without_client_server(parameters: Any, _head: bool) -> None:
    """Start no server for `ray://` clients: nobody needs it here, and two runs would fight for its port."""
    parameters.ray_client_server_port = None
