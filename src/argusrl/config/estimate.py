"""Memory that training and serving will need, line by line, from a recipe and a model's config.json. No torch, no GPU.

Lines are bytes of tensors that torch or vLLM allocate. What is not in them: CUDA's context, NCCL's buffers, kernels'
workspaces, captured graphs, and what an allocator loses to fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from argusrl.config.bundles import cache_bytes_on
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config

LOGITS_CHUNK_TOKENS = 512  # tokens whose logits exist at the same time in training
KEPT_FEATURE_BYTES = 1 << 30  # of tower outputs that a rank keeps for later micro-batches, at most
ENGINE_BATCH_TOKENS = {"cpu": 4096, "cuda": 8192}  # that vLLM computes at once
LORA_HOST_SLOTS = 4  # adapter versions that an engine keeps beside the device

_FULL = 4  # bytes of float32
_ROTATING = {
    2: 40,
    4: 46,
}  # bytes per patch and unit of width while the tower rotates queries and keys, by element size
_LOGITS_COPIES = 4  # float32 copies of a chunk of logits at the worst moment
_GATHERED_LAYERS = 3  # of FSDP: the layer at work, the next one as it arrives, and the buffer it arrived in
_MOMENT_COPIES = 2  # temporaries of AdamW over all tensors at once
_SINGLE_COPIES = 3  # and over one tensor after the other, of the largest

Target = Literal["language"] | Sequence[str]
Attention = Literal["gathered", "varlen"]
"""How a rank attends: keys and values repeated per continuation and head, with a mask; or one flash call on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sizes of the row that one forward computes."""

    tokens: int  # in the row; a shared prompt counts once
    predicted_tokens: int
    key_tokens: int  # summed over prompts and continuations, what each attends to: its own tokens and its prefix
    mask_places: int = 0  # pairs of a query and a key that are behind a prefix, where plain causality does not do
    patches: int = 0  # of all different images in it

    @classmethod
    def of_groups(
        cls, groups: int, *, prompt_tokens: int, response_tokens: int, group_size: int, patches: int = 0
    ) -> MicroBatch:
        """So many groups, each of `group_size` replies behind one prompt with `patches` of images."""
        replies = group_size * response_tokens
        return cls(
            tokens=groups * (prompt_tokens + replies),
            predicted_tokens=groups * replies,
            key_tokens=groups * (prompt_tokens + group_size * (prompt_tokens + response_tokens)),
            mask_places=groups * replies * (prompt_tokens + response_tokens) if group_size > 1 else 0,
            patches=groups * patches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on the device of one rank. Lines up to `moments` stay for the run, the others come and go in a step."""

    base: int  # frozen weights, this rank's shards
    trained: int  # float32 weights that are trained, this rank's shards
    gradients: int
    moments: int  # Adam's two
    gathered: int  # whole layers and the root's weights, as FSDP gathers them
    batch: int  # token ids, positions, pixels
    features: int  # the tower's outputs
    activations: int  # kept by the forward for the backward
    layer: int  # the backward of one layer, with what it computes a second time
    head: int  # the end of the forward: last norm, picked hidden states, a chunk of logits
    tower: int  # the tower at work
    update: int  # temporaries of the optimizer

    @property
    def resident(self) -> int:
        """What a rank holds between steps; on the host while it has handed its GPU to the engine."""
        return self.base + self.trained + self.moments

    @property
    def phases(self) -> dict[str, int]:
        """The most that is allocated in the parts of a step; the forward of a layer needs less than its backward."""
        held = self.resident + self.gradients
        at_work = held + self.gathered + self.batch + self.features
        return {
            "tower": at_work + self.tower,
            "head": at_work + self.activations + self.head,
            "backward": at_work + self.activations + self.layer,
            "update": held + self.update,
        }

    @property
    def total(self) -> int:
        return max(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one engine process; with tensor parallelism, of one of its GPUs."""

    weights: int
    adapter_slots: int  # LoRA on the device
    encoder: int  # the tower at work on the images of one batch
    batch: int  # the decoder at work on the tokens of one batch, or the logits of all sequences
    cache: int  # KV cache: what is given, or what is left of the share of the device
    host_adapters: int
    host_pristine: int  # checkpoint pages that merged serving reads at each merge; mapped, one copy per node
    host_asleep: int  # weights while the engine sleeps and ranks have the device
    cache_token_bytes: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.adapter_slots + self.work + self.cache

    @property
    def work(self) -> int:
        """Tower and decoder work after each other."""
        return max(self.encoder, self.batch)

    @property
    def cache_tokens(self) -> int:
        return self.cache // self.cache_token_bytes


def training_memory(
    shape: ModelShape,
    micro_batch: MicroBatch,
    *,
    element_bytes: int,
    rank: int | None,
    target: Target = "language",
    ranks: int = 1,
    gradient_checkpointing: bool,
    attention: Attention = "gathered",
    kept_feature_bytes: int = 0,
    foreach: bool = True,
) -> TrainingMemory:
    """Of one rank in one update of one micro-batch after the other; with `foreach` Adam takes all tensors at once.

    `rank` is LoRA's (None: the whole decoder is trained); `kept_feature_bytes` are tower outputs that are kept for
    other micro-batches of the step.
    """
    whole = rank is None
    trained = shape.decoder_parameters if rank is None else shape.lora_parameters(rank, target)
    frozen = shape.parameters - shape.decoder_parameters if whole else shape.parameters
    share = -(-trained // ranks) * _FULL
    saved = _saved_per_layer(shape, micro_batch, element_bytes, 0 if rank is None else rank, target)
    saved += _saved_by_attention(shape, micro_batch, element_bytes, attention)
    state = micro_batch.tokens * shape.hidden  # numbers in what one layer hands to the next
    if gradient_checkpointing:
        kept = shape.layers * state * element_bytes
    else:
        kept = shape.layers * saved - (0 if whole else state * _FULL)  # nothing before the first layer is trained
    working = (2 * micro_batch.tokens * shape.feed_forward + state) * element_bytes
    return TrainingMemory(
        base=-(-frozen // ranks) * element_bytes,
        trained=share,
        gradients=share,
        moments=2 * share,
        gathered=_gathered(shape, element_bytes, rank, target, ranks),
        batch=_batch_bytes(shape, micro_batch),
        features=_feature_bytes(shape, micro_batch.patches, element_bytes) + kept_feature_bytes,
        activations=kept + 2 * micro_batch.tokens * shape.head_width * element_bytes,  # and rotary angles
        layer=working + (saved if gradient_checkpointing else 0),
        head=_head_bytes(shape, micro_batch, element_bytes),
        tower=_tower_bytes(shape, micro_batch.patches, element_bytes),
        update=_MOMENT_COPIES * share
        if foreach
        else _SINGLE_COPIES * min(share, _largest_trained(shape, rank, target) * _FULL),
    )


def engine_memory(
    shape: ModelShape,
    *,
    element_bytes: int,
    rank: int | None,
    target: Target = "language",
    merged: bool = False,
    live_versions: int = 1,
    tensor_parallel: int = 1,
    batch_tokens: int = 0,
    max_sequences: int = 0,
    cache_bytes: int | None = None,
    device_bytes: int | None = None,
    device_share: float = 1.0,
) -> EngineMemory:
    """Of one engine. `rank` is LoRA's (None: whole weights are loaded).

    At once it computes `batch_tokens`, which may all be of images, and samples for `max_sequences`.

    Kernels have a slot for each of `live_versions` of the adapter, and one for the next.
    The cache has `cache_bytes`, or what is left of `device_share` of the device; nothing where neither is known.
    """
    adapter = 0 if rank is None else shape.lora_parameters(rank, target) * element_bytes
    kernels = rank is not None and not merged
    weights = shape.parameters * element_bytes // tensor_parallel
    slots = (live_versions + 1) * adapter // tensor_parallel if kernels else 0
    patches = batch_tokens * shape.vision.merge**2 if shape.vision else 0
    encoder = _tower_bytes(shape, patches, element_bytes)
    batch = _batch_work(shape, batch_tokens, max_sequences, element_bytes) // tensor_parallel
    left = int((device_bytes or 0) * device_share) - weights - slots - max(encoder, batch)
    return EngineMemory(
        weights=weights,
        adapter_slots=slots,
        encoder=encoder,
        batch=batch,
        cache=max(0, left) if cache_bytes is None else cache_bytes,
        host_adapters=LORA_HOST_SLOTS * adapter if kernels else 0,
        host_pristine=_merged_weights(shape, target) * shape.stored_element_bytes if merged else 0,
        host_asleep=weights,
        cache_token_bytes=-(-shape.kv_bytes_per_token(element_bytes) // tensor_parallel),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a recipe needs per GPU (or CPU slot), with the sizes it was computed from."""

    micro_batch: MicroBatch
    training: TrainingMemory
    engine: EngineMemory
    device_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """Whether rank and engine, which take turns, each find room beside what the other leaves; None: unknown."""
        if self.device_bytes is None:
            return None
        return max(self.training.total, self.engine.total) <= self.device_bytes and self.engine.cache_tokens > 0

    def to_json(self) -> dict[str, Any]:
        training, engine = self.training, self.engine
        return {
            "micro_batch": asdict(self.micro_batch),
            "training": {**asdict(training), "phases": training.phases, "total": training.total},
            "engine": {**asdict(engine), "cache_tokens": engine.cache_tokens, "total": engine.total},
            "device_bytes": self.device_bytes,
            "fits": self.fits,
        }


def estimate(
    config: Config,
    shape: ModelShape,
    *,
    device: str,
    ranks: int,
    device_bytes: int | None = None,
    micro_batch: MicroBatch | None = None,
) -> Estimate:
    """Of a recipe on `ranks` GPUs or slots, for the fullest micro-batch that its budget lets through, or a given one.

    `device` is "cuda" or "cpu". The fullest is one group of the longest prompts and replies, or as many as the budget
    takes. Images are taken to fill the prompt as far as model.max_pixels lets them.
    """
    dtype = config.model.dtype_on(device)
    element = 2 if dtype == "bfloat16" else _FULL
    rank = config.adapter.rank if config.adapter.kind == "lora" else None
    target: Target = "language" if config.adapter.target == "language" else tuple(config.adapter.target)
    micro_batch = micro_batch or fullest_micro_batch(config, shape, ranks)
    checkpointing = config.training.gradient_checkpointing
    shown = -(-config.algorithm.prompts_per_step // ranks) * _feature_bytes(shape, micro_batch.patches, element)
    return Estimate(
        micro_batch=micro_batch,
        training=training_memory(
            shape,
            micro_batch,
            element_bytes=element,
            rank=rank,
            target=target,
            ranks=ranks,
            gradient_checkpointing=device == "cuda" if checkpointing is None else checkpointing,
            attention="varlen" if device == "cuda" and element != _FULL else "gathered",
            kept_feature_bytes=min(KEPT_FEATURE_BYTES, shown),
            foreach=device == "cuda",
        ),
        engine=engine_memory(
            shape,
            element_bytes=element,
            rank=rank,
            target=target,
            merged=config.serves_merged(dtype),
            live_versions=1 + config.rollout.staleness,
            tensor_parallel=config.engine.tensor_parallel,
            batch_tokens=max(ENGINE_BATCH_TOKENS[device], config.model.max_tokens if device == "cpu" else 0),
            max_sequences=config.engine.max_sequences,
            cache_bytes=cache_bytes_on(config.engine, device),
            device_bytes=device_bytes,
            device_share=config.engine.gpu_memory_share,
        ),
        device_bytes=device_bytes,
    )


def fullest_micro_batch(config: Config, shape: ModelShape, ranks: int = 1) -> MicroBatch:
    """The largest row that one of `ranks` may meet: the budget full of groups, its share of an update if that is less,
    or one trajectory that is longer than the budget.

    Every trajectory has the longest first prompt and the longest continuation. There is an image of model.max_pixels
    in each turn, or, where that is not set, as many patches as its tokens can stand for.
    """
    rollout, turns = config.rollout, config.environment.max_turns
    longest = config.model.max_tokens
    prompt = min(longest - rollout.max_response_tokens, rollout.max_prompt_tokens or longest)
    continuation = rollout.max_response_tokens if turns == 1 else longest - prompt
    budget = config.training.micro_batch_tokens
    members = max(1, min(config.algorithm.group_size, (budget - prompt) // continuation))
    share = -(-config.algorithm.prompts_per_step // (config.algorithm.updates_per_step * ranks))
    groups = max(1, min(share, budget // (prompt + members * continuation)))
    patches = 0
    if shape.vision is not None:
        most = shape.vision.merge**2 * (prompt + (members * continuation if turns > 1 else 0))
        images = 1 + members * (turns - 1)
        patches = most
        if config.model.max_pixels is not None:
            patches = min(most, images * shape.vision.patches(config.model.max_pixels))
    return MicroBatch.of_groups(
        groups, prompt_tokens=prompt, response_tokens=continuation, group_size=members, patches=patches
    )


def _largest_trained(shape: ModelShape, rank: int | None, target: Target) -> int:
    """Numbers in the largest tensor that is trained."""
    if rank is None:
        return shape.head_parameters
    names = shape.linear_layers if target == "language" else target
    return rank * max(max(shape.linear_layers[name]) for name in names if name in shape.linear_layers)


def _merged_weights(shape: ModelShape, target: Target) -> int:
    """Matrix elements of the layers an adapter is merged into; vLLM computes some of them as one."""
    fused = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    touched = [name for together in fused if target == "language" or set(together) & set(target) for name in together]
    return shape.layers * sum(inputs * outputs for inputs, outputs in map(shape.linear_layers.__getitem__, touched))


def _saved_per_layer(shape: ModelShape, batch: MicroBatch, element: int, rank: int, target: Target) -> int:
    """What one decoder layer keeps for its backward: what norms, gates and products with trained factors need."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    norms = 2 * (shape.hidden + 1) * _FULL  # their inputs, in float32, and a scale
    if shape.normed_heads:
        norms += (queries + keys + shape.heads + shape.kv_heads) * _FULL
    inputs = 2 * shape.hidden + queries + 4 * shape.feed_forward  # of the linear layers, and of the gate
    factors = rank * len(shape.linear_layers if target == "language" else target)
    return batch.tokens * (norms + (inputs + factors) * element)


def _saved_by_attention(shape: ModelShape, batch: MicroBatch, element: int, attention: Attention) -> int:
    """Queries and the result, a sum per query, keys and values as they are laid side by side, and the mask as numbers.

    With a mask keys and values are repeated for each head that reads them.
    """
    queries = 2 * shape.heads * shape.head_width * element + shape.heads * _FULL
    masked = attention == "gathered" and batch.mask_places > 0
    keys = 2 * (shape.heads if masked else shape.kv_heads) * shape.head_width * element
    return batch.tokens * queries + batch.key_tokens * keys + (batch.mask_places * element if masked else 0)


def _batch_work(shape: ModelShape, tokens: int, sequences: int, element: int) -> int:
    """The widest place of a decoder layer, and of the sampler: logits in float32, and two copies of them."""
    layer = tokens * (3 * shape.feed_forward + 4 * shape.hidden) * element
    return max(layer, 3 * sequences * shape.vocabulary * _FULL)


def _head_bytes(shape: ModelShape, batch: MicroBatch, element: int) -> int:
    """The last norm's input in float32, hidden states that predict and their slopes, and the logits of one chunk."""
    norm = batch.tokens * (shape.hidden + 1) * _FULL
    picked = 2 * batch.predicted_tokens * shape.hidden * element
    chunk = min(LOGITS_CHUNK_TOKENS, batch.predicted_tokens) * shape.vocabulary * _LOGITS_COPIES * _FULL
    return norm + picked + chunk


def _gathered(shape: ModelShape, element: int, rank: int | None, target: Target, ranks: int) -> int:
    """The root's weights for the whole step, and layers in turn. A single rank copies, and one layer at a time."""
    adapter = 0 if rank is None else shape.lora_layer_parameters(rank, target)
    layers = _GATHERED_LAYERS if ranks > 1 else 1
    return (shape.root_parameters + layers * (shape.layer_parameters + adapter)) * element


def _batch_bytes(shape: ModelShape, batch: MicroBatch) -> int:
    """Pixels in float32; ids, types and positions of a token, and where attention finds it."""
    pixels = batch.patches * shape.vision.patch_values if shape.vision else 0
    return pixels * _FULL + (8 * batch.tokens + batch.key_tokens + 3 * batch.predicted_tokens) * 8


def _feature_bytes(shape: ModelShape, patches: int, element: int) -> int:
    """One vector per image token for the embedding and for each DeepStack layer."""
    if shape.vision is None:
        return 0
    return shape.vision.tokens(patches) * (1 + shape.vision.deepstack) * shape.hidden * element


def _tower_bytes(shape: ModelShape, patches: int, element: int) -> int:
    """The tower without gradient: pixels in its type, and rotating queries and keys, or the feed-forward if wider."""
    if shape.vision is None:
        return 0
    pixels = shape.vision.patch_values * element if element != _FULL else 0
    rotating = _ROTATING[element] * shape.vision.hidden
    widened = 2 * element * (shape.vision.feed_forward + shape.vision.hidden)
    return patches * (pixels + max(rotating, widened))
