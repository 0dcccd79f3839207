import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from argusrl.errors import FencedError, StorageError
from argusrl.journal.epochs import claim_epoch, newest_epoch, numbered, renew_epoch
from argusrl.storage.sealed_json import read_sealed


def test_epochs_count_from_one_and_say_who_claimed(run):
    assert newest_epoch(run) == 0
    epoch = claim_epoch(run, {"started": 12.5})
    assert epoch.number == newest_epoch(run) == 1
    record = read_sealed(run.epoch(1))
    assert (record["epoch"], record["pid"], record["started"]) == (1, os.getpid(), 12.5)
    assert record["nonce"] == epoch.nonce
    assert record["host"]
    epoch.check()


def test_a_higher_epoch_fences(run):
    old = claim_epoch(run)
    new = claim_epoch(run)
    new.check()
    with pytest.raises(FencedError, match="epoch 2 now"):
        old.check()


def test_racing_claimants_get_different_epochs(run):
    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(lambda _: claim_epoch(run), range(16)))
    assert sorted(epoch.number for epoch in epochs) == list(range(1, 17))
    for epoch in epochs:
        assert read_sealed(run.epoch(epoch.number))["nonce"] == epoch.nonce


def test_only_numbers_count(tmp_path):
    for name in ("0002.json", "0010.json", "x.json", ".0011.json.1-ab.tmp", "0012.txt", "²3.json"):
        (tmp_path / name).touch()
    assert numbered(tmp_path, ".json") == [2, 10]
    assert numbered(tmp_path / "none") == []


def test_a_renewal_that_storage_failed_after_its_name_was_there_is_no_rival(run, monkeypatch):
    epoch = claim_epoch(run)

    def failing(path):
        raise OSError(5, "fsync failed")

    with monkeypatch.context() as patch:
        patch.setattr("argusrl.storage.publish.fsync_path", failing)
        with pytest.raises(StorageError):
            renew_epoch(epoch)
    assert newest_epoch(run) == 2
    assert renew_epoch(epoch).number == 3
    with pytest.raises(FencedError):  # a holder of before must not renew what another one renewed
        renew_epoch(claim_epoch_of(epoch))


def claim_epoch_of(epoch):
    """The same number in the hands of a rival."""
    return type(epoch)(epoch.run, epoch.number, "another nonce")
