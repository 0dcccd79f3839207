"""A sound recipe for tests of the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from argusrl.config.sections import Config
from argusrl.config.validate import validate

SOUND: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"kind": "generated", "generator": "task.py:make", "train_size": 8, "heldout_size": 4},
    "rewards": [{"kind": "exact"}],
}


def sound(**sections: Any) -> Config:
    """The sound recipe with sections changed: a mapping is merged into the section, anything else replaces it."""
    values = json.loads(json.dumps(SOUND))
    for name, change in sections.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return validate(values)


def write(path: Path, values: dict[str, Any]) -> Path:
    """A recipe file (JSON is YAML)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path
