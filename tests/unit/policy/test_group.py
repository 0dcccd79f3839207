import socket

import pytest
import torch
import torch.distributed as dist

from argusrl.errors import ClusterError
from argusrl.policy import group


def test_survivors_meet_again_under_a_new_name() -> None:
    store = group.host_store()
    for name in ("first", "second"):  # the second time without leaving by hand
        group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name=name)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1
    group.disconnect()
    group.disconnect()
    assert not dist.is_initialized()


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"127.0.0.1:{port}"):
        group.connect(rank=1, world=2, host="127.0.0.1", port=port, name="g", timeout_seconds=1)


def test_a_rank_that_never_comes() -> None:
    store = group.host_store()
    with pytest.raises(ClusterError, match="rank 0 of 2"):
        group.connect(rank=0, world=2, host="127.0.0.1", port=store.port, name="g", timeout_seconds=1)
