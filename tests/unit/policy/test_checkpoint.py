"""Writing that hangs. What a checkpoint holds is in test_policy.py and test_ranks.py."""

from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event

import pytest

from argusrl.policy import checkpoint
from argusrl.policy.policy import Policy


def test_closing_gives_up_what_hangs(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, over = Event(), Event(), Event()

    def hang(writer: checkpoint.CheckpointWriter, *_: object) -> Path:
        begun.set()
        go_on.wait(60)
        over.set()
        raise RuntimeError("the group is gone")

    monkeypatch.setattr(checkpoint.CheckpointWriter, "_write", hang)
    futures = [policy.save_checkpoint(tmp_path / str(number)) for number in range(2)]
    assert begun.wait(60)
    policy.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    go_on.set()
    assert over.wait(60)


def test_writes_follow_each_other(policy: Policy, tmp_path: Path) -> None:
    futures = [policy.save_checkpoint(tmp_path / str(number)) for number in range(3)]
    assert futures[2].result(timeout=60) == tmp_path / "2"
    assert all(future.done() for future in futures)
    with pytest.raises(FileExistsError):
        policy.save_checkpoint(tmp_path / "0").result(timeout=60)
