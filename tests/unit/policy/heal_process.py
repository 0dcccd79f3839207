"""Ranks of a group that loses one, which test_healing.py runs as processes. They answer through a pipe."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from argusrl.policy import group
from argusrl.policy.model import decoder_of
from argusrl.policy.policy import Policy

DENOMINATOR_TOKENS = 18


def join(generation: int, rank: int, port: int, settings: Any) -> Policy:
    group.connect(rank=rank, world=2, host="127.0.0.1", port=port, name=f"ranks-{generation}", timeout_seconds=120)
    return Policy(settings)


def learn(policy: Policy, rows: Any, updates: int) -> str:
    share = [[rows[0]], [rows[2]]] if policy.rank == 0 else [[rows[1]], []]
    for _ in range(updates):
        policy.forward_backward(share, DENOMINATOR_TOKENS)
        policy.optimizer_step(1e-2)
    return policy.state_digest()


def first_generation(policy: Policy, rows: Any, checkpoint: Path) -> str:
    """Three updates, undisturbed, with a checkpoint after the first; then again, up to the second."""
    learn(policy, rows, 1)
    policy.save_checkpoint(checkpoint).result(timeout=60)
    undisturbed = learn(policy, rows, 2)
    policy.load_checkpoint(checkpoint)
    learn(policy, rows, 1)
    return undisturbed


def die(pipe: Connection, settings: Any, rows: Any, checkpoint: Path) -> None:
    """Rank 1 of the first generation, which is killed in the middle of a backward."""
    policy = join(1, 1, pipe.recv(), settings)
    first_generation(policy, rows, checkpoint)

    def watch(_module: Any, _inputs: Any, output: Any) -> None:
        output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    decoder_of(policy._scorer.base).layers[0].register_forward_hook(watch)
    learn(policy, rows, 1)


def survive(pipe: Connection, settings: Any, rows: Any, checkpoint: Path) -> None:
    """Rank 0 of both generations."""
    store = group.host_store()
    pipe.send(store.port)
    policy = join(1, 0, store.port, settings)
    undisturbed = first_generation(policy, rows, checkpoint)
    try:
        learn(policy, rows, 1)
    except RuntimeError as error:
        pipe.send(type(error).__name__)
    policy.close()
    group.disconnect()
    store = group.host_store()
    pipe.send(store.port)
    policy = join(2, 0, store.port, settings)
    policy.load_checkpoint(checkpoint)
    pipe.send(undisturbed)
    pipe.send(learn(policy, rows, 2))


def replace(pipe: Connection, settings: Any, rows: Any, checkpoint: Path) -> None:
    """Rank 1 of the second generation."""
    policy = join(2, 1, pipe.recv(), settings)
    policy.load_checkpoint(checkpoint)
    pipe.send(learn(policy, rows, 2))
