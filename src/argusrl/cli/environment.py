"""argusrl environment check."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from argusrl.cli.output import JsonOption, say, say_json
from argusrl.errors import ArgusError, ConfigError

if TYPE_CHECKING:
    from argusrl.config.sections import Config
    from argusrl.environments.check import PlayedEpisode
    from argusrl.environments.sessions import SessionFactory
    from argusrl.rewards.combined import RewardSet
    from argusrl.types import Prompt

SHOWN_PROBLEMS = 5

app = typer.Typer(help="Check an environment and its rewards before training.", no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    passed: bool
    text: str
    details: tuple[str, ...] = ()


def register(parent: typer.Typer) -> None:
    """Add the verb."""
    parent.add_typer(app, name="environment")


@app.callback()
def _verbs() -> None:
    """Check an environment and its rewards before training."""


@app.command()
def check(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes, section.key=value.", metavar="[KEY=VALUE]...")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="How many prompts to try.")] = 8,
    split: Annotated[str, typer.Option("--split", help="train or heldout.")] = "train",
    as_json: JsonOption = False,
) -> None:
    """Does the reward tell right from wrong? Is the environment deterministic, quick, and does it end?

    Questions: the gold answer is paid in full, an empty and a wrong reply are paid less. Environments: episodes with
    random valid actions, twice each. Exit code 1 if something fails. No model is loaded.
    """
    from argusrl.config.load import load_config
    from argusrl.data.source import open_source

    if split not in ("train", "heldout"):
        raise ConfigError(f"--split {split}: must be train or heldout")
    which: Literal["train", "heldout"] = "train" if split == "train" else "heldout"
    config = load_config(recipe, overrides or []).config
    source = open_source(config.data, config.environment, which)
    tried = [source[index] for index in range(min(prompts, len(source)))]
    findings = [Finding(True, f"{split}: {len(source):,} prompts, {len(tried)} tried")]
    findings += asyncio.run(_examine(config, tried))
    failed = sum(not finding.passed for finding in findings)
    if as_json:
        say_json({"passed": failed == 0, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            say(f"{'✓' if finding.passed else '✗'} {finding.text}", "green" if finding.passed else "red")
            for line in finding.details:
                say("    " + line.replace("\n", "\n    "))
    if failed:
        raise typer.Exit(ArgusError.exit_code)


async def _examine(config: Config, prompts: Sequence[Prompt]) -> list[Finding]:
    from argusrl.environments.sessions import open_sessions
    from argusrl.rewards.combined import open_rewards

    rewards = open_rewards(config.rewards)
    # Two sets of processes: what depends on the process (hash seeds, global state) must come to light, too.
    sessions, others = open_sessions(config.environment), open_sessions(config.environment)
    try:
        try:
            await rewards.prepare()
        except ConfigError as error:
            return [Finding(False, "rewards can be used", (*error.problems, error.hint))]
        names = ", ".join(f"{reward.name} × {reward.weight:g}" for reward in rewards.rewards)
        findings = [Finding(True, f"rewards can be used: {names}")]
        if config.environment.kind == "single_turn":
            return findings + await _examine_rewards(config, rewards, prompts)
        return findings + await _examine_environment(config, sessions, others, rewards, prompts)
    finally:
        await asyncio.gather(rewards.close(), sessions.close(), others.close())


async def _examine_rewards(config: Config, rewards: RewardSet, prompts: Sequence[Prompt]) -> list[Finding]:
    from argusrl.rewards.check import check_rewards

    started = time.perf_counter()
    checks = await check_rewards(rewards, config.rewards, prompts)
    seconds = (time.perf_counter() - started) / max(1, sum(check.replies for check in checks))
    titles = {
        "reward": "rewards answer",
        "gold": "the gold answer is paid in full",
        "empty": "an empty reply is paid less",
        "wrong": "a wrong answer is paid less",
    }
    findings = []
    for kind, title in titles.items():
        tried = checks if kind == "reward" else [check for check in checks if "reward" not in check.problems]
        problems = [f"{check.prompt_id}: {check.problems[kind]}" for check in tried if kind in check.problems]
        if not tried:
            continue  # no reward answered, so nothing is known of what it pays
        text = f"{title} ({len(tried) - len(problems)} of {len(tried)})"
        findings.append(Finding(not problems, text, _shortened(problems)))
    good = next((check for check in checks if not check.problems), None)
    if good is not None:
        paid = f"gold {good.gold:g}, empty {good.empty:g}, wrong {good.wrong:g}"
        findings.append(Finding(True, f"for example {good.prompt_id}, {good.gold_reply!r:.80}: {paid}"))
    return [*findings, Finding(True, f"about {seconds * 1e3:.1f} ms for a reply")]


async def _examine_environment(
    config: Config, sessions: SessionFactory, others: SessionFactory, rewards: RewardSet, prompts: Sequence[Prompt]
) -> list[Finding]:
    from argusrl.environments.base import EnvironmentFailed
    from argusrl.environments.check import gymnasium_problems, play_at_random

    section = config.environment
    findings = []
    if section.kind == "gymnasium":
        wrong, notes = await gymnasium_problems(sessions.pool, section, prompts[0])
        findings.append(Finding(not wrong, "Gymnasium's own checker is content", (wrong,) if wrong else tuple(notes)))
    episodes, different, failed = [], [], []
    for prompt in prompts:
        try:
            episode = await play_at_random(sessions, section, prompt, config.run.seed)
            again = await play_at_random(others, section, prompt, config.run.seed)
        except EnvironmentFailed as error:
            failed.append(f"{prompt.id}: {error.message}")
            continue
        episodes.append(episode)
        if again.digests != episode.digests:
            pairs = zip(episode.digests, again.digests, strict=False)
            turn = next((index for index, (one, two) in enumerate(pairs) if one != two), len(again.digests))
            different.append(
                f"{prompt.id}: differs " + (f"after reply {turn}" if turn else "from the first message on")
            )
    whole = f"episodes play to their end ({len(episodes)} of {len(prompts)})"
    findings.append(Finding(not failed, whole, _shortened(failed)))
    if not episodes:
        return findings
    same = f"the same seed and replies show the same ({len(episodes) - len(different)} of {len(episodes)})"
    findings.append(Finding(not different, same, _shortened(different)))
    return findings + _understood(config, episodes) + [_latency(episodes)] + [await _paid(rewards, prompts, episodes)]


def _understood(config: Config, episodes: Sequence[PlayedEpisode]) -> list[Finding]:
    turns = sum(len(episode.replies) for episode in episodes)
    understood = sum(episode.understood for episode in episodes)
    ends = f"{sum(e.terminated for e in episodes)} of {len(episodes)} random episodes terminated"
    counts = f"{turns / len(episodes):.1f} turns and {sum(e.images for e in episodes) / len(episodes):.1f} images each"
    found = [Finding(True, f"{ends}; {counts}")]
    if config.environment.actions:
        details = () if understood == turns else ("environment.action_pattern and environment.actions do not agree",)
        found.append(Finding(understood == turns, f"actions are understood ({understood} of {turns})", details))
    return found


def _latency(episodes: Sequence[PlayedEpisode]) -> Finding:
    steps = [seconds for episode in episodes for seconds in episode.step_seconds]
    resets = [episode.reset_seconds for episode in episodes]
    median, longest = statistics.median(steps) * 1e3, max(steps) * 1e3
    return Finding(
        True, f"step {median:.1f} ms (longest {longest:.1f}), reset {statistics.median(resets) * 1e3:.1f} ms"
    )


async def _paid(rewards: RewardSet, prompts: Sequence[Prompt], episodes: Sequence[PlayedEpisode]) -> Finding:
    from argusrl.rewards.base import RewardFailed, Scorable

    by_id = {prompt.id: prompt for prompt in prompts}
    totals: list[float] = []
    for episode in episodes:
        prompt = by_id[episode.prompt_id]
        item = Scorable(
            reply=episode.replies[-1],
            replies=episode.replies,
            prompt="",
            answer=prompt.answer,
            info=prompt.info,
            environment_reward=episode.reward,
            terminated=episode.terminated,
        )
        try:
            totals.append((await rewards.score(item))[0])
        except RewardFailed as failed:
            return Finding(False, "random episodes are paid", (f"reward '{failed.source}': {failed.message}",))
    mean, most = statistics.fmean(totals), max(totals)
    return Finding(True, f"random episodes are paid {mean:.3g} on average, {most:.3g} at best")


def _shortened(problems: Sequence[str]) -> tuple[str, ...]:
    more = len(problems) - SHOWN_PROBLEMS
    return (*problems[:SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else []))
