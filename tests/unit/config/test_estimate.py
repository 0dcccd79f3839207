from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sound_recipes import sound

from argusrl.config.estimate import (
    KEPT_FEATURE_BYTES,
    LOGITS_CHUNK_TOKENS,
    MicroBatch,
    TrainingMemory,
    engine_memory,
    estimate,
    training_memory,
)
from argusrl.config.model_shape import ModelShape
from fakes.benchmark import load_benchmark
from fakes.live_bytes import LiveBytes, saved_bytes

GPU = load_benchmark("gpu_training")
EIGHT_BILLION = ModelShape.from_json({**GPU.QWEN3_VL_8B, "model_type": "qwen3_vl", "dtype": "bfloat16"})
RANK = 4


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from argusrl.policy import group

    store = group.host_store()
    group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="estimate")
    yield
    group.disconnect()


@dataclass(frozen=True)
class Counted:
    """What one forward and backward held, apart from what a rank always holds."""

    shape: ModelShape
    micro_batch: MicroBatch
    kept: int  # between forward and backward
    forward: int
    backward: int


def count(folder: Path, dtype: str, checkpointing: bool, load: Any, **text: int) -> Counted:
    """Run a group on a small model, sharded as a rank has it, and count tensors."""
    from argusrl.policy.inputs import InputBuilder
    from argusrl.policy.settings import PolicySettings

    config = copy.deepcopy(GPU.SMALL)
    config["text_config"] |= text
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    GPU.write_folder(folder, config)
    settings = PolicySettings(
        model=str(folder), device="cpu", dtype=dtype, rank=RANK, alpha=8.0, gradient_checkpointing=checkpointing,
        min_pixels=1024, max_pixels=1 << 20,
    )  # fmt: skip
    scorer, _watch = GPU.random_model(settings)
    builder = InputBuilder(scorer.base, settings)
    rows = [row for rows in GPU.make_groups(builder, scorer.base.config, load, shared=True) for row in rows]
    counted = LiveBytes()
    with counted:
        batch = builder.pack(rows)
        logprobs, _entropies = scorer(batch, 1.0, torch.tensor([0, 3]))
        forward, kept = counted.peak, counted.now
        counted.peak = counted.now
        logprobs.sum().backward()
    micro_batch = MicroBatch.of_groups(
        load.prompts,
        prompt_tokens=len(rows[0].turns[0].prompt_ids),
        response_tokens=load.response_tokens,
        group_size=load.group_size,
        patches=(load.image_side // 16) ** 2,
    )
    assert batch.input_ids.shape[1] == micro_batch.tokens
    assert len(batch.sources) == micro_batch.predicted_tokens
    return Counted(ModelShape.read(folder), micro_batch, kept, forward, counted.peak)


WIDE = {"num_hidden_layers": 4, "intermediate_size": 768, "hidden_size": 128, "vocab_size": 2048}
LOAD = GPU.Load(prompts=2, group_size=4, text_tokens=40, response_tokens=64, image_side=128)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("load", "text"),
    [
        (LOAD, WIDE),
        (replace(LOAD, image_side=256, group_size=2), {**WIDE, "num_attention_heads": 16, "num_hidden_layers": 2}),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_training_needs_what_it_says(
    tmp_path: Path, dtype: str, checkpointing: bool, load: Any, text: dict[str, int]
) -> None:
    counted = count(tmp_path, dtype, checkpointing, load, **text)
    memory = training_memory(
        counted.shape,
        counted.micro_batch,
        element_bytes=4 if dtype == "float32" else 2,
        rank=RANK,
        gradient_checkpointing=checkpointing,
    )
    phases = {name: size - memory.resident for name, size in memory.phases.items()}
    assert phases["backward"] == pytest.approx(counted.backward, rel=0.1)
    head = phases["head"] - memory.gradients
    assert max(head, phases["tower"] - memory.gradients) == pytest.approx(counted.forward, rel=0.1)
    if not checkpointing:
        norm = counted.micro_batch.tokens * counted.shape.hidden * 4
        slopes = counted.micro_batch.predicted_tokens * counted.shape.hidden * (4 if dtype == "float32" else 2)
        kept = memory.activations + memory.features + memory.batch + norm + slopes
        assert kept == pytest.approx(counted.kept, rel=0.1)


def test_autograd_saves_what_it_says(tmp_path: Path) -> None:
    from argusrl.policy.inputs import InputBuilder
    from argusrl.policy.lora import add_lora
    from argusrl.policy.model import load_model
    from argusrl.policy.scorer import Scorer
    from argusrl.policy.settings import PolicySettings

    GPU.write_folder(tmp_path, GPU.SMALL)
    settings = PolicySettings(model=str(tmp_path), device="cpu", dtype="float32", rank=RANK, alpha=8.0)
    base = load_model(settings, reader=False)
    scorer, builder = Scorer(add_lora(base, settings), base).to_empty(device="cpu"), InputBuilder(base, settings)
    for tensor in (*scorer.parameters(), *scorer.buffers()):
        torch.nn.init.constant_(tensor, 0.01)
    rows = GPU.make_groups(builder, base.config, replace(LOAD, prompts=1), shared=True)[0]
    batch = builder.pack(rows)
    with saved_bytes([*scorer.parameters(), *scorer.buffers()]) as saved:
        scorer(batch, 1.0, torch.tensor([0, 3]))
    shape = ModelShape.read(tmp_path)
    prompt, reply = len(rows[0].turns[0].prompt_ids), LOAD.response_tokens
    group = MicroBatch.of_groups(1, prompt_tokens=prompt, response_tokens=reply, group_size=LOAD.group_size)
    memory = training_memory(shape, group, element_bytes=4, rank=RANK, gradient_checkpointing=False)
    norm_and_slopes = 4 * shape.hidden * (group.tokens + group.predicted_tokens)
    assert memory.activations + norm_and_slopes == pytest.approx(saved.total, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_exist_in_chunks(dtype: torch.dtype) -> None:
    from argusrl.policy.logprobs import CHUNK_TOKENS, token_logprobs
    from argusrl.policy.step_work import FEATURE_BYTES

    vocabulary, hidden, tokens = 4096, 16, 2 * CHUNK_TOKENS + 7
    rows, head = torch.randn(tokens, hidden, dtype=dtype).requires_grad_(), torch.randn(vocabulary, hidden, dtype=dtype)
    counted = LiveBytes()
    with counted:
        token_logprobs(rows, head, None, torch.zeros(tokens).long(), temperature=1.0, banned=torch.tensor([1]))
    shape = replace(ModelShape.from_json({**GPU.SMALL, "model_type": "qwen3_vl"}), vocabulary=vocabulary, hidden=hidden)
    batch = MicroBatch(tokens=tokens, predicted_tokens=tokens, key_tokens=tokens)
    memory = training_memory(shape, batch, element_bytes=dtype.itemsize, rank=RANK, gradient_checkpointing=True)
    assert (LOGITS_CHUNK_TOKENS, KEPT_FEATURE_BYTES) == (CHUNK_TOKENS, FEATURE_BYTES)
    assert memory.head == pytest.approx(counted.peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tower_needs_what_it_says(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = copy.deepcopy(GPU.SMALL)
    config["vision_config"] |= {"hidden_size": 128, "intermediate_size": 480, "num_heads": 4}
    settings = Qwen3VLConfig(**config)
    shape, inner = ModelShape.from_json(settings.to_dict()), Qwen3VLForConditionalGeneration(settings).to(dtype).model
    assert shape.vision is not None
    grid = torch.tensor([[1, 16, 16], [1, 8, 16]])
    patches = int(grid.prod(-1).sum())
    counted = LiveBytes()
    pixels = torch.randn(patches, shape.vision.patch_values)
    with torch.no_grad(), counted:
        outputs = inner.get_image_features(pixels, grid)
    memory = training_memory(
        shape,
        MicroBatch(tokens=1, predicted_tokens=1, key_tokens=1, patches=patches),
        element_bytes=dtype.itemsize,
        rank=RANK,
        gradient_checkpointing=True,
    )
    assert outputs.deepstack_features
    assert memory.tower == pytest.approx(counted.peak, rel=0.1)
    features = [outputs.pooler_output, *outputs.deepstack_features]
    assert memory.features == sum(piece.nbytes for layer in features for piece in layer)


def eight_billion(**choices: Any) -> TrainingMemory:
    group = MicroBatch.of_groups(1, prompt_tokens=1200, response_tokens=512, group_size=8, patches=4096)
    values = {"element_bytes": 2, "rank": 32, "gradient_checkpointing": True, **choices}
    return training_memory(EIGHT_BILLION, group, **values)


def test_ranks_share_what_is_sharded() -> None:
    alone, together = eight_billion(), eight_billion(ranks=8)
    assert alone.base == 2 * 8_767_123_696
    assert alone.moments == 2 * 4 * 87_293_952
    for line in ("base", "trained", "gradients", "moments", "update"):
        assert getattr(together, line) == pytest.approx(getattr(alone, line) / 8, rel=1e-6)
    for line in ("activations", "layer", "head", "tower", "batch", "features"):
        assert getattr(together, line) == getattr(alone, line)


def test_checkpointing_trades_activations_for_one_layer() -> None:
    without, with_it = eight_billion(gradient_checkpointing=False), eight_billion()
    assert with_it.total < without.total
    assert with_it.activations < 0.05 * without.activations
    assert with_it.layer > without.layer


def test_whole_training_keeps_weights_and_moments_of_the_decoder_in_float32() -> None:
    memory = eight_billion(rank=None)
    assert EIGHT_BILLION.vision is not None
    assert memory.base == 2 * EIGHT_BILLION.vision.parameters
    assert memory.trained == memory.gradients == 4 * EIGHT_BILLION.decoder_parameters
    assert memory.moments == 8 * EIGHT_BILLION.decoder_parameters


def test_sharing_a_prompt_saves_its_copies() -> None:
    group = MicroBatch.of_groups(1, prompt_tokens=1200, response_tokens=512, group_size=8, patches=4096)
    apart = MicroBatch.of_groups(8, prompt_tokens=1200, response_tokens=512, group_size=1, patches=4096)
    assert group.tokens == 1200 + 8 * 512
    assert apart.tokens == 8 * (1200 + 512)
    assert group.key_tokens == 1200 + 8 * (1200 + 512)
    assert apart.patches == 8 * group.patches


def test_an_engine_fills_its_share_with_cache() -> None:
    kernels = engine_memory(EIGHT_BILLION, element_bytes=2, rank=32, device_bytes=141 << 30, device_share=0.5)
    assert kernels.weights == 2 * 8_767_123_696
    assert kernels.adapter_slots == 2 * 2 * 87_293_952  # the one that is served, and the next
    assert kernels.total == (141 << 30) // 2
    assert kernels.cache_tokens == kernels.cache // (144 << 10)
    assert kernels.host_pristine == 0
    merged = engine_memory(EIGHT_BILLION, element_bytes=2, rank=32, merged=True, cache_bytes=1 << 30)
    assert merged.adapter_slots == merged.host_adapters == 0
    assert merged.host_pristine == 2 * 6_945_767_424
    assert merged.cache == 1 << 30
    queries = engine_memory(EIGHT_BILLION, element_bytes=2, rank=32, merged=True, target=("q_proj",))
    assert queries.host_pristine == 2 * 36 * 4096 * (4096 + 1024 + 1024)  # q, k and v are one layer there
    halves = engine_memory(EIGHT_BILLION, element_bytes=2, rank=32, tensor_parallel=2)
    assert halves.weights == kernels.weights // 2
    assert halves.cache_token_bytes == 72 << 10


def recipe(**sections: Any) -> Any:
    training = {"micro_batch_tokens": 16_384, **sections.pop("training", {})}
    model = {"path": "some/model", "max_tokens": 4096, "max_pixels": 1 << 20, **sections.pop("model", {})}
    rollout = {"max_response_tokens": 512, "max_prompt_tokens": 1200, **sections.pop("rollout", {})}
    return sound(model=model, training=training, rollout=rollout, **sections)


def test_a_recipe_is_estimated_at_its_fullest_micro_batch() -> None:
    found = estimate(recipe(), EIGHT_BILLION, device="cuda", ranks=8, device_bytes=141 << 30)
    assert found.micro_batch == MicroBatch.of_groups(
        3, prompt_tokens=1200, response_tokens=512, group_size=8, patches=4096
    )
    assert found.micro_batch.tokens <= 16_384
    assert found.training.activations < 16_384 * 4096 * 2 * 40  # gradients are checkpointed on a GPU
    assert found.fits is True
    small = estimate(recipe(), EIGHT_BILLION, device="cuda", ranks=8, device_bytes=16 << 30)
    assert small.fits is False
    assert estimate(recipe(), EIGHT_BILLION, device="cuda", ranks=8).fits is None


def test_on_a_cpu_an_engine_merges_and_has_a_cache_of_its_own() -> None:
    found = estimate(recipe(), EIGHT_BILLION, device="cpu", ranks=1)
    assert found.engine.host_pristine == 2 * 6_945_767_424  # pages of the checkpoint, which is bfloat16
    assert found.engine.cache == 1 << 30


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_slots_of_kernels_are_those_that_vllm_is_given(staleness: int) -> None:
    from argusrl.rollout.engine import EngineSettings
    from argusrl.rollout.vllm_arguments import engine_arguments

    apart = recipe(rollout={"staleness": staleness}, cluster={"colocate": False, "slots": 2, "engines": 1})
    found = estimate(apart, EIGHT_BILLION, device="cuda", ranks=1)
    options = {
        "model": "some/model", "dtype": "bfloat16", "device": "cuda", "max_tokens": 64, "max_images": 1, "lora_rank": 8,
        "lora_alpha": 8.0, "banned_ids": (), "end_ids": (), "cache_bytes": None, "gpu_memory_share": 0.5,
        "max_sequences": 8, "eager": True, "tensor_parallel": 1, "live_versions": 1 + staleness,
    }  # fmt: skip
    arguments = engine_arguments(EngineSettings(**options))
    adapter = found.engine.adapter_slots // arguments["max_loras"]
    assert adapter == 2 * 87_293_952
    assert found.engine.host_adapters == arguments["max_cpu_loras"] * adapter


def test_a_trajectory_longer_than_the_budget_is_a_micro_batch() -> None:
    found = estimate(recipe(training={"micro_batch_tokens": 1000}), EIGHT_BILLION, device="cuda", ranks=1)
    assert found.micro_batch.tokens == 1200 + 512


def test_turns_fill_the_rest_of_a_sequence_and_bring_images() -> None:
    turns = recipe(environment={"max_turns": 3}, algorithm={"group_size": 4})
    found = estimate(turns, EIGHT_BILLION, device="cuda", ranks=1)
    assert found.micro_batch.tokens == 1200 + 4 * (4096 - 1200)
    assert found.micro_batch.patches == (1 + 4 * 2) * 4096


def test_json_has_every_line_in_bytes() -> None:
    found = estimate(recipe(), EIGHT_BILLION, device="cuda", ranks=8, device_bytes=80 << 30).to_json()
    assert found["training"]["total"] == max(found["training"]["phases"].values())
    assert found["engine"]["cache_tokens"] > 0
    assert found["micro_batch"]["tokens"] > 0
