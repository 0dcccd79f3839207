"""The recipe as pods read it: resolved, with the user's own files beside it, in one ConfigMap.

The map is named by its content and immutable: a pod that starts late never reads another recipe than the first one,
and applying the same recipe again changes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Any

from argusrl.cluster.manifests.document import Document, metadata
from argusrl.cluster.manifests.setup import RECIPE_FOLDER, Setup
from argusrl.config.kubernetes_checks import unseen_paths
from argusrl.config.sections import Config
from argusrl.config.yaml_file import dump_yaml
from argusrl.errors import ConfigError

LARGEST_BYTES = 900_000
"""Of all files together; Kubernetes takes 1 MiB for an object."""

RECIPE = "recipe.yaml"


class PodFiles:
    """The recipe and the files it names, by where pods see them below `folder`."""

    def __init__(self, config: Config, mount: Path, folder: PurePosixPath = RECIPE_FOLDER) -> None:
        """`mount`: the shared file system, whose files stay where they are. Raises ConfigError."""
        self.texts: dict[str, str] = {}  # path below `folder` → text
        self._folder = folder
        self._folders: dict[Path, str] = {}  # folder here → name of its place there
        self._mount = mount
        self._problems: list[str] = []
        values = config.model_dump(mode="json")
        self._functions(values)
        template = values["model"]["chat_template"]
        if template is not None:
            values["model"]["chat_template"] = self._taken("model.chat_template", Path(template))
        self._problems += unseen_paths(config, mount)
        if self._problems:
            raise ConfigError(self._problems)
        recipe = "# Resolved: every key with the value the run takes. Made by argusrl cluster manifest.\n"
        self.texts = {RECIPE: recipe + dump_yaml(values), **self.texts}
        size = sum(len(text.encode()) for text in self.texts.values())
        if size > LARGEST_BYTES:
            raise ConfigError(
                f"the recipe and its files have {size:,} bytes; a ConfigMap holds {LARGEST_BYTES:,}",
                f"put the files below {self._mount}, or install them in the image",
            )

    @property
    def digest(self) -> str:
        """Of names and texts."""
        joined = "\0".join(f"{name}\0{text}" for name, text in self.texts.items())
        return hashlib.sha256(joined.encode()).hexdigest()

    @property
    def items(self) -> list[dict[str, str]]:
        """Keys of the map, and the paths pods see them at."""
        return [{"key": key, "path": path} for key, path in self._keys.items()]

    @property
    def data(self) -> dict[str, str]:
        return {key: self.texts[path] for key, path in self._keys.items()}

    @property
    def _keys(self) -> dict[str, str]:
        """Key of the map → path. Keys take fewer characters than paths do."""
        keys: dict[str, str] = {}
        for path in self.texts:
            key = re.sub(r"[^-._A-Za-z0-9]", "_", path.replace("/", "-"))
            while key in keys:
                key += "_"
            keys[key] = path
        return keys

    def _functions(self, values: dict[str, Any]) -> None:
        slots = [
            ("data.generator", values["data"], "generator"),
            ("environment.factory", values["environment"], "factory"),
        ]
        slots += [(f"rewards.{n}.function", reward, "function") for n, reward in enumerate(values["rewards"])]
        for key, holder, name in slots:
            file, _, function = str(holder[name] or "").rpartition(":")
            if file.endswith(".py"):
                holder[name] = f"{self._taken(key, Path(file))}:{function}"

    def _taken(self, key: str, path: Path) -> str:
        """Where pods see this file, with what it imports from its own folder."""
        if path.is_relative_to(self._mount):
            return str(path)
        if not path.is_file():
            self._problems.append(f"{key}: no such file: {path}")
            return str(path)
        folder = path.parent.resolve()
        place = self._folders.setdefault(folder, f"files/{len(self._folders)}")
        waiting = [path.name]
        while waiting:
            name = waiting.pop()
            try:
                text = (folder / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                self._problems.append(f"{key}: {folder / name} cannot be read as text: {error}")
                break
            self.texts[f"{place}/{name}"] = text
            for neighbour in _imported(text, folder, name):
                if neighbour.is_dir():
                    self._problems.append(
                        f"{key}: {name} imports the package {neighbour}; install it in the image, or put it all below "
                        f"{self._mount}"
                    )
                elif f"{place}/{neighbour.name}" not in self.texts:
                    waiting.append(neighbour.name)
        return str(self._folder / place / path.name)


def _imported(text: str, folder: Path, name: str) -> list[Path]:
    """Files and packages of the same folder that a Python file imports by plain name."""
    if not name.endswith(".py"):
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []  # whoever loads it says so
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    found = []
    for root in sorted(roots):
        if (folder / f"{root}.py").is_file():
            found.append(folder / f"{root}.py")
        elif (folder / root / "__init__.py").is_file():
            found.append(folder / root)
    return found


def recipe_map(setup: Setup, files: PodFiles) -> Document:
    """The ConfigMap."""
    return Document(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(map_name(setup, files), setup.kubernetes.namespace, setup.run_labels),
            "immutable": True,
            "data": files.data,
        },
        "The recipe as the pods read it, and the files of yours that it names. Its name says what is in it, so that\n"
        "another recipe is another map and a run never reads half of each. Secrets are references, never values.",
    )


def map_name(setup: Setup, files: PodFiles) -> str:
    """Name of the ConfigMap: the run's, and of which content."""
    return f"{setup.run}-recipe-{files.digest[:8]}"
