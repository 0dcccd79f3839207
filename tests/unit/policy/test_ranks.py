"""Two ranks must do what one does. The ranks are processes over gloo; they run once for all tests here."""

from types import SimpleNamespace

import pytest
import rank_process
import torch

from argusrl.policy import group
from argusrl.policy.policy import Policy
from argusrl.policy.stats import Broken


@pytest.fixture(scope="module")
def pair(processes, settings, rows, tokens, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("pair")
    store = group.host_store()
    given = (store.port, folder, settings, rows, tokens.response)
    ranks = [processes.Process(target=rank_process.main, args=(rank, *given)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout=180)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(folder=folder, results=results)


@pytest.fixture
def alone(policy: Policy, rows, tokens) -> SimpleNamespace:
    start = policy.adapter_tensors()
    return SimpleNamespace(start=start, policy=policy, **rank_process.learn(policy, [rows], tokens.response))


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
    for what in ("checkpoint", "rows"):  # of rows, one rank's were bad
        assert all(result[f"refused_{what}"] for result in pair.results)


def test_rank_0_alone_hands_out_and_writes_the_adapter(pair) -> None:
    first, second = pair.results
    assert first["adapter_file"] == (pair.folder / first["ref"].path / "adapter_model.safetensors").read_bytes()
    assert second["adapter_file"] is None
    assert first["refused_adapter"]  # the folder exists
    assert not second["refused_adapter"]


def test_both_ranks_have_equal_canaries(pair, rows, alone) -> None:
    first, _ = pair.results
    turn = rows[0].turns[0]
    ours = alone.policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids)
    assert first["canary"] == pytest.approx(ours, abs=1e-4)


def test_one_rank_goes_on_from_a_checkpoint_of_two(pair, policy: Policy) -> None:
    policy.load_checkpoint(pair.folder / "checkpoint")
    assert policy.state_digest() == pair.results[0]["digest"]
    assert policy.state.updates == 1
    steps = {int(entry["step"]) for entry in policy._optimizer.state.values()}
    assert steps == {1}
    ref = policy.publish_adapter(pair.folder / "adapters" / "v1-by-one", 1, 1).result()
    assert ref.sha256 == pair.results[0]["ref"].sha256


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_and_two_replay_each_other_bit_for_bit(pair, policy: Policy, rows, tokens, ranks: int) -> None:
    policy.load_checkpoint(pair.folder / "checkpoint")
    ours = rank_process.replay(policy, rows, tokens.response, ranks)
    for result in pair.results:
        theirs = result["as"][ranks]
        assert theirs["digest"] == ours["digest"]
        for (stats, update), (our_stats, our_update) in zip(theirs["done"], ours["done"], strict=True):
            assert (stats, update) == (our_stats, our_update)
            assert update.skipped is None
    assert ours["digest"] != pair.results[0]["digest"]


def test_the_plans_differ_in_bits(pair) -> None:
    one, two = (pair.results[0]["as"][ranks]["digest"] for ranks in (1, 2))
    assert one != two  # or the replay above proves nothing


@pytest.mark.parametrize(("what", "micro_batch"), [("advantage", 1), ("gradient", 0)])
def test_bad_numbers_on_one_rank_stop_the_update_on_all(pair, what: str, micro_batch: int) -> None:
    for result in pair.results:
        stats, update = result["broken"][what]
        assert stats.broken == update.broken == Broken(rank=1, micro_batch=micro_batch, what=what)
        assert update.skipped == f"non-finite {what}"
        assert result["untouched"]


def test_ranks_can_check_each_other(pair) -> None:
    first, second = pair.results
    assert first["own"] == second["neighbour's"]
    assert second["own"] == first["neighbour's"]
    assert first["own"] != second["own"]


def test_ranks_count_together(pair, rows) -> None:
    one, other = (result["work"] for result in pair.results)
    assert one == other
    tokens = sum(row.tokens for row in rows)
    assert (one.tokens, one.row_tokens) == (tokens + 1, tokens)  # a rank had nothing to do
    assert 0 < tokens - one.unique_tokens < 10  # prompts begin alike, which is not worth a branch
    assert (one.patches, one.unique_patches, one.row_patches) == (48, 48, 64)
