"""Write the handwritten digits that ship with scikit-learn as Parquet files of image questions.

    python examples/digits_to_parquet.py data/digits

makes data/digits/train.parquet and data/digits/heldout.parquet with the columns `question` (text), `image`
({bytes, path}: a PNG) and `answer` (text, "0" to "9"). No image is in both files. The same arguments give the same
rows. Needs scikit-learn, pyarrow, pillow and numpy.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("answer", pa.string()),
    ]
)

BACKGROUND = 0  # grey level without ink; models/tiny-qwen3vl-digits has seen this one


def render(pixels: np.ndarray, side_pixels: int, background: int) -> bytes:
    """A PNG of one digit. `pixels` [8, 8] is ink from 0 to 16; ink is white, no ink is grey level `background`."""
    grey = background + pixels * (255 - background) / 16
    small = Image.fromarray(np.rint(grey).astype(np.uint8))
    large = small.resize((side_pixels, side_pixels), Image.Resampling.BICUBIC).convert("RGB")
    buffer = io.BytesIO()
    large.save(buffer, format="PNG")
    return buffer.getvalue()


def split_rows(images: np.ndarray, heldout_rows: int, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers for training and evaluation: seeded, disjoint, and of identical images only the first."""
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    order = np.random.RandomState(seed).permutation(np.sort(first))
    return order[heldout_rows:].tolist(), order[:heldout_rows].tolist()


def write(path: Path, rows: list[int], question: str, side_pixels: int, background: int) -> None:
    digits = load_digits()
    records = [
        {
            "question": question,
            "image": {"bytes": render(digits.images[row], side_pixels, background), "path": f"digit-{row:04d}.png"},
            "answer": str(digits.target[row]),
        }
        for row in rows
    ]
    # Small row groups: a reader that wants one row then reads few others.
    pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), path, row_group_size=100)
    print(f"{path}: {len(records)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where train.parquet and heldout.parquet go")
    parser.add_argument("--heldout", type=int, default=256, help="rows kept for evaluation (default 256)")
    parser.add_argument("--size", type=int, default=96, help="pixels a side (default 96)")
    parser.add_argument(
        "--background", type=int, default=BACKGROUND, help="grey level without ink, 0 to 254 (default 0)"
    )
    parser.add_argument("--question", default="Which digit is this?")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default 0)")
    arguments = parser.parse_args()

    images = load_digits().images
    if not 0 < arguments.heldout < len(images):
        parser.error(f"--heldout must lie between 1 and {len(images) - 1}")
    if not 0 <= arguments.background < 255:
        parser.error("--background must lie between 0 and 254")
    train, heldout = split_rows(images, arguments.heldout, arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    look = {"question": arguments.question, "side_pixels": arguments.size, "background": arguments.background}
    write(arguments.folder / "train.parquet", train, **look)
    write(arguments.folder / "heldout.parquet", heldout, **look)


if __name__ == "__main__":
    main()
