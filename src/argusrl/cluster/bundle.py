"""Everything that a cluster without internet needs: wheels at the pinned versions, and which images to mirror."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from argusrl.cluster.kuberay_release import KUBERAY_CHARTS, KUBERAY_IMAGE, KUBERAY_VERSION
from argusrl.errors import ClusterError, ConfigError

WHEELS = "wheels"
SUMS = "SHA256SUMS"
REQUIREMENTS = "requirements.txt"

_GLIBC = 36  # of Debian 12, which the images are built on: 2.36
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC, 4, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was put together."""

    folder: Path
    wheels: int
    size_bytes: int
    images: tuple[str, ...]


def make_bundle(
    folder: Path, source: Path, target: str, image: str, python_version: str = "3.11", run: Run | None = None
) -> Bundle:
    """Download the wheels of `requirements/<target>.txt` in `source`, a checkout of argusrl, and build argusrl's own.

    What is in `folder` already is not downloaded again. `image` is argusrl's own, by the name pods pull it with.
    Raises ConfigError where `source` is no checkout, ClusterError when a download fails.
    """
    requirements = source / "requirements" / f"{target}.txt"
    missing = [path for path in (requirements, source / "pyproject.toml") if not path.is_file()]
    if missing:
        raise ConfigError(f"no such file: {missing[0]}", "run it in a checkout of argusrl, or name one with --source")
    call = run or _run
    wheels = folder / WHEELS
    wheels.mkdir(parents=True, exist_ok=True)
    pip = _pip()
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    only = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python_version, *platforms]
    for words in (
        [*pip, "download", "--no-deps", "--dest", str(wheels), "--requirement", str(requirements), *only],
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)],
    ):
        if call(words) != 0:
            raise ClusterError(
                f"{' '.join(words[len(pip) : len(pip) + 1])} failed; its own message is above",
                "run the same command again: what is there is kept",
            )
    shutil.copyfile(requirements, folder / REQUIREMENTS)
    files = sorted(path for path in wheels.iterdir() if path.is_file())
    sums = "".join(f"{_sha256(path)}  {WHEELS}/{path.name}\n" for path in files)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    images = (image, KUBERAY_IMAGE, _base_image(source))
    (folder / "images.txt").write_text("".join(f"{name}\n" for name in images), encoding="utf-8")
    (folder / "README.md").write_text(_readme(target, image, python_version), encoding="utf-8")
    return Bundle(folder, len(files), sum(path.stat().st_size for path in files), images)


def _pip() -> list[str]:
    """The pip of this Python, else one that is on the PATH. Raises ConfigError."""
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ConfigError("there is no pip here, and only pip downloads wheels", f"{sys.executable} -m ensurepip")
    return [found]


def _run(words: Sequence[str]) -> int:
    return subprocess.run([*words, "--disable-pip-version-check"], check=False).returncode


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _base_image(source: Path) -> str:
    """What deploy/Dockerfile begins with."""
    dockerfile = source / "deploy" / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
    found = re.search(r"^ARG PYTHON=(\S+)", text, re.MULTILINE)
    return f"python:{found[1] if found else '3.11'}-slim-bookworm"


def _readme(target: str, image: str, python_version: str) -> str:
    return f"""# argusrl without internet ({target})

Wheels for Python {python_version} on x86-64 (Debian 12, or any Linux with glibc 2.{_GLIBC}), and the images that a
cluster pulls. Check what arrived, then install:

    sha256sum --check {SUMS}
    python{python_version} -m pip install --no-index --find-links {WHEELS} --no-deps -r {REQUIREMENTS} argusrl

Mirror each image of images.txt into your own registry (`docker pull`, `docker tag`, `docker push`), and put its name
there into `cluster.kubernetes.image` of your recipes. `{image}` is argusrl's own: deploy/Dockerfile builds it where
there is internet.

KubeRay's operator is a Helm chart: `helm pull` it where there is internet and install the file:

    helm pull kuberay-operator --repo {KUBERAY_CHARTS} --version {KUBERAY_VERSION}
    helm install kuberay-operator kuberay-operator-{KUBERAY_VERSION}.tgz \\
      --set image.repository=REGISTRY/kuberay/operator

Models and data sets lie on the shared file system; HF_HUB_OFFLINE=1 (cluster.environment) keeps everything from asking
the hub.
"""
