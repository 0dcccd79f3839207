"""A port of a pod on this machine, as `kubectl port-forward` gives it: through the API server and the kubelet.

So it needs no route to the pod, and a network policy around the pod does not stand in the way.
"""

from __future__ import annotations

import select
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from argusrl.errors import ClusterError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_PIECE_BYTES = 64 << 10


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextmanager
def forwarded(client: ApiClient, pod: str, namespace: str, port: int) -> Iterator[str]:
    """`127.0.0.1:N` that leads to the port while the context is open. Raises ClusterError where there is no way."""
    _open(client, pod, namespace, port).close()  # refusals show here, not as a broken connection later

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError, ClusterError):
                _pump(self.request, _open(client, pod, namespace, port), port)

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _open(client: ApiClient, pod: str, namespace: str, port: int) -> Any:
    from kubernetes.client import ApiClient, ApiException, CoreV1Api
    from kubernetes.stream import portforward

    api = CoreV1Api(ApiClient(client.configuration))  # `portforward` replaces the transport of its client
    try:
        return portforward(api.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))
    except (ApiException, OSError) as error:
        raise ClusterError(
            f"cannot reach port {port} of pod {namespace}/{pod}: {getattr(error, 'reason', error)}",
            "it takes the right to create pods/portforward, and a pod that runs",
        ) from error


def _pump(here: Any, forward: Any, port: int) -> None:
    there = forward.socket(port)
    there.setblocking(True)
    try:
        while True:
            readable, _, _ = select.select([here, there], [], [])
            for source, sink in ((here, there), (there, here)):
                if source in readable:
                    piece = source.recv(_PIECE_BYTES)
                    if not piece:
                        return
                    sink.sendall(piece)
    finally:
        forward.close()
