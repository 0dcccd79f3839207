from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from argusrl.cluster import bundle
from argusrl.cluster.bundle import make_bundle
from argusrl.cluster.kuberay_release import KUBERAY_IMAGE, KUBERAY_INSTALL, KUBERAY_VERSION
from argusrl.errors import ClusterError, ConfigError
from fakes.kubernetes_recipe import ROOT


@pytest.fixture(autouse=True)
def _pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_pip", lambda: ["pip"])


class FakePip:
    """Puts an empty wheel where it is told."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[Sequence[str]] = []
        self.code = code

    def __call__(self, words: Sequence[str]) -> int:
        self.calls.append(words)
        option = "--dest" if words[1] == "download" else "--wheel-dir"
        (Path(words[words.index(option) + 1]) / f"{words[1]}-1.0-py3-none-any.whl").write_bytes(words[1].encode())
        return self.code


def test_wheels_checksums_images_and_what_to_do_with_them(tmp_path: Path) -> None:
    pip = FakePip()
    made = make_bundle(tmp_path / "bundle", ROOT, "gpu", "registry.example/argusrl:1", "3.11", pip)
    download, build = pip.calls
    assert download[download.index("--requirement") + 1] == str(ROOT / "requirements" / "gpu.txt")
    assert "--no-deps" in download  # the list is whole
    assert {"manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "manylinux_2_36_x86_64"} <= set(download)
    assert build[-1] == str(ROOT)
    assert made.wheels == 2
    assert (made.folder / "requirements.txt").read_text() == (ROOT / "requirements" / "gpu.txt").read_text()
    digest = hashlib.sha256(b"download").hexdigest()
    assert f"{digest}  wheels/download-1.0-py3-none-any.whl\n" in (made.folder / "SHA256SUMS").read_text()
    images = (made.folder / "images.txt").read_text().split()
    assert images == ["registry.example/argusrl:1", KUBERAY_IMAGE, "python:3.11.14-slim-bookworm"]
    readme = (made.folder / "README.md").read_text()
    assert "--no-index --find-links wheels" in readme
    assert f"install kuberay-operator kuberay-operator-{KUBERAY_VERSION}.tgz" in readme


def test_there_is_one_release_of_kuberay() -> None:
    guide = (ROOT / "docs" / "hyperpod.md").read_text()
    assert KUBERAY_INSTALL in guide
    assert set(re.findall(r"(?:operator:v|--version )([0-9.]+[0-9])", guide)) == {KUBERAY_VERSION}


def test_a_download_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="download failed"):
        make_bundle(tmp_path, ROOT, "cpu", "x", run=FakePip(1))


def test_outside_of_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*requirements/gpu\.txt"):
        make_bundle(tmp_path / "out", tmp_path, "gpu", "x", run=FakePip())
    assert not (tmp_path / "out").exists()
