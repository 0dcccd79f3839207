"""A step of `argusrl train` against one of TRL's GRPOTrainer: same model, data, tokens, LoRA and cores, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from noise_images import write_rows
from process_tree import ProcessTree
from product_run import RECIPES, ProductRun, train
from random_model import make_model

PROMPTS, GROUP_SIZE, RESPONSE_TOKENS, LORA_RANK = 16, 8, 32, 16
TOKEN_TOLERANCE = 0.01
MODES = {"hf": ("--mode", "hf"), "vllm": ("--mode", "vllm", "--vllm-sync", "plain", "--no-is")}
FIGURES = {  # ours -> the rival's
    "training": ("train_seconds", "train_s"),
    "training_cpu": ("train_cpu_seconds", "train_cpu_s"),
    "step": ("step_seconds", "step_s"),
    "step_cpu": ("step_cpu_seconds", "cpu_s_per_step"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The script that measures TRL, and the Python that has it installed."""

    script: Path
    python: Path

    def missing(self) -> str:
        """Why it cannot be measured; "" if it can."""
        for path, what in ((self.script, "the rival's script"), (self.python, "the rival's Python")):
            if not path.exists():
                return f"{what} is not at {path}"
        return ""

    def run(self, model: Path, side: int, mode: str, steps: int) -> dict[str, Any]:
        """One run in a process of its own; the script's figures, and `pss_bytes` of all its processes."""
        words = [*MODES[mode], "--model", str(model), "--image", str(side), "--steps", str(steps), "--threads", "1"]
        words += ["--prompts", str(PROMPTS), "--group", str(GROUP_SIZE), "--max-new", str(RESPONSE_TOKENS)]
        words += ["--lora-rank", str(LORA_RANK), "--micro", str(PROMPTS * GROUP_SIZE), "--max-model-len", "512"]
        tree = ProcessTree()
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = tree.start([str(self.python), str(self.script), *words], quiet, stdout=subprocess.PIPE)
        output, _ = process.communicate()
        tree.stop()
        if process.returncode != 0:
            raise RuntimeError(f"the rival ended with exit code {process.returncode} ({mode}, {side} pixels)")
        return {**json.loads(output.splitlines()[-1]), "pss_bytes": tree.peak_pss_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    rounds: int
    our_steps: int
    rival_steps: dict[int, int]  # by size of the images


QUICK = Effort(rounds=1, our_steps=6, rival_steps={112: 4, 336: 3, 504: 3})
FULL = Effort(rounds=2, our_steps=9, rival_steps={112: 7, 336: 5, 504: 4})


@dataclass(slots=True, kw_only=True)
class Duel:
    """All runs with images of one size."""

    ours: list[ProductRun]
    rival: list[list[dict[str, Any]]]  # round -> its modes


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder with model and data for both sides; each is made at its first use."""

    folder: Path

    @property
    def model(self) -> Path:
        path = self.folder / "model"
        if not path.exists():
            make_model(path)
        return path

    def changes(self, side: int, steps: int) -> list[str]:
        """What makes one_image.yaml run so many steps with images of `side` pixels a side."""
        data = self.folder / f"{side}-{steps}.parquet"
        if not data.exists():
            write_rows(data, side, PROMPTS * steps)
        return [f"model.path={self.model}", f"data.train={data}", f"algorithm.num_steps={steps}"]

    def our_run(self, side: int, steps: int) -> ProductRun:
        """One run of the recipe."""
        return train(RECIPES / "one_image.yaml", self.changes(side, steps))


def fight(stage: Stage, side: int, rival: Rival | None, effort: Effort) -> Duel:
    """Runs in turns. The first round meets every mode of the rival, later ones the one with the fastest step."""
    duel = Duel(ours=[], rival=[])
    modes = list(MODES)
    for number in range(effort.rounds):
        say(f"{side} pixels, round {number + 1} of {effort.rounds}: argusrl")
        duel.ours.append(stage.our_run(side, effort.our_steps))
        if rival is None:
            continue
        met = []
        for mode in modes:
            say(f"{side} pixels, round {number + 1} of {effort.rounds}: TRL ({mode})")
            met.append(rival.run(stage.model, side, mode, effort.rival_steps[side]))
        duel.rival.append(met)
        modes = [min(met, key=lambda run: float(run["step_s"]))["mode"]]
    return duel


def figures(duel: Duel, side: int, why_no_rival: str) -> dict[str, Any]:
    """`speedup_<what>_<side>` and what it comes from; null where the rival was not met or had other work."""
    problem = why_no_rival or token_problem(duel)
    found: dict[str, Any] = {}
    for what, (our_name, rival_name) in FIGURES.items():
        name, _, cpu = what.partition("_")
        key = f"speedup_{name}_{side}" + (f"_{cpu}" if cpu else "")
        ours = [run.median_of(our_name) for run in duel.ours]
        # The better mode for each figure, so the rival is never compared at its worse.
        theirs = [min(float(run[rival_name]) for run in met) for met in duel.rival]
        ratios = [their / our for our, their in zip(ours, theirs, strict=False)]
        found[key] = None if problem or not ratios else median(ratios)
        found[f"{key}_raw"] = {
            "argusrl_seconds": ours,
            "rival_seconds": theirs,
            "ratios": ratios,
            "spread": [min(ratios), max(ratios)] if ratios else None,
            "runs": len(ours),
            "steps_a_run": len(duel.ours[0].steps),
            **({"reason": problem} if problem else {}),
        }
    found[f"speedup_{side}_runs"] = {"argusrl": [_summary(run) for run in duel.ours], "rival": duel.rival}
    return found


def token_problem(duel: Duel) -> str:
    """Both must sample and train on as many tokens."""
    for run, met in zip(duel.ours, duel.rival, strict=False):
        for theirs in met:
            our_counts = our_tokens(run)
            their_counts = (theirs["gen_tokens_per_step"], theirs["seq_tokens_per_step"])
            pairs = zip(our_counts, their_counts, strict=True)
            if any(abs(our - their) > TOKEN_TOLERANCE * their for our, their in pairs):
                return f"sampled tokens, and all tokens, of a step differ: argusrl {our_counts}, TRL {their_counts}"
    return ""


def our_tokens(run: ProductRun) -> tuple[float, float]:
    """Sampled tokens of a step, and prompt and sampled tokens of all its trajectories."""
    count = run.median_metric("rollout/trajectories")
    response, prompt = (run.median_metric(f"rollout/{kind}_tokens_mean") for kind in ("response", "prompt"))
    return count * response, count * (prompt + response)


def _summary(run: ProductRun) -> dict[str, Any]:
    sampled, trained = our_tokens(run)
    names = sorted(name for name in run.steps[0].metrics if name.startswith("time/"))
    return {
        "step_seconds": [step.step_seconds for step in run.steps],
        "step_cpu_seconds": [step.step_cpu_seconds for step in run.steps],
        "train_seconds": [step.train_seconds for step in run.steps],
        "train_cpu_seconds": [step.train_cpu_seconds for step in run.steps],
        "train_rank_cpu_seconds": [step.train_rank_cpu_seconds for step in run.steps],
        "medians": {name: run.median_metric(name) for name in names},
        "step_cpu_seconds_by_process": run.step_cpu_seconds_by_process,
        "sampled_tokens": sampled,
        "trained_tokens": trained,
        "peak_pss_bytes": run.peak_pss_bytes,
        "training_process_peak_pss_bytes": run.rank_peak_pss_bytes,
        "training_process_peak_rss_bytes": run.rank_peak_rss_bytes,
    }


def step_shares(runs: list[ProductRun]) -> dict[str, Any]:
    """What a step of these runs spends outside rollout and training, and on handing the adapter over."""

    def overhead(step: Any) -> float:
        work = step.metrics["time/rollout_seconds"] + step.metrics["time/train_seconds"]
        return float((step.step_seconds - work) / step.step_seconds)

    def adapter(step: Any) -> float:
        return float(step.metrics["adapter/handover_seconds"] / step.step_seconds)

    found: dict[str, Any] = {}
    for key, share in (("step_overhead_share", overhead), ("adapter_share_of_step", adapter)):
        shares = [share(step) for run in runs for step in run.steps]
        found[key] = median(shares)
        found[f"{key}_raw"] = {"shares": shares, "spread": [min(shares), max(shares)], "runs": len(runs)}
    handovers = [step.metrics["adapter/handover_seconds"] for run in runs for step in run.steps]
    found["adapter_share_of_step_raw"]["handover_seconds"] = handovers
    return found


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)
