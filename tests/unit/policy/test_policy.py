"""One rank. What several ranks must agree on is in test_ranks.py."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argusrl.errors import CorruptionError, ModelError, NumericsError
from argusrl.policy.lora import without_adapter
from argusrl.policy.model import decoder_of
from argusrl.policy.policy import Policy
from argusrl.policy.rows import Row
from argusrl.storage.manifest import verify_manifest


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference, as a share of the largest value."""
    assert one.keys() == other.keys()
    scale = max(value.abs().max().item() for value in other.values())
    assert scale > 0
    return max((one[name] - other[name]).abs().max().item() for name in one) / scale


def moments(policy: Policy) -> list[torch.Tensor]:
    return [t.full_tensor().clone() for name, t in sorted(policy.state.tensors().items()) if name.startswith("exp_avg")]


@pytest.fixture
def moved(policy: Policy, rows: list[Row], tokens: Any) -> Policy:
    """After one update, so that the adapter changes something."""
    policy.forward_backward([rows], tokens.response)
    assert policy.optimizer_step(1e-2).skipped is None
    return policy


def test_micro_batches_do_not_change_the_gradient(policy, rows, gradients) -> None:
    many = [*rows, *rows, *rows[:2]]
    total = sum(len(turn.response_ids) for row in many for turn in row.turns)
    whole = policy.forward_backward([many], total)
    one = gradients(policy)
    policy.discard_gradients()
    pieces = policy.forward_backward([*([row] for row in many), []], total)
    assert close(gradients(policy), one) < 1e-5
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-5)
    assert pieces.tokens == whole.tokens == total
    assert pieces.row_tokens == whole.row_tokens == sum(len(row.ids) for row in many)


def test_sharing_a_prompt_does_not_change_the_gradient(policy, rows, gradients) -> None:
    image, _, turns = rows
    reply = replace(image.turns[0], response_ids=(11, 12, 13), logprobs=(-1.0,) * 3)
    longer = replace(image, turns=(reply, *rows[1].turns), advantage=-2.0)  # goes on with a second turn
    forked = replace(turns, turns=(replace(turns.turns[0], response_ids=(30,), logprobs=(-1.0,)), turns.turns[1]))
    many = [image, longer, turns, forked]
    total = sum(len(turn.response_ids) for row in many for turn in row.turns)
    packed = policy.forward_backward([many], total)
    shared = gradients(policy)
    policy.discard_gradients()
    alone = policy.forward_backward([[row] for row in many], total)
    assert close(gradients(policy), shared) < 1e-5
    assert packed.gap_mean == pytest.approx(alone.gap_mean, rel=1e-5)
    assert packed.tokens == alone.tokens == total


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("deterministic", [False, True])
def test_bit_reproducible(settings, rows, tokens, deterministic: bool) -> None:
    digests = set()
    try:
        for _ in range(2):
            policy = Policy(replace(settings, deterministic=deterministic))
            for _ in range(2):
                policy.forward_backward([rows, rows], tokens.response * 2)
                policy.optimizer_step(1e-2)
            digests.add(policy.state_digest())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(digests) == 1


def test_refused_rows_leave_nothing_behind(policy, rows, tokens, gradients) -> None:
    policy.forward_backward([rows], tokens.response)
    clean = gradients(policy)
    policy.discard_gradients()
    with pytest.raises(ModelError, match="no pixels"):
        policy.forward_backward([rows, [replace(rows[0], images=())]], tokens.response)
    policy.discard_gradients()
    policy.forward_backward([rows], tokens.response)
    assert all(torch.equal(value, clean[name]) for name, value in gradients(policy).items())


def test_stats_of_the_first_update(policy, rows, tokens) -> None:
    stats = policy.forward_backward([rows], tokens.response)
    assert stats.ratio == 1.0  # the old log-probability is the new one
    assert stats.clip_share == 0.0
    assert 0 < stats.entropy < 5
    assert stats.gap_max >= stats.gap_mean > 0


