"""Running a command in a container, over the web socket that kubectl exec uses, too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from argusrl.cluster.kube_api import Denied, KubeError, NotFound, Unreachable

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_HANDSHAKE = re.compile(r"Handshake status (\d+)")
_ERROR_CHANNEL = 3  # carries a Status object at the end


def execute(
    client: ApiClient, pod: str, namespace: str, command: Sequence[str], container: str, seconds: float
) -> tuple[int, str]:
    """Exit code, and standard output and error as one text. Raises KubeError, Unreachable after `seconds`."""
    from kubernetes.client import ApiClient, ApiException, CoreV1Api
    from kubernetes.stream import stream

    try:
        # `stream` replaces the transport of the client that it is given, so it gets one of its own
        socket = stream(
            CoreV1Api(ApiClient(client.configuration)).connect_get_namespaced_pod_exec,
            pod,
            namespace,
            command=list(command),
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
            **({"container": container} if container else {}),
        )
    except ApiException as error:
        status = _HANDSHAKE.search(str(error.reason))  # all that is left of the answer
        what = f"cannot run {command[0]} in pod {namespace}/{pod}"
        kinds = {"404": (NotFound, "no such pod"), "403": (Denied, "not allowed: create on pods/exec")}
        kind, why = kinds.get(status[1] if status else "", (KubeError, str(error.reason)))
        raise kind(f"{what}: {why}") from error
    with closing(socket):
        deadline = time.monotonic() + seconds
        while socket.is_open():
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unreachable(f"{command[0]} in pod {namespace}/{pod} did not end within {seconds:.0f} s")
            socket.update(timeout=left)
        code = _exit_code(socket.read_channel(_ERROR_CHANNEL))  # before read_all, which empties every channel
        return code, socket.read_all()


def _exit_code(status: str) -> int:
    answer: dict[str, Any] = json.loads(status or "{}")
    if answer.get("status") == "Success":
        return 0
    causes = (answer.get("details") or {}).get("causes") or []
    codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
    return codes[0] if codes else 1
