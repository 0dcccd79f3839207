"""The example that writes scikit-learn's handwritten digits as Parquet, read back as a recipe would."""

import runpy
import sys
from pathlib import Path

import pytest

from argusrl.config.sections import ColumnSection, DataSection, EnvironmentSection
from argusrl.data.check import check_source, find_overlap
from argusrl.data.source import open_source

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "digits_to_parquet.py"


def write(folder: Path, monkeypatch, *arguments: str) -> Path:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


def test_digits_are_disjoint_questions_with_answers(tmp_path: Path, monkeypatch):
    folder = write(tmp_path / "digits", monkeypatch)
    columns = ColumnSection(prompt="question", images="image", answer="answer")
    section = DataSection(train=folder / "train.parquet", heldout=folder / "heldout.parquet", columns=columns)
    train, heldout = (
        check_source(open_source(section, EnvironmentSection(), split), split=split, needs_answer=True)
        for split in ("train", "heldout")
    )
    assert len(train.source) + len(heldout.source) == 1797
    assert len(heldout.source) == 256
    assert find_overlap(train, heldout) == []
    prompt = heldout.source[0]
    assert prompt.answer in tuple("0123456789")
    assert prompt.messages[0].content[1] == "Which digit is this?"
    assert (prompt.messages[0].images[0].width, prompt.messages[0].images[0].height) == (96, 96)
    assert {p.answer for p in heldout.source.scan()} == set("0123456789")


def test_the_same_arguments_give_the_same_files(tmp_path: Path, monkeypatch):
    for name in ("a", "b"):
        write(tmp_path / name, monkeypatch, "--heldout", "40", "--size", "16")
    for file in ("train.parquet", "heldout.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
