from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.kubernetes_api import ApiServer

pytest.importorskip("kubernetes")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A Kubernetes API server, to which the commands' kubeconfig leads."""
    with ApiServer() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield server
