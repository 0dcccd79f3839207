"""argusrl plan: what a recipe needs, whether it fits, and what each step will take, before anything is paid for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.output import JsonOption, say, say_json, say_table
from argusrl.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from argusrl.cluster.plan.lines import Table
    from argusrl.cluster.plan.machine import Machine
    from argusrl.cluster.plan.plan import Plan
    from argusrl.config.sections import Config

_SMALL_BYTES = 8 << 30


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("plan")
    def plan(
        recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes, section.key=value.", metavar="[KEY=VALUE]...")
        ] = None,
        instance: Annotated[
            str | None, typer.Option("--instance", help="Type of the worker nodes, e.g. ml.g7e.12xlarge.")
        ] = None,
        nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="How many of them.")] = None,
        gpu_gib: Annotated[
            float | None, typer.Option("--gpu-gib", help="Memory of one GPU in GiB, of nodes whose type is not known.")
        ] = None,
        model_config: Annotated[
            Path | None, typer.Option("--model-config", help="The model's config.json, or its folder, if elsewhere.")
        ] = None,
        assume: Annotated[
            list[str] | None, typer.Option("--assume", metavar="NAME=VALUE", help="Another value of an assumption.")
        ] = None,
        as_json: JsonOption = False,
    ) -> None:
        """Memory, storage and seconds of a recipe on a machine; needs no cluster, no GPU and no weights.

        Exit codes: 0 it fits, 7 it does not: the first limit that fails and what to change are named. With --instance
        or --nodes the run has as many slots as those nodes have GPUs; else what `argusrl cluster manifest` would
        refuse is refused here, too.
        """
        from argusrl.cluster.plan.assumptions import Assumptions
        from argusrl.cluster.plan.machine import machine_of
        from argusrl.cluster.plan.plan import fix_of, make_plan
        from argusrl.config.load import load_config
        from argusrl.config.model_shape import ModelShape

        config = load_config(recipe, overrides or []).config
        if model_config is None:
            shape = ModelShape.find(config.model.path, config.model.revision)
        else:
            shape = ModelShape.read(_model_folder(model_config))
        machine = machine_of(config, instance_name=instance, nodes=nodes, gpu_gib=gpu_gib)
        given = config.cluster.slots
        config = _for_nodes(config, machine, chosen=instance is not None or nodes is not None)
        found = make_plan(config, shape, machine, Assumptions().with_values(assume or []))
        fix = fix_of(found)
        if as_json:
            say_json({"recipe": recipe, **found.to_json(), "fix": fix.to_json() if fix else None})
        else:
            if config.cluster.slots != given:
                say(f"cluster.slots={config.cluster.slots} instead of {given}: {machine.name}", "yellow")
            _show(found)
            for line in verdict_lines(found):
                say(line, None if found.fits is None else "green" if found.fits else "red")
            if fix is not None:
                say(f"  → {' '.join(fix.changes)}" + (f"; then {fix.then} does not fit" if fix.then else ""), "cyan")
            elif found.failing:
                say("  → no change of one key helps: use fewer tokens, a smaller model or larger nodes", "cyan")
        raise typer.Exit(ClusterError.exit_code if found.failing else 0)


def _model_folder(path: Path) -> Path:
    """Raises ConfigError where there is nothing."""
    if not path.exists():
        raise ConfigError(f"--model-config {path}: there is no such file or folder")
    return path if path.is_dir() else path.parent


def _for_nodes(config: Config, machine: Machine, *, chosen: bool) -> Config:
    """The recipe on nodes whose GPUs it takes all: it follows those of the command line, and has to fit its own.

    Raises ConfigError.
    """
    from argusrl.cluster.manifests.setup import setup_of
    from argusrl.config.load import with_overrides

    if not machine.separate_head:
        return config
    if not chosen:
        setup_of(config)
    elif config.cluster.slots not in (None, machine.slots):
        return with_overrides(config, [f"cluster.slots={machine.slots}"])
    return config


def verdict_lines(plan: Plan) -> list[str]:
    """Whether it fits; where it does not, the limits that fail."""
    if plan.fits is None:
        return ["the memory of a GPU is not known: give --instance or --gpu-gib to see whether it fits"]
    if plan.fits:
        return ["it fits"]
    return [f"does not fit: {one}" for one in plan.failing]


def _show(plan: Plan) -> None:
    setting, work = plan.setting, plan.workload
    say(
        f"{setting.machine.name}: {setting.ranks} ranks, {setting.engines} engines, "
        f"{setting.shape.parameters / 1e9:.2f} B parameters, {setting.trained_parameters / 1e6:.1f} M trained"
    )
    say(
        f"a step: {work.groups} prompts × {work.group_size}, {work.turns:.1f} turns, "
        f"{work.trajectory_tokens:,.0f} tokens and {work.shared_images + work.images:.1f} images per trajectory"
    )
    say()
    for table in [*plan.devices, plan.worker]:
        _show_table(table)
    if plan.head is not None:
        _show_head(plan)
    _show_storage(plan)
    _show_seconds(plan)


def _show_table(table: Table) -> None:
    from argusrl.cluster.plan.lines import PHASES

    unit, show = _unit_of(table)
    rows = [[name, *map(show, sizes)] for name, sizes in table.rows().items()]
    rows.append(["total", *map(show, table.totals.values())])
    say_table([_title(table, unit, show), *PHASES], rows)
    if any(line.reclaimable and line.size for line in table.lines):
        say("* page cache, which the kernel takes back: not in the total", "bright_black")
    say()


def _title(table: Table, unit: str, show: Callable[[float], str]) -> str:
    return f"{table.title}, {unit}" + ("" if table.capacity is None else f" of {show(table.capacity)}")


def _unit_of(table: Table) -> tuple[str, Callable[[float], str]]:
    """Small things in MiB."""
    return ("GiB", _gib) if table.peak()[1] >= _SMALL_BYTES else ("MiB", _mib)


def _show_head(plan: Plan) -> None:
    from argusrl.cluster.plan.host import head_growth

    head = plan.head
    assert head is not None
    unit, show = _unit_of(head)
    rows = [[name, show(sizes[0])] for name, sizes in head.rows().items()]
    say_table([_title(head, unit, show), ""], [*rows, ["total", show(head.peak()[1])]])
    for one in head_growth(plan.setting):
        say(f"  {one.size:>12,} bytes for each {one.per} ({one.what})", "bright_black")
    say()


def _show_storage(plan: Plan) -> None:
    storage = plan.storage
    rows = [
        [one.name, _mb(one.written), _mb(one.read), f"{one.operations:,.0f}", _mb(one.kept)] for one in storage.items
    ]
    total = [_mb(storage.written), _mb(storage.read), f"{storage.operations:,.0f}", _mb(storage.kept)]
    say_table(
        ["storage, MB", "written/step", "read/step", "operations/step", "kept at the end"], [*rows, ["total", *total]]
    )
    capacity = "" if storage.capacity is None else f" of {storage.capacity / 1e6:,.0f} MB"
    say(f"at {storage.throughput / 1e6:,.0f} MB/s{capacity}; each start reads {_mb(storage.start_read)} MB of weights")
    say()


def _show_seconds(plan: Plan) -> None:
    if plan.seconds is None:
        return
    found = plan.seconds
    parts = {
        "rollout": found.rollout,
        "  prompts and images": found.prefill,
        "  decoding": found.decode,
        "  environments": found.environment,
        "hand-over": found.hand_over,
        "training": found.train,
        "  weights over the network (hidden)": found.gather,
        "publication": found.publication,
        "commit": found.commit,
        "step": found.step,
        "checkpoint (in the background)": found.checkpoint,
    }
    say_table(["predicted", "seconds"], [[name, f"{value:,.2f}"] for name, value in parts.items()])
    say()
    if plan.fleets:
        rows = [
            [
                _fleet(one.colocated, one.staleness),
                str(one.ranks),
                str(one.engines),
                f"{one.step_seconds:,.1f}",
                f"{one.gpu_hours:,.0f}",
                "not known" if one.fits is None else "yes" if one.fits else "no",
            ]
            for one in plan.fleets
        ]
        say_table(["GPUs used as", "ranks", "engines", "s/step", "GPU-hours/1,000 steps", "fits"], rows)
        say()


def _fleet(colocated: bool, staleness: int) -> str:
    if colocated:
        return "rank and engine in turn"
    return "separate fleets, best split" + (", one step ahead" if staleness else "")


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}" if size else "–"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f}" if size else "–"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"
