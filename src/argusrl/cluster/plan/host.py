"""Host memory: of a worker node, and of the head with what it grows with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from argusrl.cluster.plan.device import Setting, engine_lines, rank_lines
from argusrl.cluster.plan.lines import ALWAYS, TRAINING, Line, Table
from argusrl.cluster.plan.workload import Workload

_MOST_PROCESSED_BYTES = 4 << 30  # vLLM's cache of processed images, at most
_NCCL_SHARED_BYTES = 32 << 20  # of /dev/shm, for each rank
_COMMITS_KEPT = 256  # adapters of so many commits stay in the driver
_ADAPTER_RECORD_BYTES = 1024
_OFFLOADED = ("rollout", "loading", "checkpoint")
_ASLEEP = ("hand-over", *TRAINING, "publication", "loading")


def worker_table(setting: Setting, workload: Workload) -> Table:
    """Of the fullest node: with rank 0, the standby, and its share of everything else."""
    machine = setting.machine
    nodes = max(1, machine.nodes)
    ranks, engines = -(-setting.ranks // nodes), -(-setting.engines // nodes)
    if setting.config.cluster.colocate:
        ranks = engines = min(machine.slots_per_node, setting.slots)
    lines = [
        *_rank_lines(setting, workload, ranks),
        *_engine_lines(setting, workload, engines),
        *_other_lines(setting, workload, nodes),
    ]
    if not setting.cuda:
        lines += _tensors_of(setting, ranks, engines)
    return Table(
        title="host memory of a worker node" if machine.separate_head else "host memory",
        lines=[line for line in lines if line.size],
        capacity=machine.node_bytes,
        count=nodes,
    )


def _tensors_of(setting: Setting, ranks: int, engines: int) -> list[Line]:
    """On CPU what a GPU would hold lies in host memory."""
    rank, engine = rank_lines(setting), engine_lines(setting)
    fleets = ((ranks, "ranks", rank), (engines, "engines", engine))
    share, most = setting.assumed.kept_share, setting.estimate.training.total
    weights = setting.estimate.engine.weights
    kept = [
        Line(
            name="freed blocks that are kept (ranks)",
            size=int(ranks * share * most),
            phases=ALWAYS,
            formula="ranks · kept_share · largest phase of a rank",
            inputs={"ranks": ranks, "kept_share": share, "largest_phase": most},
        ),
        Line(
            name="weights before they were packed (engines)",
            size=engines * weights,
            phases=ALWAYS,
            formula="engines · engine weights: freed, and kept by the C library",
            inputs={"engines": engines, "weights": weights},
        ),
    ]
    return kept + [
        Line(
            name=f"{line.name} ({of})",
            size=line.size * count,
            phases=line.phases,
            formula=f"{of} · ({line.formula})",
            inputs={**line.inputs, of: count},
            group=f"tensors of {of}",
        )
        for count, of, own in fleets
        for line in own
    ]


def _rank_lines(setting: Setting, workload: Workload, ranks: int) -> list[Line]:
    assumed, memory, trained = setting.assumed, setting.estimate.training, setting.trained_parameters
    process = assumed.rank_process_bytes + (assumed.cuda_host_bytes if setting.cuda else 0)
    own = workload.trajectories / setting.ranks
    tokens = own * workload.trajectory_tokens
    images = workload.step_images / setting.ranks
    state = -(-trained // setting.ranks) * 4
    lines = [
        Line(
            name="rank processes",
            size=int(ranks * process),
            phases=ALWAYS,
            formula="ranks · (rank_process_bytes + cuda_host_bytes)",
            inputs={"ranks": ranks, "process_bytes": process},
        ),
        Line(
            name="rows and images of the step",
            size=int(ranks * (tokens * assumed.row_token_bytes + images * workload.image_bytes)),
            phases=TRAINING,
            formula="ranks · (tokens · row_token_bytes + images · image_bytes)",
            inputs={
                "ranks": ranks,
                "tokens": tokens,
                "row_token_bytes": assumed.row_token_bytes,
                "images": images,
                "image_bytes": workload.image_bytes,
            },
        ),
        Line(
            name="gathered adapter",
            size=ranks * trained * 4 + setting.published_bytes,
            phases=("publication",),
            formula="ranks · trained_parameters · 4, and the file in rank 0",
            inputs={"ranks": ranks, "trained_parameters": trained, "file": setting.published_bytes},
        ),
        Line(
            name="staged checkpoint",
            size=ranks * 3 * state,
            phases=("checkpoint", "rollout"),
            formula="ranks · 3 · trained_parameters / all_ranks · 4",
            inputs={"ranks": ranks, "trained_parameters": trained, "all_ranks": setting.ranks},
        ),
    ]
    if setting.moves:
        lines.append(
            Line(
                name="ranks' shards while engines have the GPU",
                size=ranks * memory.resident,
                phases=_OFFLOADED,
                formula="ranks · (base weights + adapter + optimizer)",
                inputs={"ranks": ranks, "resident": memory.resident},
            )
        )
    return lines


def _engine_lines(setting: Setting, workload: Workload, engines: int) -> list[Line]:
    assumed, memory, shape = setting.assumed, setting.estimate.engine, setting.shape
    process = assumed.engine_process_bytes + (assumed.cuda_host_bytes if setting.cuda else 0)
    values = shape.vision.patch_values if shape.vision else 0
    processed = min(_MOST_PROCESSED_BYTES, workload.patches / setting.engines * values * 4)
    lines = [
        Line(
            name="engine processes",
            size=int(engines * process),
            phases=ALWAYS,
            formula="engines · (engine_process_bytes + cuda_host_bytes)",
            inputs={"engines": engines, "process_bytes": process},
        ),
        Line(
            name="processed images",
            size=int(engines * processed),
            phases=ALWAYS,
            formula="engines · min(4 GiB, patches / all_engines · patch_values · 4)",
            inputs={
                "engines": engines,
                "patches": workload.patches,
                "all_engines": setting.engines,
                "patch_values": values,
            },
        ),
        Line(
            name="adapters beside the device",
            size=engines * memory.host_adapters,
            phases=ALWAYS,
            formula="engines · 4 versions · trained_parameters · element_bytes; 0 where merged",
            inputs={"engines": engines, "host_adapters": memory.host_adapters},
        ),
        Line(
            name="pristine weights",
            size=memory.host_pristine,
            phases=ALWAYS,
            formula="merged matrices · bytes of a weight in the checkpoint, which is mapped, once per node",
            inputs={"host_pristine": memory.host_pristine},
            reclaimable=True,
        ),
    ]
    if setting.moves:
        lines.append(
            Line(
                name="sleeping engines' weights",
                size=engines * memory.host_asleep,
                phases=_ASLEEP,
                formula="engines · engine weights",
                inputs={"engines": engines, "weights": memory.host_asleep},
            )
        )
    if not setting.cuda and setting.config.recovery.standby_engines:
        count = setting.config.recovery.standby_engines
        lines.append(
            Line(
                name="standby engines",
                size=int(count * assumed.engine_process_bytes),
                phases=ALWAYS,
                formula="recovery.standby_engines · engine_process_bytes",
                inputs={"standby_engines": count, "engine_process_bytes": assumed.engine_process_bytes},
            )
        )
    return lines


def _other_lines(setting: Setting, workload: Workload, nodes: int) -> list[Line]:
    config, assumed = setting.config, setting.assumed
    workers = -(-config.cluster.episode_workers // nodes)
    environments = config.environment.processes if config.environment.kind != "single_turn" else 0
    rewards = config.cluster.reward_processes if any(one.kind in ("math", "python") for one in config.rewards) else 0
    episodes = workers * (assumed.episode_process_bytes + (environments + rewards) * assumed.child_process_bytes)
    step_bytes = int(
        workload.step_images * workload.image_bytes + workload.trajectories * workload.trajectory_tokens * 20
    )
    lines = [
        Line(
            name="episode workers",
            size=int(episodes),
            phases=ALWAYS,
            formula="episode_workers · (episode_process_bytes + (environments + rewards) · child_process_bytes)",
            inputs={"episode_workers": workers, "environments": environments, "rewards": rewards},
        ),
        Line(
            name="object store",
            size=setting.published_bytes,
            phases=("publication", "loading"),
            formula="one published adapter, in /dev/shm",
            inputs={"published_bytes": setting.published_bytes},
        ),
        Line(
            name="Ray's daemons",
            size=int(assumed.node_daemons_bytes),
            phases=ALWAYS,
            formula="node_daemons_bytes",
            inputs={"node_daemons_bytes": assumed.node_daemons_bytes},
        ),
        Line(
            name="page cache of the journal",
            size=step_bytes,
            phases=ALWAYS,
            formula="images and trajectories of a step",
            inputs={"step_images": workload.step_images, "image_bytes": workload.image_bytes},
            reclaimable=True,
        ),
    ]
    if not setting.machine.separate_head:
        lines += head_lines(setting, workload)
    return lines


def shared_memory_bytes(setting: Setting) -> int:
    """Of /dev/shm on a worker: an adapter in Ray's store (twice while the next one comes), and NCCL's."""
    ranks = min(setting.machine.slots_per_node, setting.ranks)
    return 2 * setting.published_bytes + (_NCCL_SHARED_BYTES * ranks if setting.cuda else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the head's memory grows."""

    per: str
    size: int  # bytes for one of them
    what: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def head_table(setting: Setting, workload: Workload) -> Table | None:
    """Of the head's pod; None where the head is on the same machine as everything else."""
    if not setting.machine.separate_head:
        return None
    return Table(
        title="host memory of the head", lines=head_lines(setting, workload), capacity=setting.machine.head_bytes
    )


