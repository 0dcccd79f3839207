"""Everything that can be wrong with a recipe's input, found before any worker is told what to do."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import traceback
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from argusrl.config.objects import load_object
from argusrl.config.sections import Config
from argusrl.data.check import CheckedSource, check_source, find_overlap
from argusrl.data.source import has_split, open_source
from argusrl.errors import ArgusError, DataError, ModelError, WorkerError
from argusrl.policy.settings import PolicySettings
from argusrl.rewards.combined import open_rewards
from argusrl.rollout.player import PlaySettings
from argusrl.rollout.rendering import Renderer, RenderingRefused
from argusrl.training.model_cache import fetch_model
from argusrl.training.process import many_imports
from argusrl.types import AdapterRef, Prompt

_ANSWERED = frozenset({"exact", "choice", "number", "math"})  # rewards that compare with an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """What the driver needs to know of model and data: numbers only, so it imports no torch and holds no row."""

    prompts: int  # usable training prompts
    heldout_prompts: int  # usable held-out prompts; 0 where the recipe has none
    bad_rows: dict[str, Sequence[int]]  # by split: rows that episode workers leave out, too
    max_images: int  # most images in one sequence; 0 for a text-only model
    banned_ids: tuple[int, ...]  # never sampled
    end_ids: tuple[int, ...]
    adapted_layers: tuple[str, ...]  # last name parts, "q_proj"; empty in full-parameter training
    warnings: tuple[str, ...]


def encode_checked(checked: CheckedInput) -> bytes:
    """For the attempt that takes the place of this one."""
    return msgspec.json.encode(checked, enc_hook=list)  # arrays of rows


def decode_checked(data: bytes) -> CheckedInput:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=CheckedInput)


class InputCheck:
    """check_input in a process of its own, which takes transformers and torch away with it when it ends.

    It begins at once; other things may be done until `result` is asked for.
    """

    def __init__(self, config: Config) -> None:
        receiver, sender = os.pipe()  # not its standard output, on which user code may print
        command = [sys.executable, "-c", f"from argusrl.training.checks import answer; answer({sender})"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[sender])
        os.close(sender)
        self._answer = os.fdopen(receiver, "rb")
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as question:  # closing writes, too
            question.write(pickle.dumps(config))

    def result(self) -> CheckedInput:
        """Waits for the end of the check. Raises what check_input raises, WorkerError if its process died."""
        with self._answer:
            found = self._answer.read()
        code = self._process.wait()
        if not found:
            raise WorkerError(f"the check of model and data ended with code {code}")
        checked: CheckedInput | Exception = pickle.loads(found)
        if isinstance(checked, Exception):
            raise checked
        return checked

    def stop(self) -> None:
        """Nobody wants to know any more."""
        self._process.kill()
        self._process.wait()


def answer(descriptor: int) -> None:
    """What the process of an InputCheck does: reads the config, checks, writes what it found."""
    found: object
    try:
        found = check_input(pickle.load(sys.stdin.buffer))
    except Exception as error:
        if not isinstance(error, ArgusError):  # user code: where it failed is lost on the way
            error.add_note("".join(traceback.format_exception(error)))
        found = error
    try:
        data = pickle.dumps(found)
    except Exception:  # an exception that cannot be sent
        data = pickle.dumps(WorkerError(f"the check of model and data failed: {type(found).__name__}: {found}"))
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)


def check_in_child(config: Config) -> CheckedInput:
    """InputCheck, waited for."""
    return InputCheck(config).result()


def check_input(config: Config) -> CheckedInput:
    """Load the processor, look at every row. Raises ModelError, DataError, ConfigError with all problems of a kind."""
    check_model_folder(config.model.path)
    fetch_model(config.model)
    asyncio.run(_check_rewards(config))
    if config.environment.factory is not None:
        load_object(config.environment.factory, field="environment.factory")
    with many_imports():
        layers = _adapted_layers(config)
        renderer = Renderer.of(config.model)
    images = _ImageCount()
    limit = prompt_limit(config)
    answers = config.environment.kind == "single_turn" and any(reward.kind in _ANSWERED for reward in config.rewards)

    def also(prompt: Prompt) -> str | None:
        images.see(prompt)
        if not prompt.messages:
            return None
        try:
            tokens = renderer.count_tokens(prompt.messages)
        except RenderingRefused as error:
            return str(error)
        if tokens > limit:
            return (
                f"the prompt has {tokens} tokens with images expanded, at most {limit} fit (rollout.max_prompt_tokens)"
            )
        return None

    def check(split: Any) -> CheckedSource:
        return check_source(
            open_source(config.data, config.environment, split),
            split=split,
            needs_answer=answers,
            forbidden=renderer.placeholder_texts,
            on_bad_row=config.data.on_bad_row,
            also=also,
        )

    checked = {"train": check("train")}
    rows, wanted = len(checked["train"].source), config.algorithm.prompts_per_step
    if rows < wanted:  # a prompt twice in one step would be one group with every sample twice
        raise DataError(
            f"a step takes algorithm.prompts_per_step = {wanted} different prompts, only {rows} rows are usable",
            f"set algorithm.prompts_per_step to at most {rows}, or add rows",
        )
    if has_split(config.data, config.environment, "heldout"):
        checked["heldout"] = check("heldout")
    return CheckedInput(
        prompts=len(checked["train"].source),
        heldout_prompts=len(checked["heldout"].source) if "heldout" in checked else 0,
        bad_rows={split: array("Q", (bad.row for bad in one.bad)) for split, one in checked.items()},
        max_images=_max_images(config, renderer, images.most),
        banned_ids=renderer.banned_ids,
        end_ids=renderer.end_ids,
        adapted_layers=layers,
        warnings=tuple(_warnings(checked)),
    )


def _warnings(checked: dict[str, CheckedSource]) -> Iterator[str]:
    for split, one in checked.items():
        if one.bad:
            yield f"{len(one.bad)} unusable {split} rows are left out, the first is: {one.bad[0].reason}"
    if "heldout" in checked and (overlap := find_overlap(checked["train"], checked["heldout"])):
        yield f"{len(overlap)} held-out rows are also training rows: accuracy on them flatters"


def _max_images(config: Config, renderer: Renderer, most: int) -> int:
    if not renderer.shows_images:
        return 0
    if config.environment.kind == "single_turn":
        return max(1, most)
    return max(1, most) * (config.environment.max_turns + 1)


def _adapted_layers(config: Config) -> tuple[str, ...]:
    if config.adapter.kind == "full":
        return ()
    from argusrl.policy.lora import adapted_layers  # imports torch

    return adapted_layers(PolicySettings.from_config(config, device="cpu"))


async def _check_rewards(config: Config) -> None:
    """Import the user's functions and look tokens up, in a process that ends again. Raises ConfigError."""
    sections = [reward for reward in config.rewards if reward.kind in ("python", "http")]
    if not sections:
        return
    rewards = open_rewards(sections)
    try:
        await rewards.prepare()
    finally:
        await rewards.close()