def test_an_update_follows_the_advantage(policy: Policy, rows, tokens) -> None:
    def likelihoods() -> list[float]:
        turns = [(row, row.turns[0]) for row in rows]
        return [sum(policy.canary(t.prompt_ids, row.images[:1], t.response_ids)) for row, t in turns]

    before = likelihoods()
    for _ in range(3):
        policy.forward_backward([rows], tokens.response)
        policy.optimizer_step(1e-3)
    moves = [after - start for after, start in zip(likelihoods(), before, strict=True)]
    assert [move > 0 for move in moves] == [row.advantage > 0 for row in rows]


def test_gap_to_an_exact_engine_is_zero(policy, rows) -> None:
    batch = policy._inputs.pack(rows)
    with torch.no_grad():
        logprobs, _ = policy._scorer(batch, 1.0, policy._banned)
    values = iter(logprobs.tolist())
    exact = [
        replace(row, turns=tuple(replace(t, logprobs=tuple(next(values) for _ in t.response_ids)) for t in row.turns))
        for row in rows
    ]
    stats = policy.forward_backward([[row] for row in exact], len(logprobs))
    assert stats.gap_max < 1e-5
    assert stats.cut_share == 0


@pytest.mark.usefixtures("one_rank")
def test_several_updates_use_the_engine_as_old(settings, rows, tokens) -> None:
    policy = Policy(replace(settings, updates_per_step=4))
    stats = policy.forward_backward([rows], tokens.response)
    assert stats.ratio != 1.0
    assert stats.clip_share > 0


def test_no_signal_updates_nothing(moved: Policy, rows, tokens) -> None:
    before = moved.state_digest()
    moved.forward_backward([[replace(row, advantage=0.0) for row in rows]], tokens.response)
    assert moved.optimizer_step(1e-2).skipped == "no signal"
    empty = moved.forward_backward([], tokens.response)
    assert (empty.tokens, empty.loss) == (0, 0.0)
    assert moved.optimizer_step(1e-2).skipped == "no signal"
    assert moved.state_digest() == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_gradient_leaves_adam_untouched(moved: Policy, rows, tokens, bad: float) -> None:
    before, digest = moments(moved), moved.state_digest()
    moved.forward_backward([[replace(rows[0], advantage=bad), *rows[1:]]], tokens.response)
    update = moved.optimizer_step(1e-2)
    assert update.skipped == "non-finite advantage"
    assert all(torch.equal(a, b) for a, b in zip(moments(moved), before, strict=True))
    assert moved.state_digest() == digest
    moved.forward_backward([rows], tokens.response)
    assert moved.optimizer_step(1e-2).skipped is None  # nothing of the broken gradient stayed


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_clipped_to_the_norm(settings, rows, tokens) -> None:
    policy = Policy(replace(settings, max_grad_norm=1e-3, betas=(0.0, 0.0)))
    policy.forward_backward([rows], tokens.response)
    assert policy.optimizer_step(1e-2).grad_norm > 1e-2
    first = torch.cat([m.flatten() for m in moments(policy)[: len(policy.state.parameters)]])
    assert first.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_published_adapter_gives_equal_logits_through_peft(moved: Policy, random_model, rows, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    ref = moved.publish_adapter(tmp_path / "adapters" / "v000001.e0001", 1, 1).result()
    folder = tmp_path / ref.path
    manifest = verify_manifest(folder)
    assert (manifest["version"], manifest["epoch"], manifest["sha256"]) == (1, 1, ref.sha256)
    assert manifest["files"]["adapter_model.safetensors"]["sha256"] == ref.file_sha256
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")

    base = AutoModelForImageTextToText.from_pretrained(random_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder)
    batch = moved._inputs.pack(rows[:1])
    with torch.no_grad():
        logits = loaded(input_ids=batch.input_ids, mm_token_type_ids=batch.token_types, **batch.image_inputs).logits[0]
    expected = torch.log_softmax(logits[batch.sources], -1).gather(1, batch.targets[:, None])[:, 0]
    turn = rows[0].turns[0]
    ours = moved.canary(turn.prompt_ids, rows[0].images, turn.response_ids)
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)


