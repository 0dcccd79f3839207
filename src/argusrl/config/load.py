"""From a recipe file to a Config, and the resolved config.yaml of a run folder.

A recipe is YAML. `base:` names one recipe or a list of them, relative to the file that says so; what a file gives
itself wins over its bases, later bases win over earlier ones, mappings are merged and lists replaced. `a.b=c` on the
command line wins over files; its value is YAML, and a number picks an item of a list (rewards.0.weight=2). The
config.yaml of a run folder is a recipe, too, which goes on with that run.

Paths: the fields in PATH_KEYS and FUNCTION_KEYS may be relative. Each is looked up in the folder of the file that
gives it, then in the recipe's folder, then in the working directory, and is absolute in the Config where found.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from argusrl.config import checks, explain
from argusrl.config.sections import Config
from argusrl.config.validate import shown, validate
from argusrl.config.yaml_file import dump_yaml, parse_yaml, read_yaml_mapping
from argusrl.errors import ConfigError, CorruptionError, StorageError

FORMAT_VERSION = 1  # of config.yaml
_RESOLVED_KEYS = {"format_version", "sha256", "config"}
_RESTORE = "restore it from a copy in attempts/*/config.yaml, or start a new run"

PATH_KEYS = ("model.path", "model.chat_template", "adapter.initial", "data.train", "data.heldout")
FUNCTION_KEYS = ("data.generator", "environment.factory", "rewards.*.function")  # file.py:name

MAY_CHANGE_ON_RESUME = (
    "cluster.*",
    "observe.*",
    "recovery.*",
    "evaluate.*",
    "checkpoint.keep*",
    "algorithm.num_steps",
    "run.root",
    "run.max_bytes",
    "run.copy_to",
)
"""Keys (with *) that change nothing about the steps that are already committed."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked recipe and where it came from."""

    config: Config
    sources: tuple[Path, ...]  # files in the order they were merged; the recipe is the last
    digest: str  # sha256 of `config`


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, merge, validate and check a recipe (checks.py; files it names are not looked at).

    Raises ConfigError with every problem of one kind at once.
    """
    recipe = Path(path).absolute()
    sources: list[Path] = []
    values = _read_with_bases(recipe, sources, ())
    values = _apply_overrides(values, overrides)
    _resolve_paths(values, [recipe.parent, Path.cwd()])
    run = values.setdefault("run", None) or {}
    if isinstance(run, dict):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.stem).lstrip("._-") or "run"
        values["run"] = {**run, "name": run.get("name") or name}
    config = validate(values)
    checks.require(config)
    return LoadedConfig(config=config, sources=tuple(sources), digest=digest(config))


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A config that is there already (of a run, say) with `a.b=c` laid over it. Raises ConfigError."""
    values = _apply_overrides(config.model_dump(mode="json"), overrides)
    _resolve_paths(values, [Path.cwd()])
    changed = validate(values)
    checks.require(changed)
    return changed


