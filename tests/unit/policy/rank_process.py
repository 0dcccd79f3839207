"""One rank of two, as a process: `python rank_process.py RANK PORT FOLDER`. test_ranks.py starts it."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from argusrl.errors import ModelError
from argusrl.policy import group
from argusrl.policy.policy import Policy
from argusrl.policy.sharding import gather_full


def learn(policy: Policy, micro_batches: list[Any], denominator_tokens: int) -> dict[str, Any]:
    """One update, with the whole gradient it had."""
    stats = policy.forward_backward(micro_batches, denominator_tokens)
    gradients = dict(gather_full({name: p.grad for name, p in policy.state.parameters.items()}))
    return {"stats": stats, "gradients": gradients, "update": policy.optimizer_step(1e-2)}


def refused(call: Any) -> bool:
    try:
        call()
    except (FileExistsError, ModelError):
        return True
    return False


def main(rank: int, port: int, folder: Path) -> None:
    settings, rows, denominator_tokens = pickle.loads((folder / "task.pickle").read_bytes())
    group.connect(rank=rank, world=2, host="127.0.0.1", port=port, name="pair", timeout_seconds=120)
    policy = Policy(settings)
    start = policy.adapter_tensors()
    share = [[rows[0]], [rows[2]]] if rank == 0 else [[rows[1]], []]  # the second has text only, then nothing
    result = learn(policy, share, denominator_tokens)
    turn = rows[0].turns[0]
    adapter, checkpoint = folder / "adapters" / "v1", folder / "checkpoint"
    writing = policy.save_checkpoint(checkpoint)
    learn(policy, share, denominator_tokens)  # training goes on while the checkpoint is written
    writing.result(timeout=60)
    policy.load_checkpoint(checkpoint)
    result |= {
        "start": start,
        "canary": policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids),
        "ref": policy.publish_adapter(adapter, 1, 1),
        "digest": policy.state_digest(),
        "local": sum(p.to_local().numel() for p in policy.state.parameters.values()),
        "refused_adapter": refused(lambda: policy.publish_adapter(adapter, 1, 1)),
        "refused_checkpoint": refused(lambda: policy.save_checkpoint(checkpoint).result(timeout=60)),
    }
    bad = [replace(rows[0], images=())] if rank == 1 else [rows[0]]
    result["refused_rows"] = refused(lambda: policy.forward_backward([bad], denominator_tokens))
    policy.load_checkpoint(checkpoint)
    result["reloaded"] = policy.state_digest()
    policy.load_adapter(adapter)
    result["reread"] = policy.state_digest()
    policy.close()
    torch.save(result, folder / f"rank{rank}.pt")
    group.disconnect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