def test_publishing_never_overwrites_and_never_writes_nan(moved: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "v1"
    moved.publish_adapter(folder, 1, 1).result()
    with pytest.raises(FileExistsError):
        moved.publish_adapter(folder, 1, 1).result()
    with torch.no_grad():
        next(iter(moved.state.parameters.values())).to_local()[0] = float("nan")
    with pytest.raises(NumericsError, match="1 of 28"):
        moved.publish_adapter(tmp_path / "adapters" / "v2", 2, 1)  # nothing is handed out
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["v1"]


def test_the_frozen_tower_sees_the_images_of_the_canary_once(
    policy: Policy, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = rows[0].turns[0]
    canary = (turn.prompt_ids, rows[0].images, turn.response_ids)
    first = policy.canary(*canary)
    monkeypatch.setattr(type(policy._scorer), "_run_tower", None)
    assert policy.canary(*canary) == first


def test_canary_tells_the_adapter_from_the_base(policy: Policy, rows, tokens) -> None:
    turn = rows[0].turns[0]
    ask = lambda which: policy.canary(turn.prompt_ids, rows[0].images, turn.response_ids, which)  # noqa: E731
    base = ask("base")
    assert ask("current") == base  # a fresh adapter changes nothing
    policy.forward_backward([rows], tokens.response)
    policy.optimizer_step(1e-2)
    assert ask("base") == base
    assert max(abs(a - b) for a, b in zip(ask("current"), base, strict=True)) > 1e-4


def test_checkpoint_is_the_state_of_the_call(moved: Policy, rows, tokens, tmp_path: Path) -> None:
    saved, adapter = moved.state_digest(), moved.adapter_tensors()
    future = moved.save_checkpoint(tmp_path / "checkpoints" / "000001.e0001", {"step": 1})
    moved.forward_backward([rows], tokens.response)
    moved.optimizer_step(1e-2)
    later = moved.state_digest()
    assert later != saved
    folder = future.result(timeout=60)
    assert moved.load_checkpoint(folder)["step"] == 1
    assert moved.state_digest() == saved
    assert all(torch.equal(value, adapter[name]) for name, value in moved.adapter_tensors().items())
    moved.forward_backward([rows], tokens.response)
    moved.optimizer_step(1e-2)
    assert moved.state_digest() == later  # replayed bit for bit
    verify_manifest(folder)
    with pytest.raises(FileExistsError):
        moved.save_checkpoint(folder).result(timeout=60)


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_of_another_shape_or_torn(moved: Policy, settings, tmp_path: Path) -> None:
    folder = moved.save_checkpoint(tmp_path / "c").result(timeout=60)
    other = Policy(replace(settings, rank=8))
    with pytest.raises(CorruptionError, match="does not fit"):
        other.load_checkpoint(folder)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(CorruptionError, match="bytes"):
        moved.load_checkpoint(folder)


def test_load_adapter_takes_published_values(moved: Policy, rows, tokens, tmp_path: Path) -> None:
    ref = moved.publish_adapter(tmp_path / "adapters" / "v1", 1, 1).result()
    before = moved.adapter_tensors()
    moved.forward_backward([rows], tokens.response)
    moved.optimizer_step(1e-2)
    largest = max((value - before[name]).abs().max() for name, value in moved.adapter_tensors().items())
    assert moved.load_adapter(tmp_path / ref.path) == float(largest) > 0
    assert moved.load_adapter(tmp_path / ref.path) == 0
    assert all(torch.equal(value, before[name]) for name, value in moved.adapter_tensors().items())
    with pytest.raises(ModelError):
        moved.load_adapter(tmp_path)


def test_the_tower_runs_once_per_image_and_step(policy: Policy, rows) -> None:
    calls = []
    block = policy._scorer.base.model.visual.blocks[0]
    handle = block.register_forward_hook(lambda _module, inputs, _output: calls.append(len(inputs[0])))
    policy.forward_backward([[rows[1]]], 4)
    assert calls == []  # no rank has an image
    policy.forward_backward([[rows[0]], [rows[1]], [rows[2], rows[0]], [rows[0]]], 4)
    assert calls == [16, 32]  # rows[2] brings the first image again
    assert policy.finish_step().patches == 48
    policy.forward_backward([[rows[0]]], 4)
    assert calls == [16, 32, 16]  # features are of one step
    handle.remove()


@pytest.mark.usefixtures("one_rank")
def test_initial_adapter_goes_on_where_the_other_ended(moved: Policy, settings, tmp_path: Path) -> None:
    ref = moved.publish_adapter(tmp_path / "adapters" / "v1", 1, 1).result()
    follower = Policy(replace(settings, initial=tmp_path / ref.path))
    old, new = moved.adapter_tensors(), follower.adapter_tensors()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_offloaded_policy_refuses_work(policy: Policy, rows) -> None:
    policy.offload()
    policy.offload()
    with pytest.raises(RuntimeError, match="onload"):
        policy.forward_backward([rows], 1)
    policy.onload()
    policy.forward_backward([rows], 1)


def test_gradient_checkpointing_changes_nothing(policy, settings, rows, tokens, gradients) -> None:
    policy.forward_backward([rows], tokens.response)
    plain = gradients(policy)
    other = Policy(replace(settings, gradient_checkpointing=True))
    other.forward_backward([rows], tokens.response)
    assert close(gradients(other), plain) < 1e-5


@pytest.mark.usefixtures("one_rank")
def test_full_training_moves_the_language_model_only(settings, rows, tokens, tmp_path: Path) -> None:
    policy = Policy(replace(settings, kind="full"))
    assert all("visual" not in name for name in policy.state.parameters)
    policy.forward_backward([[row] for row in rows], tokens.response)
    assert policy.optimizer_step(1e-3).skipped is None
    ref = policy.publish_adapter(tmp_path / "adapters" / "v1", 1, 1).result()
    manifest = verify_manifest(tmp_path / ref.path)
    assert manifest["file"] == "model.safetensors"
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in policy.adapter_tensors()
    with pytest.raises(ModelError, match="no base"):
        policy.canary((10,), (), (11,), "base")


@pytest.mark.usefixtures("one_rank")
def test_bfloat16_computation_keeps_float32_adapters(settings, rows, tokens) -> None:
    policy = Policy(replace(settings, dtype="bfloat16"))
    stats = policy.forward_backward([rows, rows], 2 * tokens.response)
    assert policy.optimizer_step(1e-3).skipped is None
    assert stats.tokens == 2 * tokens.response
    assert {tensor.dtype for tensor in policy.adapter_tensors().values()} == {torch.float32}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["Qwen3", "Gemma"])  # one that packs, one that does not
def test_text_models(settings, rows, tmp_path: Path, family: str, gradients) -> None:
    import transformers

    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    policy = Policy(replace(settings, model=str(tmp_path)))
    second = replace(rows[1], advantage=0.7)
    policy.forward_backward([[rows[1], second]], 8)
    together = gradients(policy)
    policy.discard_gradients()
    policy.forward_backward([[rows[1]], [second]], 8)
    assert close(gradients(policy), together) < 1e-5
    with pytest.raises(ModelError, match="text only"):
        policy.forward_backward([[rows[0]]], 8)


@pytest.mark.usefixtures("one_rank")
def test_other_image_text_models(settings, tmp_path: Path) -> None:
    """Qwen2.5-VL goes the general way: one sequence per forward, positions and pixels as the model takes them."""
    import transformers

    from argusrl.policy.selftest import sample_rows

    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    marks = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "patch_size": 16}, **marks)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    transformers.AutoProcessor.from_pretrained(settings.model).save_pretrained(tmp_path)
    policy = Policy(replace(settings, model=str(tmp_path)))
    several = sample_rows(policy._inputs, config)
    twice = replace(several[2], turns=(several[2].turns[1],) * 2, images=(several[2].images[1],) * 2)
    assert policy.forward_backward([[*several, twice]], 24).tokens == 24
    assert policy.optimizer_step(1e-3).skipped is None

    for row in several[:2]:
        batch = policy._inputs.pack([row])
        images = {**batch.image_inputs, "mm_token_type_ids": batch.token_types} if row.images else {}
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, **images).logits[0]
        expected = torch.log_softmax(logits[batch.sources], -1).gather(1, batch.targets[:, None])[:, 0]
        ours = policy.canary(row.turns[0].prompt_ids, row.images, row.turns[0].response_ids, "base")
        assert ours == pytest.approx(expected.tolist(), abs=1e-5)


