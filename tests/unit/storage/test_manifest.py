import pytest

from argusrl.errors import CorruptionError, StorageError
from argusrl.storage.manifest import has_manifest, read_manifest, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "sub" / "b.bin").write_bytes(b"defg")
    return tmp_path


def test_a_folder_that_was_deleted_meanwhile_is_not_made_again(tmp_path):
    with pytest.raises(StorageError):
        write_manifest(tmp_path / "gone", {"step": 1})
    assert not (tmp_path / "gone").exists()


def test_it_names_every_file(folder):
    assert not has_manifest(folder)
    written = write_manifest(folder, {"version": 3})
    assert has_manifest(folder)
    assert verify_manifest(folder) == read_manifest(folder) == written
    assert {name: entry["bytes"] for name, entry in written["files"].items()} == {"a.bin": 3, "sub/b.bin": 4}


def test_it_is_written_once(folder):
    write_manifest(folder, {})
    with pytest.raises(FileExistsError):
        write_manifest(folder, {})


def test_a_folder_without_one_proves_nothing(folder):
    with pytest.raises(CorruptionError, match="missing"):
        read_manifest(folder)


def test_missing_and_short_files_are_found_by_reading(folder):
    write_manifest(folder, {})
    (folder / "a.bin").write_bytes(b"ab")
    with pytest.raises(CorruptionError, match="has 2 bytes"):
        read_manifest(folder)
    (folder / "a.bin").unlink()
    with pytest.raises(CorruptionError, match=r"a\.bin is missing"):
        read_manifest(folder)


def test_changed_bytes_are_found_by_verifying(folder):
    write_manifest(folder, {})
    (folder / "sub" / "b.bin").write_bytes(b"defh")
    read_manifest(folder)
    with pytest.raises(CorruptionError, match=r"b\.bin has sha256"):
        verify_manifest(folder)
