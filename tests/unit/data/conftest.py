import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow


@pytest.fixture
def png() -> Callable[..., bytes]:
    """A clean PNG; another seed is another image."""

    def make(seed: int = 0, width: int = 12, height: int = 8) -> bytes:
        pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Pillow.fromarray(pixels).save(buffer, format="PNG")
        return buffer.getvalue()

    return make


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[dict[str, Any]], name: str = "rows.parquet", **options: Any) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
        return path

    return write


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return path

    return write
