"""Data and reward of the recipes in benchmarks/recipes: pictures of random pixels; a reward that always varies.

python benchmarks/noise_images.py FILE.parquet --side 504 --rows 64
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

QUESTION = "how many red squares are in the picture? answer with a number."


def write_rows(path: Path, side: int, rows: int) -> None:
    """A Parquet file of questions, each with one PNG of `side` x `side` random pixels; equal for equal arguments."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    random = np.random.default_rng(side)
    pictures = []
    for _ in range(rows):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        pictures.append([{"bytes": file.getvalue(), "path": None}])
    columns = {"prompt": [QUESTION] * rows, "images": pictures, "answer": [""] * rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=16)


def even_share(reply: str) -> float:
    """Share of the characters with an even code: differs in every group, and can be learnt."""
    return sum(ord(character) % 2 == 0 for character in reply) / max(1, len(reply))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--side", type=int, default=112)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    write_rows(options.path, options.side, options.rows)


if __name__ == "__main__":
    main()
