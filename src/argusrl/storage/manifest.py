"""manifest.json: the last file of a published folder. A folder without one proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from argusrl.errors import CorruptionError, StorageError
from argusrl.storage.digests import sha256_file
from argusrl.storage.files import exists, read_faults
from argusrl.storage.publish import publish_file, storage_faults
from argusrl.storage.sealed_json import encode_sealed, read_sealed

MANIFEST = "manifest.json"


def write_manifest(folder: Path, fields: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Publish the manifest of a complete, durable folder: `fields` and size and digest of every file. Returns it.

    `names` are the files where others wrote some of them: a listing may not show those yet.
    Raises FileExistsError if the folder has one, StorageError if storage fails.
    """
    try:
        with storage_faults(folder):
            files = {
                name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
                for name in sorted(_names(folder) if names is None else names)
            }
    except CorruptionError as error:  # a newer driver takes what is not committed for garbage
        raise StorageError(f"{folder} changed while it was being published: {error.message}") from error
    manifest = {**fields, "files": files}
    publish_file(folder / MANIFEST, encode_sealed(manifest), make_parent=False)  # never into a folder made anew
    return manifest


def has_manifest(folder: Path) -> bool:
    """Whether the folder was published to its end."""
    return exists(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after a check that every file it names is there in full size. Raises CorruptionError."""
    manifest = read_sealed(folder / MANIFEST)
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            with read_faults(path):
                size = path.stat().st_size
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing, its manifest names it") from None
        if size != entry["bytes"]:
            raise CorruptionError(f"{path} has {size} bytes, its manifest says {entry['bytes']}")
    return manifest


def verify_manifest(folder: Path) -> dict[str, Any]:
    """read_manifest, and the digest of every file. Raises CorruptionError."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        if (digest := sha256_file(folder / name)) != entry["sha256"]:
            raise CorruptionError(f"{folder / name} has sha256 {digest}, its manifest says {entry['sha256']}")
    return manifest


def _names(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / MANIFEST:
            yield path.relative_to(folder).as_posix()
