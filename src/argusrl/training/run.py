"""A run as its driver holds it: scalars, hashes and plans, and handles of the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from argusrl.config.sections import Config
from argusrl.data.order import PromptOrder
from argusrl.errors import ArgusError, Interrupted, StorageError
from argusrl.journal.commits import Commit, CommitChain, sampling_step
from argusrl.journal.epochs import Epoch, renew_epoch
from argusrl.journal.quarantine import quarantined
from argusrl.journal.retention import durable_checkpoints
from argusrl.observe.display import Display
from argusrl.observe.events import EventLog
from argusrl.recovery.failpoints import Point, Rehearsal
from argusrl.recovery.storage_wait import await_storage, free_space_problem
from argusrl.rollout.engine import EngineProgress
from argusrl.rollout.player import PlaySettings
from argusrl.storage.files import bytes_in, list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import MANIFEST
from argusrl.storage.s3 import BackgroundCopies
from argusrl.storage.visibility import await_visible
from argusrl.training.canary import Verification, verify
from argusrl.training.checks import CheckedInput, settings_for
from argusrl.training.draining import NodeLeaving
from argusrl.training.engine_worker import EngineProof
from argusrl.training.fleet import Workers
from argusrl.training.phases import Colocation
from argusrl.training.rollout import Rollout, RolloutResult
from argusrl.types import AdapterRef, TrajectoryRef

if TYPE_CHECKING:
    from argusrl.training.healing import Healing


@dataclass(slots=True)
class RunState:
    """What the last commit says. `after` gives the part of it that the next commit must carry on."""

    step: int = 0  # last committed one
    adapter: AdapterRef | None = None
    prompt_position: int = 0
    canary: TrajectoryRef | None = None
    base_canary: Sequence[float] = ()
    previous_canary: Sequence[float] | None = None

    @classmethod
    def of(cls, commit: Commit) -> RunState:
        state = commit.algorithm_state
        return cls(
            step=commit.step,
            adapter=commit.adapter,
            prompt_position=commit.prompt_position,
            canary=msgspec.convert(state["canary"], TrajectoryRef),
            base_canary=state["base_canary"],
            previous_canary=state["canary_logprobs"],
        )

    def after(self, canary_logprobs: Sequence[float]) -> dict[str, Any]:
        """`algorithm_state` of the next commit."""
        return {
            "canary": msgspec.to_builtins(self.canary),
            "base_canary": list(self.base_canary),
            "canary_logprobs": list(canary_logprobs),
        }


@dataclass(frozen=True, slots=True)
class Serving:
    """What engines have to serve now: an engine that comes back must prove it first."""

    adapter: AdapterRef
    canary: Sequence[float]  # [R] log-probabilities of the trainer


@dataclass(slots=True)
class Run:
    """Everything the loop needs."""

    config: Config
    config_sha256: str
    folder: RunFolder
    epoch: Epoch
    chain: CommitChain
    workers: Workers
    colocation: Colocation
    checked: CheckedInput
    order: PromptOrder
    events: EventLog
    display: Display
    dtype: str
    conditions: dict[str, Any]
    attempt: int
    on_phase: Callable[[str], None]  # hears of every phase
    state: RunState = field(default_factory=RunState)
    healing: Healing = None  # type: ignore[assignment]  # set by the driver: it needs the run
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    failure: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # a node has to be left: see draining.py
    phase_name: str = "start"
    fault: ArgusError | None = None  # why the run cannot go on, found in the background
    serving: tuple[Serving, ...] = ()  # newest last
    workers_share_gpus: bool = False
    leftovers_until: int | None = None  # steps up to this one may have leftovers of before this epoch
    ahead: Rollout | None = None  # of the next step, while this one is trained
    settled: bool = False  # ranks are in the state of the last commit
    journal_open: bool = False  # episode workers have segments of a step
    staging: asyncio.Future[Any] | None = None  # of a checkpoint that ranks were asked for
    begun_checkpoint: Path | None = None  # the newest one that this driver began
    unwritten: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    rehearsal: Rehearsal | None = None  # of an ordinary run: none
    copies: BackgroundCopies | None = None  # where the recipe asks for copies
    commit_seconds: float = 0.0
    step_bytes: int = 0  # written by the largest step of this driver
    written_bytes: int = 0  # by all of them
    engine_bytes: int = 0  # largest peak of an engine, as it proved its adapter
    isolated_step: int | None = None  # samples of this step are computed one by one, to find the one that ends it
    engine_counters: dict[Any, EngineProgress] = field(default_factory=dict)  # of each engine, as they were last read

    def at(self, point: Point, step: int | None = None) -> None:
        """A named point of a step, by default the one that is trained, is passed: a rehearsal may shoot here."""
        if self.rehearsal is not None:
            self.rehearsal.reached(point, self.state.step + 1 if step is None else step)

    def phase(self, name: str) -> None:
        """Tell display and heartbeat what is being done."""
        self.phase_name = name
        self.on_phase(name)
        self.display.phase(name)

    def say(self, kind: str, message: str, *, warning: bool = False, **fields: Any) -> None:
        """Write an event and show it. While storage is away events wait for its return."""
        self.display.message(message, warning=warning)
        self.unwritten.append((kind, message, fields))
        with suppress(StorageError):
            while self.unwritten:
                kind, message, fields = self.unwritten[0]
                self.events.write(kind, message, **fields)
                self.unwritten.pop(0)

    def give_up(self, fault: ArgusError) -> None:
        """Something in the background found that this driver cannot go on."""
        if self.fault is None:
            self.fault = fault
            self.failure.set()

    def renew_epoch(self) -> None:
        """Claim the next epoch: what is still on its way from before is refused, what was written is a leftover.

        Raises FencedError when another driver claimed one meanwhile.
        """
        self.epoch = renew_epoch(self.epoch, {"attempt": self.attempt})
        self.chain = CommitChain(self.folder, self.epoch)
        position = self.workers.position
        position.epoch, position.step, position.ahead = self.epoch.number, 0, 0
        self.abandon_ahead()
        self.leftovers_until = None
        self.journal_open = self.settled = False
        if self.staging is not None:
            self.staging.cancel()
            self.staging = None

    def needed_bytes(self) -> int:
        """Free space that a step needs: what the largest step so far wrote, twice, and the margin of the recipe."""
        return 2 * self.step_bytes + self.config.recovery.min_free_bytes

    async def require_space(self) -> None:
        """Before a step: pause while there is too little room for it. Raises StorageError after the deadline."""
        if await asyncio.to_thread(free_space_problem, self.folder, self.needed_bytes()) is None:
            return
        await self.wait_for_storage()

    async def wait_for_storage(self) -> None:
        """Pause until the run folder can be gone on with. Raises Interrupted, and StorageError after the deadline."""
        self.phase("wait")
        waiting = await_storage(
            self.folder,
            self.chain.head_sha256,
            deadline_seconds=self.config.recovery.storage_wait_seconds,
            needed_bytes=self.needed_bytes(),
            say=lambda text: self.say("waiting", text, warning=True),
        )
        try:
            await self.unless_stopped(waiting)
        except StorageError as fault:
            self.give_up(fault)  # waiting once more would be of no use
            raise

    def play_settings(self) -> PlaySettings:
        """How episodes are played under the committed adapter."""
        return settings_for(self.config, self.state.adapter)

    async def rollout(self, step: int) -> RolloutResult:
        """Play the step's prompts, minus what interrupted attempts finished. Raises Interrupted on a stop signal.

        With rollout.staleness the next step is begun at once, under the adapter that is committed now.
        """
        self.phase("rollout")
        if self.ahead is None:
            self.engine_counters = await self.workers.engines.progress()  # evaluations and canaries are not the step's
        rollout, self.ahead = self.ahead or await self._begin_rollout(step), None
        result: RolloutResult = await self.unless_stopped(rollout.end())
        if self.config.rollout.staleness and step < self.config.algorithm.num_steps:
            self.ahead = await self._begin_rollout(step + 1)
        return result

    async def _begin_rollout(self, step: int) -> Rollout:
        staleness = self.config.rollout.staleness
        at = sampling_step(step, staleness)
        adapter = self.state.adapter if at == self.state.step else self.chain.adapter(at)
        assert adapter is not None
        indices = self._prompts_of(step)
        self.workers.position.ahead = step - self.workers.position.step
        await self.workers.episodes.begin()
        self.journal_open = True
        adopted: Sequence[TrajectoryRef] = ()
        ids: dict[str, int] = {}
        if self.leftovers_until is None:
            self.leftovers_until = step + staleness
        if step <= self.leftovers_until:
            adopted, ids = await self._adopt(step, indices, adapter)
        rollout = Rollout(
            episodes=self.workers.episodes,
            engines=len(self.workers.engines.members),
            group_size=self.config.algorithm.group_size,
            section=self.config.rollout,
            settings=settings_for(self.config, adapter),
            say=lambda message: self.say("paused", message, warning=True, step=step),
            half_way=lambda: self.at("rollout_half", step),
            quarantined=quarantined(self.folder, step),
        )
        self.at("rollout_begun", step)
        rollout.begin(indices, ids, adopted)
        return rollout

    def _prompts_of(self, step: int) -> Sequence[int]:
        count = self.config.algorithm.prompts_per_step
        return self.order.take(self.state.prompt_position + (step - self.state.step - 1) * count, count)

    def abandon_ahead(self) -> None:
        """Let go of the rollout of a step that does not come, or is begun anew."""
        if self.ahead is not None:
            self.ahead.abandon()
            self.ahead = None

    def serve_too(self, serving: Serving) -> None:
        """Engines have to serve this version from now on, beside as many earlier ones as the recipe samples from."""
        others = [one for one in self.serving if one.adapter != serving.adapter]
        self.serving = (*others, serving)[-1 - self.config.rollout.staleness :]

    def served_before(self, head: Commit) -> list[Serving]:
        """What engines have to serve beside the adapter of `head`: the next step is sampled under it."""
        at = sampling_step(head.step + 1, self.config.rollout.staleness)
        if at == head.step:
            return []
        commit = self.chain.read(at)
        return [Serving(commit.adapter, commit.algorithm_state["canary_logprobs"])]

    def read_ahead(self) -> None:
        """Have the prompts of the next step that is not begun read while this one is trained on."""
        step = self.state.step + 2 + self.config.rollout.staleness
        if step <= self.config.algorithm.num_steps:
            self.workers.episodes.read_ahead(self._prompts_of(step))

    async def _adopt(
        self, step: int, indices: Sequence[int], adapter: AdapterRef
    ) -> tuple[Sequence[TrajectoryRef], dict[str, int]]:
        answers = await self.workers.episodes.adopt(adapter.sha256, indices)
        leftovers, rows = answers[0].leftovers, answers[0].rows
        if leftovers.trajectories or leftovers.damaged or leftovers.foreign or answers[0].unfinished:
            self.say(
                "adopted",
                f"step {step}: {len(leftovers.trajectories)} finished and {answers[0].unfinished} unfinished "
                "trajectories of before are kept",
                step=step,
                trajectories=len(leftovers.trajectories),
                unfinished=answers[0].unfinished,
                unfinished_tokens=answers[0].unfinished_tokens,
                foreign=leftovers.foreign,
                damaged=list(leftovers.damaged),
            )
        return leftovers.trajectories, rows

    async def unless_stopped(self, work: Any) -> Any:
        """Await `work`, or seal the journal and raise Interrupted when the stop signal comes first.

        Raises the fault of `give_up` when that comes first, NodeLeaving when a node has to be left.
        """
        task = asyncio.ensure_future(work)
        signals = [asyncio.ensure_future(event.wait()) for event in (self.stop, self.failure, self.leaving)]
        try:
            await asyncio.wait([task, *signals], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.fault is not None:
                raise self.fault
            if self.leaving.is_set() and not self.stop.is_set():
                await self.leave()
            if self.journal_open:
                await self.workers.episodes.seal()
            raise Interrupted(f"stopped in step {self.state.step + 1}", "run the same command to go on")
        finally:
            for signal in signals:
                signal.cancel()

    async def leave(self) -> None:
        """Seal what is under way, so that it can be gone on with elsewhere. Raises NodeLeaving."""
        await self.healing.drains.count()
        if self.journal_open:
            await self.workers.episodes.seal()
        if self.settled:
            await self.healing.drains.in_time(self.keep_state())  # or else updates since the last one are repeated
        raise NodeLeaving("a node is left")

    async def engine_work(self) -> dict[str, float]:
        """Metrics: what engines computed of prompts and images since the last call, against what they had to."""
        now = await self.workers.engines.progress()
        before, self.engine_counters = self.engine_counters, now

        def counted(name: str) -> int:
            pairs = ((one, before.get(engine, EngineProgress())) for engine, one in now.items())
            return sum(getattr(one, name) - getattr(earlier, name) for one, earlier in pairs)

        def redundancy(computed: str, needed: str) -> float:
            return counted(computed) / max(1, counted(needed)) if counted(computed) else 1.0

        prompt_tokens = counted("prompt_tokens")
        return {
            "rollout/cached_prompt_share": counted("cached_prompt_tokens") / prompt_tokens if prompt_tokens else 0.0,
            "compute/redundancy_prefill": redundancy("computed_prompt_tokens", "needed_prompt_tokens"),
            "compute/redundancy_prefill_raw": redundancy("computed_prompt_tokens", "distinct_prompt_tokens"),
            "compute/redundancy_encoder": redundancy("encoded_image_tokens", "needed_image_tokens"),
        }

    def verify(self, adapter: AdapterRef, proofs: Sequence[EngineProof], trainer: Sequence[float]) -> Verification:
        """Check what all engines showed. Raises AdapterRefused."""
        return verify(
            adapter,
            proofs,
            trainer=trainer,
            base=self.state.base_canary,
            previous=self.state.previous_canary,
            dtype=self.dtype,
        )

    def checkpoint(self, commit: Commit) -> None:
        """Start writing a checkpoint of the state after `commit`, when one is due."""
        last = commit.step == self.config.algorithm.num_steps
        if commit.step % self.config.checkpoint.every_steps and not last:
            return
        self._begin_checkpoint(commit)

    def _begin_checkpoint(self, commit: Commit) -> None:
        self.phase("checkpoint")
        self.at("checkpointing")
        self.begun_checkpoint = self.folder.checkpoint(commit.step, self.epoch.number)
        staging = self.workers.ranks.save_checkpoint(self.chain.head_sha256, commit.state_digest)
        self.staging = asyncio.ensure_future(staging)

    async def keep_state(self) -> None:
        """Have a durable checkpoint of the last commit, whose state the ranks are in."""
        head = self.chain.head()
        assert head is not None
        self.workers.position.step, self.workers.position.ahead = head.step, 0
        await self.staged()
        await self.workers.ranks.finish_checkpoint()
        if self.begun_checkpoint is not None:  # the ranks said that it is there
            await asyncio.to_thread(await_visible, self.begun_checkpoint / MANIFEST)
        if not any(checkpoint.step == head.step for checkpoint in durable_checkpoints(self.folder, self.chain)):
            self._begin_checkpoint(head)
            await self.staged()
            await self.workers.ranks.finish_checkpoint()

    async def staged(self) -> None:
        """Wait until ranks have copied what the checkpoint holds. Raises what that, or the write before, raised."""
        if self.staging is not None:
            staging, self.staging = self.staging, None
            await staging

    def advance(self, commit: Commit) -> None:
        """The commit is durable: go on from it."""
        self.state = RunState.of(commit)
        self.settled = True
        written = sum(segment.bytes for segment in commit.segments)
        written += bytes_in(self.folder.absolute(commit.adapter.path))
        # Its own checkpoint is still being written: those before it are as large.
        written += max(map(bytes_in, list_folder(self.folder.checkpoints)), default=0)
        self.step_bytes = max(self.step_bytes, written)
        self.written_bytes += written
