"""Loads what a recipe names: `module:name` from an installed module, `file.py:name` from a file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from argusrl.errors import ConfigError


def load_object(reference: str, *, field: str = "", base: Path | None = None) -> Any:
    """The object that `reference` names, e.g. `my_package.rewards:score` or `rewards.py:score`.

    A relative file is looked up under `base`, by default the working directory. `field` is the recipe key that
    error messages begin with. A file is executed once per process.
    Raises ConfigError: malformed reference, no such file, module or attribute, or the module itself raised.
    """
    label = f"{field}: " if field else ""
    origin, separator, name = reference.rpartition(":")
    if not separator or not origin or not name:
        raise ConfigError(f"{label}'{reference}' is not a reference", "write module:name or file.py:name")
    module = _from_file(origin, label, base) if origin.endswith(".py") else _from_module(origin, label)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            close = difflib.get_close_matches(part, public, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it has: {', '.join(sorted(public)[:20]) or 'nothing'}"
            raise ConfigError(f"{label}{origin} has no '{name}'", hint)
        found = getattr(found, part)
    return found


def _from_module(name: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            hint = f"install it, or name its file: {name.replace('.', '/')}.py:…"
            raise ConfigError(f"{label}there is no module '{name}'", hint) from error
        raise _broken(name, label, error) from error
    except Exception as error:
        raise _broken(name, label, error) from error


def _from_file(file: str, label: str, base: Path | None) -> ModuleType:
    path = (base or Path.cwd()) / Path(file).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"did you mean '{path.parent / near[0]}'?" if near else "relative files are looked up from here"
        raise ConfigError(f"{label}there is no file '{path}'", hint)
    path = path.resolve()
    # The name depends on the path alone, so that a pickled class is found again by another process that loaded it.
    name = f"argusrl_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{label}'{path}' cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:  # last, so that files beside it can be imported and hide nothing
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(str(path), label, error) from error
    return module


def _broken(origin: str, label: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{label}importing {origin} raised {type(error).__name__}: {error}", "it must import on its own: python -c …"
    )