def check_model_folder(path: str) -> None:
    """A clear word about a local folder that is not a model; hub ids are left to transformers. Raises ModelError."""
    folder = Path(path)
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") != 1 or folder.exists()
    if not folder.is_dir():
        if looks_local:
            raise ModelError(f"model.path = {path!r} is not a folder", "give a model folder or a hub id like ORG/NAME")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{folder} has no config.json", "it is not a model folder; a run folder is exported with argusrl export"
        )
    try:
        kind = json.loads(config.read_text()).get("model_type")
    except ValueError as error:
        raise ModelError(f"{config} is not JSON: {error}") from error
    if not kind:
        raise ModelError(f"{config} names no model_type", "it is not a transformers model folder")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"{folder} has no weights (*.safetensors)", "is the download complete?")


def prompt_limit(config: Config) -> int:
    """Longest first prompt in tokens."""
    room = config.model.max_tokens - config.rollout.max_response_tokens
    return min(room, config.rollout.max_prompt_tokens or room)


def settings_for(config: Config, adapter: AdapterRef | None) -> PlaySettings:
    """How episodes are played under an adapter, or under the base model."""
    return PlaySettings(
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        max_prompt_tokens=prompt_limit(config),
        max_tokens=config.model.max_tokens,
        max_turns=config.environment.max_turns,
        adapter_version=None if adapter is None else adapter.version,
        adapter_sha256="" if adapter is None else adapter.sha256,
        request_timeout_seconds=config.rollout.request_timeout_seconds,
        episode_timeout_seconds=config.environment.episode_timeout_seconds,
        retries=config.rollout.retries,
    )


class _ImageCount:
    def __init__(self) -> None:
        self.most = 0

    def see(self, prompt: Prompt) -> None:
        self.most = max(self.most, sum(len(message.images) for message in prompt.messages))
