from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from argusrl.cluster import node_disk
from argusrl.cluster.node_disk import clear_spill, main, stage
from argusrl.errors import ModelError, StorageError


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "fsx" / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_bytes(b"w" * 10_000)
    return folder


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_disk, "_SPARE_BYTES", 0)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_are_copied_once(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "nvme" / "weights" / "model-1"
    assert stage(weights, copy)
    assert files(copy) == files(weights)
    first = copy.stat().st_ino
    assert not stage(weights, copy)
    assert copy.stat().st_ino == first


def test_changed_weights_are_copied_again(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    stage(weights, copy)
    (weights / "config.json").write_text("[]")
    os.utime(weights / "config.json", (1, 1))
    (weights / "sub" / "model.safetensors").unlink()
    (weights / "new.bin").write_bytes(b"n")
    assert stage(weights, copy)
    assert files(copy) == {"config.json": b"[]", "new.bin": b"n"}


def test_a_damaged_copy_is_made_again(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    stage(weights, copy)
    (copy / "sub" / "model.safetensors").write_bytes(b"w")
    assert stage(weights, copy)
    assert files(copy) == files(weights)


def test_a_copy_that_was_interrupted_is_not_taken_for_one(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"

    def broken(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", broken)
        with pytest.raises(StorageError, match="No space left on device"):
            stage(weights, copy)
    assert not copy.exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["fsx"]
    assert stage(weights, copy)


def test_links_are_followed(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (weights / "linked.bin").symlink_to(tmp_path / "blob")
    copy = tmp_path / "copy"
    stage(weights, copy)
    assert not (copy / "linked.bin").is_symlink()
    assert (copy / "linked.bin").read_bytes() == b"blob"


def test_pods_that_come_at_once_copy_once(weights: Path, tmp_path: Path) -> None:
    copied: list[bool] = []
    threads = [threading.Thread(target=lambda: copied.append(stage(weights, tmp_path / "copy"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(copied) == [False, False, False, True]


def test_a_small_disk_is_refused_before_anything_is_written(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10_000, 0, 10_000))
    with pytest.raises(StorageError, match=r"10,000 bytes are free; the weights take 10,002"):
        stage(weights, tmp_path / "copy")


def test_an_empty_model_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError, match="no files in"):
        stage(tmp_path / "model", tmp_path / "copy")


def test_weights_that_change_meanwhile_are_not_kept(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.copyfile

    def copy_and_write(source: Path, target: Path) -> None:
        real(source, target)
        (weights / "config.json").write_text("still being written")

    monkeypatch.setattr(shutil, "copyfile", copy_and_write)
    with pytest.raises(ModelError, match="changed while it was copied"):
        stage(weights, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_spilled_objects_of_pods_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "maze" / "pod-1" / "objects").mkdir(parents=True)
    (tmp_path / "other" / "pod-2").mkdir(parents=True)
    assert clear_spill(tmp_path / "maze") == 1
    assert not list((tmp_path / "maze").iterdir())
    assert (tmp_path / "other" / "pod-2").is_dir()
    assert clear_spill(tmp_path / "never") == 0


def test_the_command(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--spill", str(tmp_path / "spill"), "--weights", str(weights), "--copy", str(tmp_path / "copy")]
    assert main(words) == 0
    assert (tmp_path / "spill").is_dir()
    assert "copied in" in capsys.readouterr().out
    assert main(words) == 0
    assert "has them already" in capsys.readouterr().out
    assert (
        main([*words[:2], "--weights", str(tmp_path / "none"), "--copy", str(tmp_path / "x")]) == ModelError.exit_code
    )
    assert "no files in" in capsys.readouterr().err
