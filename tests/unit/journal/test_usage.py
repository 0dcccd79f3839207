from argusrl.journal.usage import KINDS, Size, size_of, total, usage
from argusrl.storage.layout import RunFolder


def test_every_file_is_counted_once_under_its_kind(builder):
    builder.step()
    run = builder.run
    (run.path / "attempts" / "001" / "logs").mkdir(parents=True)
    (run.path / "attempts" / "001" / "logs" / "driver.log").write_bytes(b"x" * 100)
    (run.path / "notes.txt").write_bytes(b"y" * 7)
    (run.adapters / ".v000009.e0001.1-ab.tmp").mkdir()
    (run.adapters / ".v000009.e0001.1-ab.tmp" / "half").write_bytes(b"z" * 11)
    sizes = usage(run)
    assert tuple(sizes) == KINDS
    assert sizes["logs"] == Size(100, 1)
    assert sizes["other"] == Size(7, 1)
    assert sizes["temporary"] == Size(11, 1)
    assert sizes["adapters"].files == 6
    assert sizes["trajectories"].files == sizes["images"].files == 1
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert total(sizes) == Size(sum(path.stat().st_size for path in files), len(files))


def test_a_folder_a_file_and_nothing_have_a_size(builder):
    folder = builder.run.absolute(builder.head.adapter.path)
    assert size_of(folder).files == 3
    assert size_of(folder / "adapter_config.json") == Size(8, 1)
    assert size_of(folder / "gone") == Size()


def test_everything_that_has_a_name_in_a_run_folder_has_a_kind(builder):
    run = builder.run
    names = [name for name, value in vars(RunFolder).items() if isinstance(value, property) and name != "name"]
    for path in [getattr(run, name) for name in names]:
        if path.suffix:
            path.touch()
        else:
            path.mkdir(exist_ok=True)
            (path / "file").touch()
    assert usage(run)["other"] == Size()
