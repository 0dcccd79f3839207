"""Reading YAML strictly: no duplicate keys, text keys only, and no words that turn into something else.

Differences from YAML 1.1 as PyYAML reads it, because each has bitten someone: `1e-5` is a number, `yes`, `no`, `on`
and `off` are text, `010` and `1:30` are text, dates are text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from argusrl.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own registry, filled below

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # refuses a value that contains itself (an anchor inside its own node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise _Problem(line, f"key {getattr(key, 'value', '?')} is not text; put it in quotes")
            if key.value in seen:
                raise _Problem(line, f"key '{key.value}' is given twice (first on line {seen[key.value]})")
            seen[key.value] = line
        return super().construct_mapping(node, deep)


class _Problem(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line, self.message = line, message


def _resolve(kind: str, pattern: str, first: str) -> None:
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$", "-+0123456789")
_resolve(
    "float",
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_StrictLoader.yaml_implicit_resolvers[""] = [("tag:yaml.org,2002:null", re.compile(r"^$"))]
_resolve("merge", r"^(?:<<)$", "<")


class _Dumper(yaml.SafeDumper):
    """Quotes every text that some YAML reader, this one or PyYAML's own, would take for something else."""


for _first, _resolvers in _StrictLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


class _BlockDumper(_Dumper):
    """Text of several lines as a block, and no anchors: for people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _text)


def dump_yaml(value: Any, *, blocks: bool = False) -> str:
    """YAML that this loader and PyYAML's read back as the same value. Keys stay in order.

    With `blocks` a text of several lines is a literal block, and a value that occurs twice is written twice.
    """
    dumper = _BlockDumper if blocks else _Dumper
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_yaml(text: str, origin: str) -> Any:
    """The value of one YAML document. `origin` names it in errors. Raises ConfigError with line and column."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except _Problem as problem:
        raise ConfigError(f"{origin}, line {problem.line}: {problem.message}") from None
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, origin)) from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None


def yaml_problem(error: yaml.YAMLError, origin: str) -> str:
    """What is wrong with a text, and where, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{origin}: not YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{origin}{where}: not YAML: {error.problem or error.context}"


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such recipe: {path}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a recipe") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, this is a {type(value).__name__}")
    return value
