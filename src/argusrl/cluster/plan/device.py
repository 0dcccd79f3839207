"""Memory of a GPU (on CPU: of a slot) in every phase of a step, from the estimate of rank and engine."""

from __future__ import annotations

from dataclasses import dataclass

from argusrl.cluster.plan.assumptions import Assumptions
from argusrl.cluster.plan.lines import ALWAYS, TRAINING, Line, Table
from argusrl.cluster.plan.machine import Machine
from argusrl.cluster.plan.workload import Workload, typical_micro_batch
from argusrl.config.bundles import split
from argusrl.config.estimate import Estimate, estimate
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config

ENGINE_PHASES = ("rollout", "checkpoint")
_WORK = ("tower", "head", "backward")
_RANK_AWAKE = ("hand-over", *TRAINING, "publication")
_ENGINE_AWAKE = ("rollout", "loading", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything the tables are made from."""

    config: Config
    shape: ModelShape
    machine: Machine
    assumed: Assumptions
    slots: int
    ranks: int
    engines: int
    estimate: Estimate

    @property
    def cuda(self) -> bool:
        return self.machine.device == "cuda"

    @property
    def moves(self) -> bool:
        """Rank and engine hand the GPU's memory to each other."""
        return self.cuda and self.config.cluster.colocate

    @property
    def element_bytes(self) -> int:
        return 2 if self.config.model.dtype_on(self.machine.device) == "bfloat16" else 4

    @property
    def merged(self) -> bool:
        return self.config.serves_merged(self.config.model.dtype_on(self.machine.device))

    @property
    def eager(self) -> bool:
        return not self.cuda if self.config.engine.eager is None else self.config.engine.eager

    @property
    def checkpointing(self) -> bool:
        wanted = self.config.training.gradient_checkpointing
        return self.cuda if wanted is None else wanted

    @property
    def trained_parameters(self) -> int:
        """Of the whole adapter, or of the decoder in full-parameter training."""
        adapter = self.config.adapter
        if adapter.kind == "full":
            return self.shape.decoder_parameters
        target = "language" if adapter.target == "language" else tuple(adapter.target)
        return self.shape.lora_parameters(adapter.rank, target)

    @property
    def published_bytes(self) -> int:
        """Of one adapter version: LoRA in float32, whole weights in the type of computation."""
        return self.trained_parameters * (self.element_bytes if self.config.adapter.kind == "full" else 4)


def setting_of(
    config: Config, shape: ModelShape, machine: Machine, assumed: Assumptions, average: Workload | None = None
) -> Setting:
    """With cluster.slots, or all that the machine has; for the fullest micro-batch, or that of an average workload."""
    slots = config.cluster.slots or machine.slots
    ranks, engines = (max(1, count) for count in split(config.cluster, slots))
    micro_batch = None
    if average is not None:
        share = -(-average.groups // (config.algorithm.updates_per_step * ranks))
        micro_batch = typical_micro_batch(average, config.training.micro_batch_tokens, share)
    usable = None if machine.gpu_bytes is None else int(machine.gpu_bytes * (1 - assumed.gpu_reserved_share))
    found = estimate(config, shape, device=machine.device, ranks=ranks, device_bytes=usable, micro_batch=micro_batch)
    return Setting(
        config=config,
        shape=shape,
        machine=machine,
        assumed=assumed,
        slots=slots,
        ranks=ranks,
        engines=engines,
        estimate=found,
    )


def device_tables(setting: Setting) -> list[Table]:
    """One table where rank and engine share a GPU, else one for each."""
    device = "GPU" if setting.cuda else "slot"
    capacity = setting.machine.gpu_bytes
    rank, engine = rank_lines(setting), engine_lines(setting)
    if setting.config.cluster.colocate:
        lines = [*_reserve_lines(setting, rank=True, engine=True), *rank, *engine]
        return [Table(title=f"{device} with rank and engine", lines=lines, capacity=capacity, count=setting.slots)]
    return [
        Table(
            title=f"{device} of a rank",
            lines=[*_reserve_lines(setting, rank=True), *rank],
            capacity=capacity,
            count=setting.ranks,
        ),
        Table(
            title=f"{device} of an engine",
            lines=[*_reserve_lines(setting, engine=True), *engine],
            capacity=capacity,
            count=setting.engines,
        ),
    ]


def rank_lines(setting: Setting) -> list[Line]:
    """Of one rank."""
    lines = [*_shard_lines(setting), *_work_lines(setting)]
    if setting.cuda:
        share, most = setting.assumed.fragmentation_share, setting.estimate.training.total
        lines.append(
            Line(
                name="lost between blocks",
                size=int(share * most),
                phases=TRAINING,
                formula="fragmentation_share · largest phase of the rank",
                inputs={"fragmentation_share": share, "largest_phase": most},
            )
        )
    return lines


def _shard_lines(setting: Setting) -> list[Line]:
    """What ranks share among them."""
    memory, element, ranks = setting.estimate.training, setting.element_bytes, setting.ranks
    awake = _RANK_AWAKE if setting.moves else ALWAYS
    shard = {"trained_parameters": setting.trained_parameters, "ranks": ranks}
    frozen = memory.base * ranks // element
    return [
        Line(
            name="base weights",
            size=memory.base,
            phases=awake,
            formula="frozen_parameters / ranks · element_bytes",
            inputs={"frozen_parameters": frozen, "ranks": ranks, "element_bytes": element},
        ),
        Line(
            name="adapter",
            size=memory.trained,
            phases=awake,
            formula="trained_parameters / ranks · 4",
            inputs=shard,
        ),
        Line(
            name="optimizer",
            size=memory.moments,
            phases=awake,
            formula="2 · trained_parameters / ranks · 4",
            inputs=shard,
        ),
        Line(
            name="gradients",
            size=memory.gradients,
            phases=TRAINING,
            formula="trained_parameters / ranks · 4",
            inputs=shard,
        ),
        Line(
            name="optimizer's temporaries",
            size=memory.update,
            phases=("update",),
            formula="2 · 4 · trained_parameters / ranks on a GPU, which takes all tensors at once; else the largest",
            inputs=shard,
        ),
    ]


def _work_lines(setting: Setting) -> list[Line]:
    """What one micro-batch needs."""
    memory, batch = setting.estimate.training, setting.estimate.micro_batch
    shape, element, ranks = setting.shape, setting.element_bytes, setting.ranks
    sizes = {"tokens": batch.tokens, "predicted_tokens": batch.predicted_tokens, "patches": batch.patches}
    layers = {**sizes, "layers": shape.layers, "hidden": shape.hidden, "element_bytes": element}
    return [
        Line(
            name="gathered layers",
            size=memory.gathered,
            phases=(*_WORK, "publication"),
            formula="(root_parameters + layers_at_once · layer_parameters) · element_bytes",
            inputs={
                "root_parameters": shape.root_parameters,
                "layers_at_once": 3 if ranks > 1 else 1,
                "layer_parameters": shape.layer_parameters,
                "element_bytes": element,
            },
        ),
        Line(
            name="micro-batch",
            size=memory.batch,
            phases=_WORK,
            formula="patches · patch_values · 4 + (8 tokens + key_tokens + 3 predicted_tokens) · 8",
            inputs={
                **sizes,
                "key_tokens": batch.key_tokens,
                "patch_values": shape.vision.patch_values if shape.vision else 0,
            },
        ),
        Line(
            name="image features",
            size=memory.features,
            phases=_WORK,
            formula="image_tokens · (1 + deepstack) · hidden · element_bytes, and those kept for other micro-batches",
            inputs={
                **layers,
                "image_tokens": shape.vision.tokens(batch.patches) if shape.vision else 0,
                "deepstack": shape.vision.deepstack if shape.vision else 0,
            },
        ),
        Line(
            name="vision tower at work",
            size=memory.tower,
            phases=("tower",),
            formula="patches · what rotating queries and keys, or the feed-forward, take",
            inputs={**sizes, "vision_hidden": shape.vision.hidden if shape.vision else 0},
        ),
        Line(
            name="activations",
            size=memory.activations,
            phases=("head", "backward"),
            formula="layers · tokens · hidden · element_bytes with gradient checkpointing, else all that layers keep",
            inputs={**layers, "gradient_checkpointing": int(setting.checkpointing)},
        ),
        Line(
            name="logits chunk",
            size=memory.head,
            phases=("head",),
            formula="512 tokens · vocabulary · 4 copies · 4, last norm and picked states",
            inputs={**layers, "vocabulary": shape.vocabulary},
        ),
        Line(
            name="backward of a layer",
            size=memory.layer,
            phases=("backward",),
            formula="(2 feed_forward + hidden) · tokens · element_bytes, and with checkpointing what the layer keeps",
            inputs={**layers, "feed_forward": shape.feed_forward},
        ),
    ]


def engine_lines(setting: Setting) -> list[Line]:
    """Of one engine; with tensor parallelism, of one of its GPUs."""
    memory, shape, element = setting.estimate.engine, setting.shape, setting.element_bytes
    engine = setting.config.engine
    awake = _ENGINE_AWAKE if setting.moves else ALWAYS
    sampling = ENGINE_PHASES if setting.moves else ALWAYS
    share = {"gpu_memory_share": engine.gpu_memory_share, "device_bytes": setting.estimate.device_bytes or 0}
    lines = [
        Line(
            name="engine weights",
            size=memory.weights,
            phases=awake,
            formula="parameters · element_bytes / tensor_parallel",
            inputs={
                "parameters": shape.parameters,
                "element_bytes": element,
                "tensor_parallel": engine.tensor_parallel,
            },
        ),
        Line(
            name="adapter slots",
            size=memory.adapter_slots,
            phases=awake,
            formula="(live_versions + 1) · trained_parameters · element_bytes / tensor_parallel; 0 where merged",
            inputs={
                "live_versions": 1 + setting.config.rollout.staleness,
                "trained_parameters": setting.trained_parameters,
                "merged": int(setting.merged),
            },
        ),
        Line(
            name="engine at work",
            size=memory.work,
            phases=("rollout", "checkpoint") if setting.cuda else ("rollout",),
            formula="the larger of tower and decoder on one batch of tokens, and of the sequences' logits",
            inputs={"tower": memory.encoder, "decoder": memory.batch, "max_sequences": engine.max_sequences},
        ),
        Line(
            name="KV cache",
            size=memory.cache,
            phases=sampling,
            formula="engine.cache_bytes, or what gpu_memory_share · device leaves",
            inputs={**share, "token_bytes": memory.cache_token_bytes, "tokens": memory.cache_tokens},
        ),
    ]
    if setting.merged:
        lines.append(
            Line(
                name="merge of a layer",
                size=_merge_bytes(shape, element),
                phases=("loading",),
                formula="largest matrix · (3 · 4 + 2 · element_bytes)",
                inputs={"largest_matrix": _largest_matrix(shape), "element_bytes": element},
            )
        )
    return lines


def _reserve_lines(setting: Setting, *, rank: bool = False, engine: bool = False) -> list[Line]:
    """What neither torch nor vLLM counts of those that are on the GPU; on a CPU nothing."""
    machine, assumed = setting.machine, setting.assumed
    if not setting.cuda:
        return []
    processes = int(rank) + int(engine)
    lines = [
        Line(
            name="CUDA contexts",
            size=int(processes * (assumed.cuda_context_bytes + assumed.workspace_bytes)),
            phases=ALWAYS,
            formula="processes · (cuda_context_bytes + workspace_bytes)",
            inputs={
                "processes": processes,
                "cuda_context_bytes": assumed.cuda_context_bytes,
                "workspace_bytes": assumed.workspace_bytes,
            },
        )
    ]
    if machine.gpu_bytes is not None:
        lines.append(
            Line(
                name="driver's reserve",
                size=int(machine.gpu_bytes * assumed.gpu_reserved_share),
                phases=ALWAYS,
                formula="gpu_bytes · gpu_reserved_share",
                inputs={"gpu_bytes": machine.gpu_bytes, "gpu_reserved_share": assumed.gpu_reserved_share},
            )
        )
    if (rank and setting.ranks > 1) or (engine and setting.config.engine.tensor_parallel > 1):
        lines.append(
            Line(
                name="NCCL buffers",
                size=int(assumed.nccl_bytes),
                phases=ALWAYS,
                formula="nccl_bytes",
                inputs={"nccl_bytes": assumed.nccl_bytes},
            )
        )
    if engine and not setting.eager:
        lines.append(
            Line(
                name="captured graphs",
                size=int(assumed.graph_bytes),
                phases=ALWAYS,
                formula="graph_bytes",
                inputs={"graph_bytes": assumed.graph_bytes},
            )
        )
    return lines


def _largest_matrix(shape: ModelShape) -> int:
    return max(inputs * outputs for inputs, outputs in shape.linear_layers.values())


def _merge_bytes(shape: ModelShape, element: int) -> int:
    """W in float32, B A, their sum; the part as it came and the layer that is put together."""
    return _largest_matrix(shape) * (3 * 4 + 2 * element)
