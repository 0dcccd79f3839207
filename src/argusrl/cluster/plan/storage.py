"""Bytes, reads and metadata operations on the shared file system, per step and per run, with retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argusrl.cluster.plan.device import Setting
from argusrl.cluster.plan.workload import Workload

# Bytes in a record, as MessagePack writes them.
_TOKEN_BYTES = 5  # ids of a vocabulary beyond 65,535
_SAMPLED_BYTES = 5 + 9  # id and log-probability
_RECORD_BYTES = 600  # keys, rewards, answer, one reply as text is on top
_TEXT_TOKEN_BYTES = 4
_COMMITTED_TRAJECTORY_BYTES = 150
_COMMIT_BYTES = 6000
_LINES_BYTES = 4000  # metrics, events, phases, TensorBoard
# Operations on names (open, link, rename, unlink, mkdir, stat) of one thing, counted with strace.
_PUBLISHED_FILE_OPERATIONS = 5
_PUBLISHED_FOLDER_OPERATIONS = 23  # two files and a manifest
_SEGMENT_OPERATIONS = 8
_READ_OPERATIONS = 5  # of a record
_STEP_OPERATIONS = 40  # epochs looked at, free space, metrics, collection
_HEARTBEATS_PER_SECOND = 0.5
_LOG_BYTES_PER_STEP = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One kind of file. Per step; `kept` is what lies there at the end of the run."""

    name: str
    written: float  # bytes
    read: float  # bytes
    operations: float
    kept: float  # bytes
    formula: str
    inputs: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "written_bytes_per_step": round(self.written),
            "read_bytes_per_step": round(self.read),
            "operations_per_step": round(self.operations, 1),
            "kept_bytes": round(self.kept),
            "formula": self.formula,
            "inputs": dict(self.inputs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """All items, and what is read once at each start."""

    items: Sequence[Item]
    start_read: int  # bytes: base weights, once per node
    steps: int
    throughput: float  # bytes per second that this run gets
    capacity: int | None  # bytes
    metadata_iops: int | None

    def _sum(self, what: str) -> float:
        return float(sum(getattr(item, what) for item in self.items))

    @property
    def written(self) -> float:
        return self._sum("written")

    @property
    def read(self) -> float:
        return self._sum("read")

    @property
    def operations(self) -> float:
        return self._sum("operations")

    @property
    def kept(self) -> float:
        return self._sum("kept")

    def item(self, name: str) -> Item:
        return next(item for item in self.items if item.name == name)

    def seconds(self, size: float) -> float:
        """Until so many bytes are there."""
        return size / self.throughput

    def to_json(self) -> dict[str, Any]:
        return {
            "items": [item.to_json() for item in self.items],
            "per_step": {
                "written_bytes": round(self.written),
                "read_bytes": round(self.read),
                "operations": round(self.operations, 1),
            },
            "per_run": {
                "written_bytes": round(self.written * self.steps),
                "read_bytes": round(self.read * self.steps + self.start_read),
                "operations": round(self.operations * self.steps),
                "kept_bytes": round(self.kept),
            },
            "start_read_bytes": self.start_read,
            "throughput_bytes_per_second": self.throughput,
            "capacity_bytes": self.capacity,
            "metadata_iops": self.metadata_iops,
        }


def storage_plan(setting: Setting, workload: Workload) -> StoragePlan:
    """Of the recipe's run."""
    machine, assumed, checkpoint = setting.machine, setting.assumed, setting.config.checkpoint
    steps = setting.config.algorithm.num_steps
    throughput = machine.storage.throughput
    if throughput is None:
        throughput = assumed.local_storage_bytes_per_second
    else:
        throughput *= assumed.storage_share
    # Steps whose trajectories stay: all, or those from the oldest kept checkpoint on.
    open_steps = min(steps, checkpoint.keep * checkpoint.every_steps + 1)
    kept_steps = steps if checkpoint.keep_trajectories else open_steps
    items = (
        _trajectories(setting, workload, kept_steps),
        _images(setting, workload, kept_steps),
        _adapter(setting, max(open_steps, checkpoint.keep_adapters) + 1),
        _checkpoint(setting),
        _commit(workload, steps),
    )
    return StoragePlan(
        items=items,
        start_read=setting.shape.parameters * setting.element_bytes * machine.nodes,
        steps=steps,
        throughput=throughput,
        capacity=machine.storage.capacity,
        metadata_iops=machine.storage.metadata_iops,
    )


def _trajectories(setting: Setting, workload: Workload, kept_steps: int) -> Item:
    """`started`, the turns of a longer episode, the reply as it grows, and the whole when it is finished."""
    config = setting.config
    count, turns = workload.trajectories, workload.turns
    sampled = turns * workload.response_tokens
    prompt = workload.first_prompt_tokens + (turns - 1) * workload.later_prompt_tokens
    finished = _RECORD_BYTES + prompt * _TOKEN_BYTES + sampled * (_SAMPLED_BYTES + _TEXT_TOKEN_BYTES)
    again = sampled * _SAMPLED_BYTES  # partial records
    if turns > 1:
        again += prompt * _TOKEN_BYTES + sampled * _SAMPLED_BYTES + turns * _RECORD_BYTES
    written = count * (finished + again + _RECORD_BYTES)
    writers = config.cluster.episode_workers
    return Item(
        name="trajectories",
        written=written,
        read=count * finished,
        operations=writers * _SEGMENT_OPERATIONS + count * _READ_OPERATIONS,
        kept=written * kept_steps,
        formula="trajectories · (prompt tokens · 5 + sampled tokens · 18 + records, twice as turns and as partials)",
        inputs={
            "trajectories": count,
            "prompt_tokens": prompt,
            "sampled_tokens": sampled,
            "turns": turns,
            "episode_workers": writers,
            "kept_steps": kept_steps,
        },
    )


def _images(setting: Setting, workload: Workload, kept_steps: int) -> Item:
    """Each once per writer; a group is played by one writer. Ranks read those of their rows."""
    written = workload.step_images * workload.image_bytes
    writers = setting.config.cluster.episode_workers if written else 0
    return Item(
        name="images",
        written=written,
        read=written,
        operations=writers * _SEGMENT_OPERATIONS + workload.step_images * _READ_OPERATIONS,
        kept=written * kept_steps,
        formula="different images of the step · image_bytes",
        inputs={
            "images": workload.step_images,
            "image_bytes": workload.image_bytes,
            "kept_steps": kept_steps,
        },
    )


def _adapter(setting: Setting, most: int) -> Item:
    """Written by rank 0, read back once to compare; engines get it from memory."""
    steps = setting.config.algorithm.num_steps
    kept = min(most, steps + 1)
    return Item(
        name="adapter",
        written=setting.published_bytes,
        read=setting.published_bytes,
        operations=_PUBLISHED_FOLDER_OPERATIONS,
        kept=setting.published_bytes * kept,
        formula="trained_parameters · 4 (full training: · element_bytes), written and read back",
        inputs={"trained_parameters": setting.trained_parameters, "kept_versions": kept},
    )


def _checkpoint(setting: Setting) -> Item:
    """Parameters and both moments in float32, every so many steps."""
    section = setting.config.checkpoint
    size = setting.trained_parameters * 3 * 4
    share = 1 / section.every_steps
    return Item(
        name="checkpoint",
        written=size * share,
        read=size * share,
        operations=(_PUBLISHED_FOLDER_OPERATIONS + (2 + setting.ranks) * _PUBLISHED_FILE_OPERATIONS) * share,
        kept=size * (section.keep + 1),  # the next one is written before the oldest goes
        formula="trained_parameters · 3 · 4 / every_steps; keep + 1 of them lie there while one is written",
        inputs={
            "trained_parameters": setting.trained_parameters,
            "every_steps": section.every_steps,
            "keep": section.keep,
        },
    )


def _commit(workload: Workload, steps: int) -> Item:
    """The commit record, metrics, events, logs, and the heartbeat."""
    size = _COMMIT_BYTES + workload.trajectories * _COMMITTED_TRAJECTORY_BYTES + _LINES_BYTES
    return Item(
        name="commit and logs",
        written=size + _LOG_BYTES_PER_STEP,
        read=size,
        operations=_PUBLISHED_FILE_OPERATIONS + _STEP_OPERATIONS,
        kept=(size + _LOG_BYTES_PER_STEP) * steps,
        formula="6,000 + trajectories · 150 + metrics and events 4,000 + logs 20,000",
        inputs={"trajectories": workload.trajectories, "steps": steps},
    )


def heartbeat_operations(seconds: float) -> float:
    """Of the driver's heartbeat in so many seconds."""
    return seconds * _HEARTBEATS_PER_SECOND * _PUBLISHED_FILE_OPERATIONS
