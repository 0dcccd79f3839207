"""Seeds are pure functions of names, so that any process draws the same noise for the same trajectory."""

from __future__ import annotations

import hashlib


def derive_seed(*names: object) -> int:
    """A seed in [0, 2^63) from any printable names, e.g. (run seed, step, prompt id, sample)."""
    text = "\x1f".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
