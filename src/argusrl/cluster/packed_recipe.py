"""A recipe that travels in an environment variable, for Ray clusters that know nothing of it yet.

    python -m argusrl.cluster.packed_recipe      # in the cluster: unpack it below run.root, then argusrl train it

So nothing has to be on the shared file system when a job is submitted, and nothing is kept in the Ray cluster: a head
that was started anew gets the same recipe again with the next submission. The user's own Python files lie beside the
recipe, where every node of the run sees them, at the same place each time.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

from argusrl.cluster.names import label_of
from argusrl.errors import ConfigError
from argusrl.storage.publish import make_folder, replace_file

VARIABLE = "ARGUSRL_RECIPE"
ENTRYPOINT = "python -m argusrl.cluster.packed_recipe"
LARGEST_CHARACTERS = 100_000
"""Linux takes 128 KiB for one variable."""

RECIPE = "recipe.yaml"
FOLDER = ".recipes"  # below run.root


def pack(texts: Mapping[str, str], run_root: Path, run: str) -> dict[str, str]:
    """Environment variables that carry files, `recipe.yaml` among them. Raises ConfigError where they are too large."""
    body = json.dumps({"root": str(run_root), "run": run, "files": dict(texts)}, sort_keys=True)
    packed = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    if len(packed) > LARGEST_CHARACTERS:
        raise ConfigError(
            f"the recipe and its files have {len(packed):,} characters when packed; {LARGEST_CHARACTERS:,} fit",
            "put the files on the shared file system, or install them in the image",
        )
    return {VARIABLE: packed}


def unpack(packed: str) -> Path:
    """Write the files below run.root, each replaced in one step; the recipe. Raises StorageError, ConfigError."""
    try:
        body = json.loads(zlib.decompress(base64.b64decode(packed, validate=True)))
        folder = Path(body["root"]) / FOLDER / label_of(body["run"])
        files: dict[str, str] = body["files"]
    except (ValueError, zlib.error, KeyError, TypeError) as error:
        raise ConfigError(f"{VARIABLE} holds no packed recipe: {error}", "argusrl cluster submit makes it") from error
    for name, text in sorted(files.items()):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{VARIABLE} names {name}, which lies outside of its folder")
        make_folder(path.parent)
        replace_file(path, text.encode())
    return folder / RECIPE


def main() -> None:
    """Unpack, then become `argusrl train`."""
    packed = os.environ.pop(VARIABLE, None)  # not needed below, and large
    if packed is None:
        sys.exit(f"{VARIABLE} is not set: argusrl cluster submit sets it")
    recipe = unpack(packed)
    os.execv(sys.executable, [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe)])


if __name__ == "__main__":
    main()
