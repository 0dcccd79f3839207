"""What a plan takes for granted: every number that is neither in the recipe, nor in the model, nor of the hardware.

Each has a name, a value, where the value comes from, and may be set on the command line: `--assume name=value`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from argusrl.errors import ConfigError

_MIB, _GIB = 2**20, 2**30
ASSUMED = "assumed"
HEAD = "measured: benchmarks/head_memory.py"
MEASURED = "measured on CPUs: benchmarks/plan_against_run.py"


def _given(default: float, unit: str, meaning: str, source: str = ASSUMED) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All of them. Sizes of processes are private memory, without tensors that have lines of their own."""

    # ---- a GPU
    gpu_reserved_share: float = _given(
        0.01, "share", "of a GPU's memory that its driver keeps", "139.8 of 141 GiB seen on an H200"
    )
    cuda_context_bytes: float = _given(500 * _MIB, "bytes", "CUDA context and libraries of one process, on its GPU")
    workspace_bytes: float = _given(256 * _MIB, "bytes", "workspaces of matrix kernels, per process")
    nccl_bytes: float = _given(1 * _GIB, "bytes", "NCCL's buffers of a rank among others")
    graph_bytes: float = _given(1.5 * _GIB, "bytes", "captured graphs of an engine that is not eager")
    fragmentation_share: float = _given(0.10, "share", "of a rank's tensors, lost between blocks of the allocator")
    # ---- processes
    rank_process_bytes: float = _given(630 * _MIB, "bytes", "host memory of a rank's process", MEASURED)
    engine_process_bytes: float = _given(880 * _MIB, "bytes", "host memory of an engine's process", MEASURED)
    kept_share: float = _given(
        0.4, "share", "CPU: of a rank's tensors, in freed blocks that the C library keeps", MEASURED
    )
    cuda_host_bytes: float = _given(2 * _GIB, "bytes", "host memory of CUDA in a process that uses a GPU")
    episode_process_bytes: float = _given(700 * _MIB, "bytes", "an episode worker", MEASURED)
    child_process_bytes: float = _given(
        16 * _MIB, "bytes", "a process of environments or rewards, without its code", MEASURED
    )
    node_daemons_bytes: float = _given(315 * _MIB, "bytes", "Ray's raylet and agents on a node", MEASURED)
    row_token_bytes: float = _given(
        72, "bytes", "a token of a row in a rank: id and log-probability", "size of Python's int, float and references"
    )
    # ---- the head
    driver_bytes: float = _given(92 * _MIB, "bytes", "the driver before its first step", MEASURED)
    supervisor_bytes: float = _given(30 * _MIB, "bytes", "the supervisor", MEASURED)
    control_bytes: float = _given(50 * _MIB, "bytes", "Ray's control service (GCS)", MEASURED)
    dashboard_bytes: float = _given(600 * _MIB, "bytes", "Ray's dashboard, its modules, and a job's supervisor", HEAD)
    open_trajectory_bytes: float = _given(2048, "bytes", "a trajectory of the open step, in the driver")
    past_trajectory_bytes: float = _given(
        64, "bytes", "a committed trajectory, in the driver", "benchmarks/driver_memory.py: 46"
    )
    actor_bytes: float = _given(1 * _MIB, "bytes", "an actor, in GCS, dashboard and driver")
    node_bytes: float = _given(16 * _MIB, "bytes", "a node, in GCS and dashboard")
    head_store_bytes: float = _given(1 * _GIB, "bytes", "object store of the head, which has no workers")
    # ---- what a step consists of
    response_share: float = _given(0.5, "share", "of rollout.max_response_tokens that a reply takes on average")
    turn_share: float = _given(1.0, "share", "of environment.max_turns that an episode takes on average")
    question_tokens: float = _given(200, "tokens", "text of a first prompt; later turns have a quarter of it")
    image_pixels: float = _given(
        1 << 20, "pixels", "of an image where model.max_pixels and environment.image_size are not set"
    )
    encoded_pixel_bytes: float = _given(0.3, "bytes", "of a pixel in an encoded image")
    # ---- speed
    training_utilisation: float = _given(0.35, "share", "of peak FLOPs in forward and backward")
    prefill_utilisation: float = _given(0.45, "share", "of peak FLOPs for prompts and images in engines")
    decode_bandwidth_share: float = _given(0.6, "share", "of memory bandwidth while engines decode")
    decode_overhead_seconds: float = _given(0.008, "s", "of each decoding step beside the GPU's work: scheduler, noise")
    turn_seconds: float = _given(0.05, "s", "an environment's step and the rendering of its image")
    host_copy_bytes_per_second: float = _given(20e9, "bytes/s", "between a GPU and host memory")
    network_share: float = _given(0.6, "share", "of a node's network that gathering of weights gets")
    proof_seconds: float = _given(1.0, "s", "until all engines have answered with the canary")
    commit_seconds: float = _given(0.1, "s", "commit record, until it is durable")
    # ---- storage
    storage_share: float = _given(0.8, "share", "of the file system's throughput that this run gets")
    local_storage_bytes_per_second: float = _given(500e6, "bytes/s", "of a disk that is no file system of the recipe")
    free_storage_share: float = _given(0.1, "share", "of the file system that stays free: Lustre slows down when full")

    def with_values(self, changes: Iterable[str]) -> Assumptions:
        """With `name=value` taken over. Raises ConfigError with all that are wrong."""
        names = [one.name for one in fields(self)]
        values: dict[str, float] = {}
        problems = []
        for change in changes:
            name, equals, text = change.partition("=")
            if name not in names:
                near = get_close_matches(name, names, n=1)
                problems.append(f"--assume {change}: no such assumption" + (f"; did you mean {near[0]}?" * bool(near)))
                continue
            try:
                values[name] = float(text)
            except ValueError:
                problems.append(f"--assume {change}: give a number, {name}=…" if equals else f"--assume {change}: =?")
                continue
            if not 0 <= values[name] < float("inf"):
                problems.append(f"--assume {change}: must be a number of at least 0")
        if problems:
            raise ConfigError(problems, "argusrl plan --json lists all of them under `assumptions`")
        return replace(self, **values)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Value, unit, meaning and source of each."""
        return {one.name: {"value": getattr(self, one.name), **one.metadata} for one in fields(self)}
