"""The objects of the reference recipe, as a file to read: a change of any of them shows in its difference.

After a change that is meant, write it anew:

    ARGUSRL_WRITE_GOLDEN=1 python -m pytest tests/golden/test_manifest_golden.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from argusrl.cluster.manifests.document import Document, to_yaml
from argusrl.cluster.manifests.install import install, installation_of
from argusrl.cluster.manifests.render import render
from fakes.kubernetes_recipe import kubernetes_config

FOLDER = Path(__file__).parent


def run() -> list[Document]:
    """Without the text of the recipe, which grows with every new key."""
    documents = render(kubernetes_config())
    return [document for document in documents if document.kind != "ConfigMap"]


def installation() -> list[Document]:
    return install(installation_of(kubernetes_config(), group="researchers", prepull=True))


@pytest.mark.parametrize(("name", "made"), [("hyperpod_run", run), ("hyperpod_install", installation)])
def test_objects_are_those_of_the_file(name: str, made: object) -> None:
    path = FOLDER / f"{name}.yaml"
    text = re.sub(r"-recipe-[0-9a-f]{8}\b", "-recipe-00000000", to_yaml(made()))  # type: ignore[operator]
    if os.environ.get("ARGUSRL_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
