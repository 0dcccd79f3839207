"""`argusrl rewards rescore`: what other rewards would have paid for the trajectories of a run."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json, say_table

if TYPE_CHECKING:
    from argusrl.config.sections import RewardSection
    from argusrl.storage.layout import RunFolder

_AT_ONCE = 64  # trajectories scored side by side

app = typer.Typer(help="Apply changed rewards to journalled trajectories.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the verb."""
    parent.add_typer(app, name="rewards")


@app.callback()
def _verbs() -> None:
    """Apply changed rewards to journalled trajectories."""


@app.command()
def rescore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run: its name under --root, or its folder.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes: rewards.0.weight=2 …")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Take the rewards of this recipe.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write every trajectory's scores as JSON lines.")] = None,
    root: RootOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Score every committed trajectory again; the run itself stays as it is."""
    from argusrl.cli.runs import find_run
    from argusrl.config.load import load_config, read_resolved, with_overrides
    from argusrl.errors import ConfigError

    folder = find_run(run, root)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    if recipe is not None:
        sections = load_config(recipe, overrides or []).config.rewards
    else:
        sections = with_overrides(read_resolved(folder.config), overrides or []).rewards
    scores = asyncio.run(_rescore(folder, sections))
    if out is not None:
        out.write_text("".join(json.dumps(score) + "\n" for score in scores))
    report = _by_step(scores)
    if as_json:
        say_json(report)
        return
    rows = [
        [str(step["step"]), str(step["trajectories"]), f"{step['before']:.4f}", f"{step['after']:.4f}"]
        for step in report
    ]
    say_table(["step", "trajectories", "reward before", "reward after"], rows)
    failed = sum("failed" in score for score in scores)
    if failed:
        say(f"{failed} trajectories could not be scored (they count in neither mean)", "yellow")


async def _rescore(folder: RunFolder, sections: list[RewardSection]) -> list[dict[str, Any]]:
    from argusrl.journal.commits import CommitChain
    from argusrl.journal.episodes import read_finished
    from argusrl.journal.retention import is_retired
    from argusrl.rewards.base import RewardFailed, Scorable
    from argusrl.rewards.combined import open_rewards
    from argusrl.types import EpisodeEnd

    chain = CommitChain(folder)
    head = chain.head()
    rewards = open_rewards(sections)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(step: int, segment: str, offset: int, length: int) -> dict[str, Any]:
        async with limit:
            trajectory = read_finished(folder, segment, offset, length).trajectory
            info = dict(trajectory.info)
            item = Scorable(
                reply=trajectory.text[-1] if trajectory.text else "",
                replies=tuple(trajectory.text),
                prompt=str(info.pop("prompt", "")),
                answer=trajectory.answer,
                environment_reward=float(info.pop("environment_reward", 0.0)),
                info=info,
                terminated=trajectory.end is EpisodeEnd.TERMINATED,
            )
            result = {"step": step, "prompt_id": trajectory.key.prompt_id, "sample": trajectory.key.sample}
            try:
                total, by_name = await rewards.score(item)
            except RewardFailed as error:
                return {**result, "before": trajectory.reward, "failed": f"{error.source}: {error.message}"}
            return {**result, "before": trajectory.reward, "after": total, "rewards": by_name}

    try:
        await rewards.prepare()
        jobs = []
        for step in range(1, (head.step if head else 0) + 1):
            if is_retired(folder, folder.relative(folder.trajectories(step))):
                continue  # checkpoint.keep_trajectories: false
            commit = chain.read(step)
            jobs += [
                one(step, commit.segments[item.segment].path, item.offset, item.length) for item in commit.trajectories
            ]
        return list(await asyncio.gather(*jobs))
    finally:
        await rewards.close()


def _by_step(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for score in scores:
        if "after" in score:
            steps.setdefault(score["step"], []).append(score)
    return [
        {
            "step": step,
            "trajectories": len(some),
            "before": math.fsum(score["before"] for score in some) / len(some),
            "after": math.fsum(score["after"] for score in some) / len(some),
        }
        for step, some in sorted(steps.items())
    ]
