"""The actor that holds one engine. Episode workers submit requests and collect what was sampled, in bulk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argusrl.errors import AdapterRefused, ArgusError, CorruptionError, EngineError
from argusrl.journal.episodes import read_trajectory
from argusrl.journal.images import read_image
from argusrl.recovery.failpoints import How
from argusrl.rollout.engine import Canary, EngineImage, EngineProgress, EngineSettings, SampleRequest, Span
from argusrl.rollout.vllm_engine import VllmEngine, preload, preload_model
from argusrl.storage.adapter_folder import read_adapter
from argusrl.storage.layout import RunFolder
from argusrl.training.fence import Fence
from argusrl.training.peaks import engine_peak_bytes
from argusrl.training.process import Lease, many_imports, start_logging
from argusrl.training.shooting import shoot_oneself
from argusrl.types import AdapterFiles, AdapterRef, TrajectoryRef

_COLLECT_SECONDS = 5.0  # an empty answer after this long says that the engine lives
_LIVE_VERSIONS = 2  # at most, of adapters
_BULK_SECONDS = 0.005  # what comes within this time travels together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProof:
    """What an engine shows after it loaded an adapter."""

    engine: int  # its place
    sha256: str  # logical digest of the tensors in its layers
    canary: list[float]  # [R] log-probabilities of the canary's reply under the adapter
    peak_bytes: int = 0  # of its memory so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A part of the answer to one request; `error` ends it."""

    request_id: str
    span: Span | None = None
    error: ArgusError | None = None


@dataclass(slots=True)
class _Mailbox:
    """What one episode worker has not confirmed yet, so that an answer that got lost is sent again."""

    items: deque[Delivery] = field(default_factory=deque)
    first: int = 0  # number of items[0]
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, item: Delivery) -> None:
        self.items.append(item)
        self.filled.set()

    def confirm(self, number: int) -> None:
        """Forget everything before `number`."""
        while self.first < number and self.items:
            self.items.popleft()
            self.first += 1


