"""The actor that holds one engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from argusrl.journal.episodes import read_trajectory
from argusrl.journal.images import read_image
from argusrl.rollout.engine import Canary, Completion, EngineImage, EngineProgress, EngineSettings, SampleRequest
from argusrl.rollout.vllm_engine import VllmEngine
from argusrl.storage.layout import RunFolder
from argusrl.training.fence import Fence
from argusrl.training.process import start_logging
from argusrl.types import AdapterRef, TrajectoryRef


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProof:
    """What an engine shows after it loaded an adapter."""

    sha256: str  # logical digest of the tensors in its layers
    canary: list[float]  # [R] log-probabilities of the canary's reply under the adapter


class EngineWorker:
    """Starts vLLM in its own process; every call carries (epoch, step)."""

    def __init__(self, settings: EngineSettings, folder: RunFolder, index: int, logs: Path) -> None:
        start_logging(logs / f"engine{index}.log")
        self.folder = folder
        self.fence = Fence()
        self.engine = VllmEngine.start(settings)
        self._canary: Canary | None = None
        self._sha256 = ""  # of the adapter that was loaded last

    async def ready(self) -> bool:
        """Answers once the engine is up; a failed start surfaces here."""
        return True

    async def sample(self, epoch: int, step: int, request: SampleRequest) -> list[Completion]:
        """One completion per seed, in order."""
        self.fence.check(epoch, step)
        return await self.engine.sample(request)

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

    async def load_adapter(self, epoch: int, step: int, reference: AdapterRef) -> None:
        """Load a published adapter; its digest is taken from the model's layers. Raises AdapterRefused."""
        self.fence.check(epoch, step)
        self._sha256 = await self.engine.load_adapter(reference, self.folder.absolute(reference.path))

    async def prove(self, epoch: int, step: int, version: int) -> EngineProof:
        """Show what the loaded version does to the canary."""
        self.fence.check(epoch, step)
        assert self._canary is not None
        return EngineProof(sha256=self._sha256, canary=await self.engine.score(self._canary, version))

    async def sleep(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.sleep()

    async def wake_weights(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.wake_weights()

    async def wake_cache(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        await self.engine.wake_cache()

    async def progress(self) -> EngineProgress:
        return await self.engine.progress()
