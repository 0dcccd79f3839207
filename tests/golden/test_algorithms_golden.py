"""Our advantages and loss against numbers that other projects' own functions gave, and where we differ on purpose."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from argusrl.algorithms.advantages import group_advantages
from argusrl.algorithms.kl import k3, with_kl
from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden numbers beside this checkout (../shared/golden)")


def load(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"golden_{name}.json").read_text())


def case(data: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    return next(entry for entry in data[key] if entry["name"] == name)


def ours(rewards: list[float], kind: str = "group_std") -> list[float]:
    return group_advantages(rewards[:3], kind) + group_advantages(rewards[3:], kind)


def first_column(table: list[list[float]]) -> list[float]:
    return [row[0] for row in table]


@pytest.mark.parametrize(("project", "name"), [("verl", "grpo"), ("verl", "grpo_zero_var"), ("skyrl", "grpo")])
def test_group_std_equals(project: str, name: str) -> None:
    entry = case(load(project), "advantages", name)
    assert ours(entry["rewards"]) == pytest.approx(first_column(entry["advantages"]), abs=1e-6)


def test_group_mean_equals_trl_and_verl() -> None:
    trl = case(load("trl"), "advantages", "no_std")
    assert ours(trl["rewards"], "group_mean") == pytest.approx(trl["advantages"], abs=1e-12)
    verl = case(load("verl"), "advantages", "grpo_no_std")
    assert ours(verl["rewards"], "group_mean") == pytest.approx(first_column(verl["advantages"]), abs=1e-12)


def test_trl_divides_by_a_larger_epsilon() -> None:
    entry = case(load("trl"), "advantages", "group_std")
    rewards, theirs = entry["rewards"], entry["advantages"]
    assert ours(rewards) != pytest.approx(theirs, abs=1e-5)
    for group in (slice(0, 3), slice(3, 6)):
        std = torch.tensor(rewards[group], dtype=torch.float64).std().item()
        rescaled = [a * (std + 1e-6) / (std + 1e-4) for a in group_advantages(rewards[group])]
        assert rescaled == pytest.approx(theirs[group], abs=1e-6)


def loss_of(
    data: dict[str, Any], advantages: list[list[float]], settings: ClipSettings, beta: float = 0.0, **choice: str
) -> tuple[float, torch.Tensor]:
    """Token-mean loss and its gradient as a [B, T] table, zero off the mask."""
    inputs = data["inputs"]
    mask = torch.tensor(inputs[choice.get("mask", "mask")]).bool()
    pick = lambda name: torch.tensor(inputs[name], dtype=torch.float64)[mask]  # noqa: E731
    new = torch.tensor(inputs["new"], dtype=torch.float64).requires_grad_()
    old = new.detach()[mask] if choice.get("old") == "new" else pick("old")
    engine = pick("sampling") if "engine" in choice else old
    sums = clipped_policy_loss(new[mask], old, engine, torch.tensor(advantages, dtype=torch.float64)[mask], settings)
    loss = with_kl(sums, new[mask], pick("ref"), beta).loss / mask.sum()
    loss.backward()
    return loss.item(), new.grad


def broadcast(advantages: list[float], data: dict[str, Any]) -> list[list[float]]:
    return [[a] * len(row) for a, row in zip(advantages, data["inputs"]["new"], strict=True)]


@pytest.mark.parametrize(("name", "old"), [("dapo", "old"), ("dapo_on_policy", "new"), ("dapo_kl", "old")])
def test_token_mean_clip_equals_trl(name: str, old: str) -> None:
    data = load("trl")
    entry = case(data, "cases", name)
    advantages = broadcast([row[0] if isinstance(row, list) else row for row in entry["advantages"]], data)
    loss, gradient = loss_of(data, advantages, ClipSettings(0.2, 0.28, None), entry["config"]["beta"], old=old)
    assert loss == pytest.approx(entry["loss"], abs=1e-10)
    torch.testing.assert_close(gradient, torch.tensor(entry["dloss_dlogp"], dtype=torch.float64), atol=1e-9, rtol=0)


def test_kl_estimates_equal_verl() -> None:
    data = load("verl")
    entry = case(data, "kl", "kl_k3")
    new, reference = (torch.tensor(data["inputs"][name], dtype=torch.float64) for name in ("new", "ref"))
    theirs = torch.tensor(entry["value"], dtype=torch.float64)
    mask = torch.tensor(data["inputs"]["mask"]).bool()
    torch.testing.assert_close(k3(new, reference)[mask], theirs[mask], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("name", "high"), [("vanilla_symmetric", 0.2), ("vanilla_no_dual", 0.28)])
def test_token_mean_clip_equals_verl_where_its_dual_clip_rests(name: str, high: float) -> None:
    data = load("verl")
    entry = case(data, "losses", name)
    loss, gradient = loss_of(data, data["advantages_grpo"], ClipSettings(0.2, high, None))
    theirs = torch.tensor(entry["dloss_dlogp"], dtype=torch.float64)
    if name == "vanilla_no_dual":
        assert loss == pytest.approx(entry["loss"], abs=1e-10)
        torch.testing.assert_close(gradient, theirs, atol=1e-9, rtol=0)
    else:  # its default third bound takes away gradient of a negative advantage; ours has none on purpose
        assert loss > entry["loss"]
        assert ((gradient != theirs) & (theirs == 0)).any()


@pytest.mark.parametrize(
    ("name", "choice", "cap"),
    [
        ("regular_onpolicy", {"old": "new"}, None),
        ("regular_token_mean_hole", {"mask": "hole_mask"}, None),
        ("regular_tis_token", {"engine": "sampling"}, 1.25),
    ],
)
def test_token_mean_clip_and_importance_weight_equal_skyrl(
    name: str, choice: dict[str, str], cap: float | None
) -> None:
    data = load("skyrl")
    entry = case(data, "losses", name)
    loss, gradient = loss_of(data, data["advantages_grpo"], ClipSettings(0.2, 0.28, cap), **choice)
    assert loss == pytest.approx(entry["loss"], abs=1e-6)
    theirs = torch.tensor(entry["dloss_dlogp"], dtype=torch.float64)
    torch.testing.assert_close(gradient, theirs, atol=1e-6, rtol=0)
