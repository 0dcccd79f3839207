"""Two ranks must do what one does. The ranks are processes over gloo; they run once for all tests here."""

import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argusrl.policy import group
from argusrl.policy.policy import Policy

SCRIPT = Path(__file__).with_name("rank_process.py")


@pytest.fixture(scope="module")
def pair(settings: Any, rows: Any, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "task.pickle").write_bytes(pickle.dumps((settings, rows, tokens.response)))
    store = group.host_store()
    command = [sys.executable, str(SCRIPT)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(store.port), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        problems = [process.communicate(timeout=180)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(problems)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(folder=folder, results=results)


def one_update(*arguments: Any) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))["learn"](*arguments)


@pytest.fixture
def alone(policy: Policy, rows, tokens) -> SimpleNamespace:
    start = policy.adapter_tensors()
    return SimpleNamespace(start=start, policy=policy, **one_update(policy, [rows], tokens.response))


def test_same_start(pair, alone) -> None:
    for result in pair.results:
        assert all(torch.equal(value, alone.start[name]) for name, value in result["start"].items())


def test_same_gradient_and_stats(pair, alone) -> None:
    scale = max(value.abs().max().item() for value in alone.gradients.values())
    for result in pair.results:
        assert result["gradients"].keys() == alone.gradients.keys()
        for name, value in result["gradients"].items():
            assert (value - alone.gradients[name]).abs().max().item() <= 1e-5 * scale
        for field in ("loss", "entropy", "gap_mean", "gap_max", "tokens", "row_tokens"):
            assert getattr(result["stats"], field) == pytest.approx(getattr(alone.stats, field), rel=1e-5)
        assert result["update"].grad_norm == pytest.approx(alone.update.grad_norm, rel=1e-5)
    assert pair.results[0]["stats"] == pair.results[1]["stats"]


def test_parameters_are_shared_out(pair, alone) -> None:
    total = sum(p.numel() for p in alone.policy.state.parameters.values())
    assert sum(result["local"] for result in pair.results) == total
    assert max(result["local"] for result in pair.results) < 0.6 * total


def test_both_ranks_answer_alike(pair, rows, alone) -> None:
    first, second = pair.results
    assert first["ref"] == second["ref"]
    digests = {result[key] for result in pair.results for key in ("digest", "reloaded", "reread")}
    assert len(digests) == 1
    assert first["canary"] == second["canary"]
    for what in ("adapter", "checkpoint", "rows"):  # of rows, one rank's were bad
        assert all(result[f"refused_{what}"] for result in pair.results)
    turn = rows[0].turns[0]
    ours = alone.policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids)
    assert first["canary"] == pytest.approx(ours, abs=1e-4)


def test_one_rank_goes_on_from_a_checkpoint_of_two(pair, policy: Policy) -> None:
    policy.load_checkpoint(pair.folder / "checkpoint")
    assert policy.state_digest() == pair.results[0]["digest"]
    assert policy.state.updates == 1
    steps = {int(entry["step"]) for entry in policy._optimizer.state.values()}
    assert steps == {1}
    ref = policy.publish_adapter(pair.folder / "adapters" / "v1-by-one", 1, 1)
    assert ref.sha256 == pair.results[0]["ref"].sha256