def _read_with_bases(path: Path, sources: list[Path], chain: tuple[Path, ...]) -> dict[str, Any]:
    real = path.resolve()
    if real in chain:
        names = " → ".join(str(step) for step in (*chain, real))
        raise ConfigError(f"base: files refer to each other in a circle: {names}")
    own = read_yaml_mapping(path)
    if own.keys() == _RESOLVED_KEYS:  # the config.yaml of a run folder is a recipe, too: of that run
        own = read_resolved(path).model_dump(mode="json")
    bases = own.pop("base", None)
    bases = [] if bases is None else [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base must be a file name or a list of them, got {json.dumps(bases, default=str)}")
    _resolve_paths(own, [path.parent])
    merged: dict[str, Any] = {}
    for base in bases:
        file = path.parent / base
        if not file.is_file():
            raise ConfigError(f"{path}: base: no such file: {file}")
        inherited = _read_with_bases(file, sources, (*chain, real))
        if isinstance(inherited.get("run"), dict):
            inherited["run"].pop("name", None)  # a name is a recipe's own: two recipes must not meet in one run folder
        merged = merge(merged, inherited)
    sources.append(path)
    return merge(merged, own)


def merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`: mappings are merged key by key, everything else is replaced."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merge(below, value)
        elif isinstance(below, dict) and value is None and key in Config.model_fields:
            value = below  # a section header with nothing under it says nothing
        result[key] = value
    return result


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    result = copy.deepcopy(values)
    problems: list[str] = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip(".") or key.partition(".")[0] == "base":
            problems.append(f"{override}: an override is written section.key=value, e.g. algorithm.group_size=16")
            continue
        try:
            _set(result, key.strip().split("."), parse_yaml(text, override), override)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return result


def _set(values: dict[str, Any], parts: list[str], value: Any, override: str) -> None:
    target: Any = values
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                known = f"0 to {len(target) - 1}" if target else "none"
                where = ".".join(parts[:position])
                raise ConfigError(f"{override}: {where} is a list; '{part}' is none of its indices ({known})")
            index: Any = int(part)
        elif isinstance(target, dict):
            index = part
            if not last and target.get(part) is None:
                target[part] = {}
        else:
            raise ConfigError(f"{override}: {'.'.join(parts[:position])} holds a value, not keys")
        if last:
            target[index] = value
        else:
            target = target[index]


def _resolve_paths(values: dict[str, Any], folders: Sequence[Path]) -> None:
    """Make relative paths absolute, in place, where a folder has such a file. Others stay, for checks.py to report."""
    for holder, key in _slots(values, (*PATH_KEYS, *FUNCTION_KEYS)):
        text = holder[key]
        name, colon, function = text.rpartition(":")
        is_function = colon and name.endswith(".py")
        relative = Path(name if is_function else text).expanduser()
        for folder in folders:
            found = folder / relative
            if relative.name and (found.is_file() if is_function else found.exists()):
                holder[key] = os.path.normpath(found) + (f":{function}" if is_function else "")
                break


def _slots(values: dict[str, Any], patterns: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    for pattern in patterns:
        holders: list[Any] = [values]
        *heads, key = pattern.split(".")
        for head in heads:
            if head == explain.ITEM:
                holders = [item for holder in holders if isinstance(holder, list) for item in holder]
            else:
                holders = [holder.get(head) for holder in holders if isinstance(holder, dict)]
        for holder in holders:
            if isinstance(holder, dict) and isinstance(holder.get(key), str):
                yield holder, key


def digest(config: Config) -> str:
    """sha256 of the canonical JSON of the config value."""
    return _digest(config.model_dump(mode="json"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def pinned(config: Config) -> Config:
    """The config of a new run: defaults that follow other values are written down.

    A schedule without a length spans the steps the run was made for; a resume with more steps must not bend the part
    of it that is already committed.
    """
    if config.optimizer.schedule_steps is not None:
        return config
    optimizer = config.optimizer.model_copy(update={"schedule_steps": config.algorithm.num_steps})
    return config.model_copy(update={"optimizer": optimizer})


def write_resolved(config: Config, path: Path) -> Config:
    """Write config.yaml, pinned and with its digest, durably and in one piece. Returns the pinned config."""
    config = pinned(config)
    value = config.model_dump(mode="json")
    document = {"format_version": FORMAT_VERSION, "sha256": _digest(value), "config": value}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(dump_yaml(document))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    return config


def read_resolved(path: Path) -> Config:
    """The config of a run folder.

    Raises CorruptionError for a file that is no longer what was written, ConfigError where there is none and for one
    of another format version.
    """
    try:
        document = read_yaml_mapping(path)
    except ConfigError as error:
        if not path.is_file():
            raise
        raise CorruptionError(error.message, _RESTORE) from error
    version = document.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format version {version}; this argusrl reads {FORMAT_VERSION}",
            "use the argusrl that wrote the run",
        )
    value = document.get("config")
    if version != FORMAT_VERSION or not isinstance(value, dict) or _digest(value) != document.get("sha256"):
        raise CorruptionError(f"{path} does not match its sha256", f"it was edited; {_RESTORE}")
    return validate(value)


def config_difference(old: Config, new: Config) -> list[str]:
    """What changed, one line a key: 'optimizer.learning_rate: 1e-05 → 2e-05'."""
    before, after = _flat(old), _flat(new)
    lines = []
    for key in dict.fromkeys([*before, *after]):
        if before.get(key, "–") != after.get(key, "–"):
            path: list[str | int] = list(key.split("."))
            lines.append(f"{key}: {_one(path, before, key)} → {_one(path, after, key)}")
    return lines


def _one(path: list[str | int], flat: dict[str, Any], key: str) -> str:
    if key not in flat:
        return "–"
    return repr(flat[key]) if isinstance(flat[key], float) else shown(path, flat[key])


def _flat(config: Config) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = enumerate(value)
        if not items:
            result[prefix] = value
        for key, item in items:
            walk(item, f"{prefix}.{key}" if prefix else str(key))

    walk(config.model_dump(mode="json"), "")
    return result


def resumed(recorded: Config, wanted: Config) -> Config:
    """The config to resume a run with: `wanted`, with what the run has pinned.

    Raises ConfigError with the difference when more than MAY_CHANGE_ON_RESUME changed.
    """
    if wanted.optimizer.schedule_steps is None:
        optimizer = wanted.optimizer.model_copy(update={"schedule_steps": recorded.optimizer.schedule_steps})
        wanted = wanted.model_copy(update={"optimizer": optimizer})
    forbidden = [
        line
        for line in config_difference(recorded, wanted)
        if not any(fnmatch(line.partition(": ")[0], pattern) for pattern in MAY_CHANGE_ON_RESUME)
    ]
    if forbidden:
        raise ConfigError(
            [f"run '{recorded.run.name}' exists with another config:", *(f"  {line}" for line in forbidden)],
            "change these back, pick another run.name, use --fresh, or fork it with --from RUN@STEP",
        )
    return wanted