class EngineWorker:
    """One vLLM in a process of its own. A standby has everything imported and starts when it is needed."""

    def __init__(self, name: str, folder: RunFolder, logs: Path, orphan_seconds: float) -> None:
        start_logging(logs / f"{name}.log")
        with many_imports():
            preload()
        self.folder = folder
        self.fence = Fence()
        self.lease = Lease(orphan_seconds)
        self.engine: Any = None
        self.identity = ""
        self.place: int | None = None
        self._canary: Canary | None = None
        self._digests: dict[int, str] = {}  # of the adapters that were loaded last, by version, newest last
        self._mailboxes: dict[str, _Mailbox] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}

    async def prepare(self, settings: EngineSettings) -> None:
        """A standby imports what belongs to the model, too. What is wrong with the settings is for `start` to say."""
        with many_imports(), suppress(Exception):
            preload_model(settings)

    async def start(self, settings: EngineSettings, identity: str, place: int) -> None:
        """Start the engine of a place. Raises EngineError."""
        self.identity, self.place = identity, place
        self.engine = VllmEngine.start(settings)

    async def attach(self, epoch: int, identity: str) -> bool:
        """Take a driver's first call: forget the requests of the one before. False: this engine is of another kind."""
        self.fence.enter(epoch)
        self.lease.renew()
        if self.engine is None or identity != self.identity:
            return False
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._mailboxes.clear()
        return True

    async def beat(self, epoch: int) -> None:
        """Keeps a standby, or an engine that waits to be admitted, alive."""
        self.fence.check_epoch(epoch)
        self.lease.renew()

    async def serves(self) -> int | None:
        """The place whose engine this is; None for a standby."""
        return self.place

    async def die(self, epoch: int, shot: int, how: How) -> None:
        """A rehearsal's shot. The tokens that are lost unless they are continued elsewhere are noted beside it."""
        self.fence.check_epoch(epoch)
        tokens = await self.engine.running_tokens() if self.engine is not None else 0
        self.folder.running_tokens(shot).write_text(str(tokens))
        shoot_oneself(how)

    # ---- sampling

    async def submit(self, epoch: int, step: int, client: str, request: SampleRequest) -> None:
        """Begin to sample; `collect` brings what comes. A repeated submission of a running request changes nothing."""
        self.fence.check(epoch, step)
        if request.id not in self._requests:
            task = asyncio.get_running_loop().create_task(self._sample(client, request))
            self._requests[request.id] = task
            task.add_done_callback(lambda _: self._requests.pop(request.id, None))

    async def _sample(self, client: str, request: SampleRequest) -> None:
        mailbox = self._mailboxes.setdefault(client, _Mailbox())
        try:
            async for span in self.engine.sample(request):
                mailbox.put(Delivery(request_id=request.id, span=span))
        except ArgusError as error:
            mailbox.put(Delivery(request_id=request.id, error=error))
        except Exception as error:
            fault = EngineError(f"request {request.id}: {type(error).__name__}: {error}")
            mailbox.put(Delivery(request_id=request.id, error=fault))

    async def collect(self, epoch: int, client: str, confirmed: int) -> tuple[int, list[Delivery]]:
        """(number of the first item, items) for a client that has everything before `confirmed`; waits for some."""
        self.fence.check_epoch(epoch)
        mailbox = self._mailboxes.setdefault(client, _Mailbox())
        mailbox.confirm(confirmed)
        if not mailbox.items:
            mailbox.filled.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(mailbox.filled.wait(), _COLLECT_SECONDS)
                await asyncio.sleep(_BULK_SECONDS)
        return mailbox.first, list(mailbox.items)

    async def abort(self, epoch: int, ids: Sequence[str]) -> None:
        """Stop sampling these requests; nobody waits for them any more."""
        self.fence.check_epoch(epoch)
        for name in ids:
            if name in self._requests:
                self._requests[name].cancel()

    # ---- adapters

    async def set_canary(self, epoch: int, step: int, reference: TrajectoryRef) -> None:
        """Take the fixed sequence of the run from the journal; it tells adapters apart."""
        self.fence.check(epoch, step)
        trajectory = read_trajectory(self.folder, reference)
        turn = trajectory.turns[0]
        images = (EngineImage(sha256=ref.sha256, data=read_image(self.folder, ref)) for ref in turn.images)
        self._canary = Canary(
            collapsed_ids=turn.collapsed_ids,
            expanded_ids=turn.prompt_ids,
            images=tuple(images),
            response_ids=turn.response_ids,
        )

    async def read_adapter(self, epoch: int, step: int, reference: AdapterRef) -> tuple[None, AdapterFiles]:
        """A published adapter from its folder, for all engines. Raises AdapterRefused, StorageError."""
        self.fence.check(epoch, step)
        try:
            return None, await asyncio.to_thread(read_adapter, self.folder.absolute(reference.path))
        except CorruptionError as error:
            raise AdapterRefused(f"adapter version {reference.version}: {error.message}", error.hint) from error

    async def load_adapter(self, epoch: int, step: int, reference: AdapterRef, files: AdapterFiles) -> None:
        """Load an adapter from memory; its digest is taken from the model's layers. Raises AdapterRefused."""
        self.fence.check(epoch, step)
        digest = await self.engine.load_adapter(reference, files)
        self._digests.pop(reference.version, None)
        self._digests[reference.version] = digest
        if len(self._digests) > _LIVE_VERSIONS:
            del self._digests[next(iter(self._digests))]

    async def prove(self, epoch: int, step: int, version: int) -> EngineProof:
        """Show what the loaded version does to the canary."""
        self.fence.check(epoch, step)
        assert self._canary is not None
        canary = await self.engine.score(self._canary, version)
        digest = self._digests[version]
        return EngineProof(engine=self.place or 0, sha256=digest, canary=canary, peak_bytes=engine_peak_bytes())

    # ---- memory, progress

    async def sleep(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.sleep()

    async def wake_weights(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.wake_weights()

    async def wake_cache(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.wake_cache()

    async def progress(self, epoch: int) -> EngineProgress:
        """Counters that grow while the engine works. Raises EngineError when its stepping thread has ended."""
        self.fence.check_epoch(epoch)
        self.lease.renew()
        progress: EngineProgress = await self.engine.progress()
        return progress
