"""How much lies in a folder that somebody writes to meanwhile."""

from __future__ import annotations

from pathlib import Path

from argusrl.storage.files import bytes_in


def test_what_vanishes_while_it_is_counted_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"12345")
    (tmp_path / ".manifest.json.tmp").symlink_to("gone")  # listed, and not there when it is looked at
    assert bytes_in(tmp_path) == 5
    assert bytes_in(tmp_path / "never made") == 0
