"""Write the compact schema with which `argusrl cluster manifest --validate` checks RayJobs, from KubeRay's CRD.

    python scripts/write_crd_schema.py path/to/ray.io_rayjobs.yaml v1.7.0

The CRD is `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` of github.com/ray-project/kuberay at the given tag.
Only descriptions and the status are left out. The same CRD gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parent.parent / "src/argusrl/cluster/manifests/kuberay_v1.json.gz"


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    """Schema of version v1 of a CRD's kind, without descriptions and status."""
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = _without_descriptions(version["schema"]["openAPIV3Schema"], names=False)
    del schema["properties"]["status"]
    return schema


def _without_descriptions(value: Any, names: bool) -> Any:
    """`names`: the keys of this mapping are names of fields, and one of them may be called description."""
    if isinstance(value, list):
        return [_without_descriptions(item, names=False) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_descriptions(item, names=key == "properties" and not names)
        for key, item in value.items()
        if names or key != "description"
    }


def compact(crd_path: Path, tag: str) -> bytes:
    """Content of the file."""
    crd = yaml.load(crd_path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    document = {"source": f"KubeRay {tag}, {crd['metadata']['name']}", "schema": schema_of(crd)}
    return gzip.compress(json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), mtime=0)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    TARGET.write_bytes(compact(Path(sys.argv[1]), sys.argv[2]))
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
