"""The whole path (pixels, positions, packing, LoRA, log-probabilities, loss) against another trainer's gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "model"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden model beside this checkout (../shared/golden)")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def scored(golden: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[int]]:
    """(scorer, one packed batch of all six sequences, their response lengths)."""
    from argusrl.policy.inputs import InputBuilder
    from argusrl.policy.lora import add_lora, load_initial
    from argusrl.policy.model import load_model
    from argusrl.policy.rows import Row, RowTurn
    from argusrl.policy.scorer import Scorer
    from argusrl.policy.settings import PolicySettings

    settings = PolicySettings(model=str(GOLDEN / "tiny"), device="cpu", dtype="float32", rank=4, alpha=8.0)
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_model.safetensors").symlink_to(GOLDEN / "lora.safetensors")
    config = {"peft_type": "LORA", "r": golden["meta"]["lora"]["r"], "lora_alpha": golden["meta"]["lora"]["alpha"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = load_model(settings, reader=True)
    model = add_lora(base, settings)
    load_initial(model, folder, settings)
    images = [(GOLDEN / f"img_{number}.png").read_bytes() for number in range(2)]
    batch, rows = golden["batch"], []
    for number, reply in enumerate(golden["completions"]):
        mask = batch["prompt_mask"][number]
        prompt = tuple(t for t, keep in zip(batch["prompt_ids"][number], mask, strict=True) if keep)
        turn = RowTurn(prompt_ids=prompt, response_ids=tuple(reply), logprobs=(0.0,) * len(reply))
        rows.append(Row(turns=(turn,), advantage=0.0, images=(images[number // 3],)))
    packed = InputBuilder(base, settings).pack(rows)
    return Scorer(model, base), packed, [len(reply) for reply in golden["completions"]]


def flat(table: list[list[float]], lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.tensor(row[:length]) for row, length in zip(table, lengths, strict=True)])


NONE = torch.zeros(0, dtype=torch.long)


def test_log_probabilities_and_entropies(golden: dict[str, Any], scored: Any) -> None:
    scorer, batch, lengths = scored
    assert batch.image_inputs["image_grid_thw"].tolist() == [[1, 8, 8], [1, 6, 10]]
    with torch.no_grad():
        logprobs, entropies = scorer(batch, 1.0, NONE)
    torch.testing.assert_close(logprobs, flat(golden["batch"]["new_logps"], lengths), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, flat(golden["batch"]["entropy"], lengths), atol=2e-5, rtol=0)


def test_lora_gradients_of_the_token_mean_loss(golden: dict[str, Any], scored: Any) -> None:
    from safetensors.torch import load_file

    from argusrl.algorithms.kl import with_kl
    from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss
    from argusrl.policy.lora import peft_name

    scorer, batch, lengths = scored
    entry = next(case for case in golden["cases"] if case["name"] == "dapo")
    old, reference = flat(entry["old_logps"], lengths), flat(golden["batch"]["ref_logps"], lengths)
    advantages = torch.cat([torch.full((n,), a) for a, n in zip(entry["advantages"], lengths, strict=True)])
    new, _ = scorer(batch, 1.0, NONE)
    policy = clipped_policy_loss(new, old, old, advantages, ClipSettings(0.2, 0.28, None))
    loss = with_kl(policy, new, reference, golden["meta"]["beta"]).loss / sum(lengths)
    loss.backward()
    assert loss.item() == pytest.approx(entry["loss"], abs=1e-5)
    theirs = load_file(GOLDEN / "grads_dapo.safetensors")
    ours = {peft_name(n).removeprefix("model."): p.grad for n, p in scorer.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    largest = max(value.abs().max().item() for value in theirs.values())
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max().item() < 1e-4 * largest, name