def head_lines(setting: Setting, workload: Workload) -> list[Line]:
    """Driver, supervisor and Ray's own processes at the end of the run."""
    config, assumed, machine = setting.config, setting.assumed, setting.machine
    steps = config.algorithm.num_steps
    open_steps = 1 + config.rollout.staleness
    actors = setting.ranks + setting.engines + config.cluster.episode_workers
    driver = {
        "driver_bytes": assumed.driver_bytes,
        "open_trajectories": open_steps * workload.trajectories,
        "open_trajectory_bytes": assumed.open_trajectory_bytes,
        "past_trajectories": steps * workload.trajectories,
        "past_trajectory_bytes": assumed.past_trajectory_bytes,
        "commits": min(steps, _COMMITS_KEPT),
    }
    size = (
        assumed.driver_bytes
        + open_steps * workload.trajectories * assumed.open_trajectory_bytes
        + steps * workload.trajectories * assumed.past_trajectory_bytes
        + min(steps, _COMMITS_KEPT) * _ADAPTER_RECORD_BYTES
    )
    alone = machine.separate_head
    ray = assumed.control_bytes + alone * (assumed.node_daemons_bytes + assumed.dashboard_bytes)
    ray += actors * assumed.actor_bytes + machine.nodes * assumed.node_bytes
    lines = [
        Line(
            name="driver",
            size=int(size),
            phases=ALWAYS,
            formula="driver_bytes + open_trajectories · open_trajectory_bytes + past_trajectories · "
            "past_trajectory_bytes + commits · 1024",
            inputs=driver,
        ),
        Line(
            name="supervisor",
            size=int(assumed.supervisor_bytes),
            phases=ALWAYS,
            formula="supervisor_bytes",
            inputs={"supervisor_bytes": assumed.supervisor_bytes},
        ),
        Line(
            name="GCS, dashboard and agents" if alone else "GCS",
            size=int(ray),
            phases=ALWAYS,
            formula="control_bytes + actors · actor_bytes + nodes · node_bytes; on a head of its own + "
            "node_daemons_bytes + dashboard_bytes",
            inputs={
                "control_bytes": assumed.control_bytes,
                "node_daemons_bytes": assumed.node_daemons_bytes,
                "dashboard_bytes": assumed.dashboard_bytes,
                "actors": actors,
                "actor_bytes": assumed.actor_bytes,
                "nodes": machine.nodes,
                "node_bytes": assumed.node_bytes,
            },
        ),
    ]
    if machine.separate_head:
        lines.append(
            Line(
                name="object store of the head",
                size=int(assumed.head_store_bytes),
                phases=ALWAYS,
                formula="head_store_bytes: kept free of adapters, no worker runs there",
                inputs={"head_store_bytes": assumed.head_store_bytes},
            )
        )
        lines.append(
            Line(
                name="journal metadata",
                size=int(steps * (4096 + workload.trajectories * 150)),
                phases=ALWAYS,
                formula="steps · (4096 + trajectories · 150), commits in the page cache",
                inputs={"steps": steps, "trajectories": workload.trajectories},
                reclaimable=True,
            )
        )
    return lines


def head_growth(setting: Setting) -> Sequence[Growth]:
    """What the head's memory depends on; images are not among it."""
    assumed = setting.assumed
    return (
        Growth(per="trajectory of the open step", size=int(assumed.open_trajectory_bytes), what="driver"),
        Growth(per="committed trajectory", size=int(assumed.past_trajectory_bytes), what="driver"),
        Growth(per="image", size=0, what="driver: workers alone know images"),
        Growth(per="step", size=_ADAPTER_RECORD_BYTES, what=f"driver: the last {_COMMITS_KEPT} commits"),
        Growth(per="actor", size=int(assumed.actor_bytes), what="GCS, dashboard"),
        Growth(per="node", size=int(assumed.node_bytes), what="GCS, dashboard"),
    )