def forwards(policy: Policy, work: Callable[[], Any]) -> int:
    """How often rows go through the language model."""
    calls: list[int] = []
    handle = decoder_of(policy._scorer.base).register_forward_hook(lambda *_: calls.append(1))
    work()
    handle.remove()
    return len(calls)


def test_only_kl_needs_another_pass(policy: Policy, rows, tokens, settings) -> None:
    assert forwards(policy, lambda: policy.forward_backward([rows, rows[:1]], tokens.response)) == 2
    once = policy.finish_step().tokens
    policy.discard_gradients()
    policy.settings = replace(settings, updates_per_step=4)
    assert forwards(policy, lambda: policy.forward_backward([rows, rows[:1]], tokens.response)) == 2
    policy.discard_gradients()
    policy.settings = replace(settings, kl_weight=0.1)
    assert forwards(policy, lambda: policy.forward_backward([rows, rows[:1]], tokens.response)) == 4
    work = policy.finish_step()
    assert work.tokens == 2 * once
    assert work.patches == work.unique_patches  # the tower ran for the first pass only


def test_kl_is_to_the_model_without_its_adapter(moved: Policy, rows, tokens, settings, gradients) -> None:
    without = moved.forward_backward([rows], tokens.response)
    plain = gradients(moved)
    moved.discard_gradients()
    assert without.kl == 0
    moved.settings = replace(settings, kl_weight=0.25)
    stats = moved.forward_backward([rows], tokens.response)
    assert stats.kl > 0
    assert stats.loss == pytest.approx(without.loss + 0.25 * stats.kl, rel=1e-5)
    assert close(gradients(moved), plain) > 1e-3
    batch = moved._pack(rows)
    with torch.no_grad():
        new, _ = moved._scorer(batch, 1.0, moved._banned)
        with without_adapter(moved._scorer):
            reference, _ = moved._scorer(batch, 1.0, moved._banned)
    distance = new - reference
    assert stats.kl == pytest.approx(((-distance).exp() - 1 + distance).mean().item(), rel=1e-4)


def test_no_tensor_has_the_logits_of_a_whole_row(policy: Policy, rows, monkeypatch) -> None:
    """Not forward, not backward, not with KL: the vocabulary meets a chunk of tokens at a time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocabulary, chunk = 96, 8
    seen: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if torch.is_tensor(one)]
            seen.extend(tuple(one.shape) for one in tensors if vocabulary in one.shape)
            return out

    monkeypatch.setattr("argusrl.policy.logprobs.CHUNK_TOKENS", chunk)
    policy.settings = replace(policy.settings, kl_weight=0.1)
    reply = replace(rows[1].turns[0], response_ids=tuple(range(10, 70)), logprobs=(-1.0,) * 60)
    with Shapes():
        policy.forward_backward([[replace(rows[1], turns=(reply,)), rows[1]]], 60)
    weights = {tuple(p.shape) for p in policy._scorer.parameters() if vocabulary in p.shape}
    found = [shape for shape in seen if shape not in weights and shape[::-1] not in weights]
    assert found  # chunks were seen
    assert max(torch.Size(shape).numel() for shape in found) == chunk * vocabulary
