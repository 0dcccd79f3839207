"""One rank of two, which test_ranks.py runs as a process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from argusrl.errors import ModelError
from argusrl.policy import group
from argusrl.policy.model import decoder_of
from argusrl.policy.policy import Policy
from argusrl.policy.rows import Row
from argusrl.policy.sharding import gather_full

# rank -> micro-batch -> positions of rows; with two ranks the second has text only, then nothing
PLANS = {1: [[[0], [2, 1]]], 2: [[[0], [2]], [[1], []]]}


def learn(policy: Policy, micro_batches: list[Any], denominator_tokens: int) -> dict[str, Any]:
    """One update, with the whole gradient it had."""
    stats = policy.forward_backward(micro_batches, denominator_tokens)
    gradients = dict(gather_full({name: p.grad for name, p in policy.state.parameters.items()}))
    return {"stats": stats, "gradients": gradients, "update": policy.optimizer_step(1e-2)}


def replay(policy: Policy, rows: list[Row], denominator_tokens: int, ranks: int) -> dict[str, Any]:
    """Two updates as `ranks` ranks do them."""
    plan = [[[rows[index] for index in batch] for batch in share] for share in PLANS[ranks]]
    done = []
    for _ in range(2):
        if policy.world == ranks:
            stats = policy.forward_backward(plan[policy.rank], denominator_tokens)
        else:
            stats = policy.forward_backward_as(plan, denominator_tokens)
        done.append((stats, policy.optimizer_step(1e-2)))
    return {"done": done, "digest": policy.state_digest()}


def refused(call: Any) -> bool:
    try:
        call()
    except (FileExistsError, ModelError):
        return True
    return False


def broken_numbers(policy: Policy, rows: list[Row], denominator_tokens: int) -> dict[str, Any]:
    """What both ranks say where the second one's second micro-batch is bad, and whether the state moved."""
    before = policy.state_digest()
    good, bad = [rows[1]], [replace(rows[1], advantage=float("nan"))] if policy.rank == 1 else [rows[0]]
    stats = policy.forward_backward([good, bad], denominator_tokens)
    answers = {"advantage": (stats, policy.optimizer_step(1e-2))}
    if policy.rank == 1:
        layer = decoder_of(policy._scorer.base).layers[0]

        def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: gradient * float("inf"))

        handle = layer.register_forward_hook(spoil)
    stats = policy.forward_backward([good], denominator_tokens)
    answers["gradient"] = (stats, policy.optimizer_step(1e-2))
    if policy.rank == 1:
        handle.remove()
    return {"broken": answers, "untouched": policy.state_digest() == before}


def main(rank: int, port: int, folder: Path, settings: Any, rows: list[Row], denominator_tokens: int) -> None:
    group.connect(rank=rank, world=2, host="127.0.0.1", port=port, name="pair", timeout_seconds=120)
    policy = Policy(settings)
    start = policy.adapter_tensors()
    share = [[rows[index] for index in batch] for batch in PLANS[2][rank]]
    result = learn(policy, share, denominator_tokens)
    result["work"] = policy.finish_step()
    turn = rows[0].turns[0]
    adapter, checkpoint = folder / "adapters" / "v1", folder / "checkpoint"
    writing = policy.save_checkpoint(checkpoint)
    learn(policy, share, denominator_tokens)  # training goes on while the checkpoint is written
    writing.result(timeout=60)
    policy.load_checkpoint(checkpoint)
    result |= {
        "start": start,
        "canary": policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids),
        "own": policy.logprob_digest([rows[rank]]),
        "neighbour's": policy.logprob_digest([rows[1 - rank]]),
        "ref": (publication := policy.publish_adapter(adapter, 1, 1)).result(),
        "adapter_file": None if publication.files is None else publication.files.tensors.tobytes(),
        "digest": policy.state_digest(),
        "local": sum(p.to_local().numel() for p in policy.state.parameters.values()),
        "refused_adapter": refused(lambda: policy.publish_adapter(adapter, 1, 1).result()),
        "refused_checkpoint": refused(lambda: policy.save_checkpoint(checkpoint).result(timeout=60)),
    }
    bad = [replace(rows[0], images=())] if rank == 1 else [rows[0]]
    result["refused_rows"] = refused(lambda: policy.forward_backward([bad], denominator_tokens))
    policy.load_checkpoint(checkpoint)
    result["reloaded"] = policy.state_digest()
    policy.load_adapter(adapter)
    result["reread"] = policy.state_digest()
    result |= broken_numbers(policy, rows, denominator_tokens)
    result["as"] = {}
    for ranks in PLANS:
        policy.load_checkpoint(checkpoint)
        result["as"][ranks] = replay(policy, rows, denominator_tokens, ranks)
    policy.close()
    torch.save(result, folder / f"rank{rank}.pt")
    group.disconnect()
