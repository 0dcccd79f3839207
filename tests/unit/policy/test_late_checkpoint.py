"""Ranks on nodes that see each other's files late (EFS, NFS): a checkpoint is whole all the same."""

from types import SimpleNamespace

import late_process
import pytest
import torch

from argusrl.policy import group
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import verify_manifest
from fakes.run_folder import publish_adapter


@pytest.fixture(scope="module")
def late_pair(processes, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    base = tmp_path_factory.mktemp("late")
    folder = base / "run"
    folder.mkdir()
    publish_adapter(RunFolder(folder), 1, 1)
    (folder / "adapters" / "v000001.e0001").rename(folder / "adapters" / "v1")
    (folder / "checkpoints").mkdir()
    store = group.host_store()
    ranks = [processes.Process(target=late_process.main, args=(rank, store.port, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=120)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    results = [torch.load(base / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(folder=folder / "checkpoints" / "000001.e0001", results=results)


def test_its_manifest_names_what_every_rank_wrote(late_pair):
    files = verify_manifest(late_pair.folder)["files"]
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert all(result["refusals"] for result in late_pair.results), "both had to wait for something"


def test_a_rank_that_never_saw_it_loads_it(late_pair):
    assert [result["manifest"]["step"] for result in late_pair.results] == [1, 1]
    assert [result["same"] for result in late_pair.results] == [True, True]
    assert [result["tensors"] for result in late_pair.results] == [["lora"], ["lora"]]
