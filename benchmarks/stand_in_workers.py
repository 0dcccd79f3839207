"""Workers that compute nothing, for measuring a driver: same calls, real records in the journal, no model.

Episodes show some of 64 one-megapixel images. Everything a driver reads back is real: segments, adapters with their
manifests, checkpoints that name their commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from argusrl.journal.episodes import EpisodeJournal, Leftovers, SealedStep
from argusrl.rollout.engine import EngineProgress
from argusrl.rollout.player import PlaySettings
from argusrl.storage.adapter_folder import read_adapter
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import write_manifest
from argusrl.storage.publish import publish_folder
from argusrl.training.bring_up import Hiring
from argusrl.training.engine_worker import EngineProof
from argusrl.training.episode_worker import AdoptedStep, GroupOrder
from argusrl.training.fence import Fence
from argusrl.training.fleet import Member
from argusrl.training.rank_worker import RankStatus, RankUpdate, RowOrder, UpdateReport
from argusrl.types import (
    AdapterFiles,
    AdapterRef,
    EpisodeEnd,
    Image,
    ImageRef,
    StopReason,
    Trajectory,
    TrajectoryKey,
    TrajectoryRef,
    Turn,
)

IMAGES = 64
_PIXELS = 1024  # a side
_IMAGE_TOKENS, _TEXT_TOKENS, _RESPONSE_TOKENS = 1024, 32, 64
_CANARY = [-0.5, -0.25]
_METRICS = ("loss", "entropy", "clip_share", "logprob_gap_max", "logprob_gap_mean", "grad_norm", "learning_rate")


def picture(number: int) -> Image:
    """A JPEG of 1024 × 1024 pixels, different for every number."""
    import numpy as np
    from PIL import Image as Picture

    coarse = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Picture.fromarray(coarse).resize((_PIXELS, _PIXELS), Picture.Resampling.BICUBIC).save(out, "JPEG", quality=80)
    return Image(data=out.getvalue(), width=_PIXELS, height=_PIXELS)


class _StandIn:
    """What every worker does for a driver."""

    def __init__(self, _name: str, folder: RunFolder) -> None:
        self.folder = folder
        self.fence = Fence()

    def beat(self, epoch: int) -> None:
        self.fence.check_epoch(epoch)


class StandInEngine(_StandIn):
    """Proves whatever it is given."""

    loaded = ""
    tokens = 0

    def start(self, *_: Any) -> None:
        """Nothing to start."""

    def attach(self, epoch: int, _identity: str) -> bool:
        self.fence.enter(epoch)
        return True

    def set_canary(self, epoch: int, step: int, _canary: TrajectoryRef) -> None:
        self.fence.check(epoch, step)

    def read_adapter(self, epoch: int, step: int, reference: AdapterRef) -> tuple[None, AdapterFiles]:
        self.fence.check(epoch, step)
        return None, read_adapter(self.folder.absolute(reference.path))

    def load_adapter(self, epoch: int, step: int, reference: AdapterRef, _files: AdapterFiles) -> None:
        self.fence.check(epoch, step)
        self.loaded = reference.sha256

    def prove(self, epoch: int, step: int, _version: int) -> EngineProof:
        self.fence.check(epoch, step)
        return EngineProof(engine=0, sha256=self.loaded, canary=_CANARY)

    def sleep(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def wake_weights(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def wake_cache(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def progress(self, epoch: int) -> EngineProgress:
        self.fence.check_epoch(epoch)
        self.tokens += 1
        return EngineProgress(steps=self.tokens, prompt_tokens=self.tokens)


class StandInRank(_StandIn):
    """Publishes adapters and checkpoints of a few bytes; the first of them writes."""

    rank = 0

    def attach(self, epoch: int, _identity: str) -> RankStatus:
        self.fence.enter(epoch)
        return RankStatus(same=True, group="")

    def rendezvous(self, epoch: int) -> tuple[str, int]:
        self.fence.check_epoch(epoch)
        return "localhost", 1

    def connect(self, epoch: int, _address: tuple[str, int], _group: str, rank: int, _ranks: int) -> None:
        self.fence.check_epoch(epoch)
        self.rank = rank

    def set_canary(self, epoch: int, step: int, _canary: TrajectoryRef) -> list[float]:
        self.fence.check(epoch, step)
        return [0.0] * len(_CANARY)

    def update(self, epoch: int, step: int, updates: list[RankUpdate]) -> UpdateReport:
        self.fence.check(epoch, step)
        rows = sum(len(batch) for update in updates for batch in update.micro_batches)
        metrics = {f"policy/{name}": 0.5 for name in _METRICS} | {"policy/trained_tokens": float(rows)}
        return UpdateReport(skipped=0, metrics=metrics, own_seconds=0.0)

    def logprob_digest(self, epoch: int, step: int, _orders: Sequence[RowOrder]) -> str:
        self.fence.check(epoch, step)
        return "the same on every rank"

    def publish(self, epoch: int, step: int, version: int) -> tuple[AdapterRef | None, AdapterFiles | None]:
        self.fence.check(epoch, step)
        if self.rank:
            return None, None
        header = json.dumps({"lora": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        weights = struct.pack("<Q", len(header)) + header + struct.pack("<f", version)
        folder, digest = self.folder.adapter(version, epoch), hashlib.sha256(weights).hexdigest()
        with publish_folder(folder) as temporary:
            (temporary / "adapter_model.safetensors").write_bytes(weights)
            (temporary / "adapter_config.json").write_text("{}")
        write_manifest(
            folder, {"version": version, "epoch": epoch, "sha256": digest, "file": "adapter_model.safetensors"}
        )
        path = self.folder.relative(folder)
        reference = AdapterRef(version=version, epoch=epoch, path=path, sha256=digest, file_sha256=digest)
        return reference, read_adapter(folder)

    def published(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def canary(self, epoch: int, step: int) -> list[float]:
        self.fence.check(epoch, step)
        return _CANARY

    def state_digest(self, epoch: int, step: int) -> str:
        self.fence.check(epoch, step)
        return f"{step:064x}"

    def save_checkpoint(self, epoch: int, step: int, commit_sha256: str, state_digest: str) -> None:
        self.fence.check(epoch, step)
        if self.rank:
            return
        folder = self.folder.checkpoint(step, epoch)
        with publish_folder(folder) as temporary:
            (temporary / "state").write_bytes(state_digest.encode())
        write_manifest(folder, {"step": step, "epoch": epoch, "commit_sha256": commit_sha256})

    def finish_checkpoint(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def offload(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)

    def onload(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)


class StandInEpisodes(_StandIn):
    """Writes finished trajectories, each with `images` images, as fast as the journal takes them."""

    journal: EpisodeJournal

    def __init__(self, name: str, folder: RunFolder, images: int) -> None:
        super().__init__(name, folder)
        self.writer = name.partition(".")[0]
        self.images = images
        self.pictures = [picture(number) for number in range(IMAGES)]
        self.kept: dict[int, ImageRef] = {}  # of this step
        self.prompt_ids = (151_655,) * _IMAGE_TOKENS * images + tuple(range(_TEXT_TOKENS))
        self.collapsed_ids = (151_655,) * images + tuple(range(_TEXT_TOKENS))

    def attach(self, epoch: int, _identity: str) -> bool:
        self.fence.enter(epoch)
        return True

    def node(self, epoch: int) -> str:
        self.fence.check_epoch(epoch)
        return str(ray.get_runtime_context().get_node_id())

    def unfinished_samples(self, epoch: int) -> int:
        self.fence.check_epoch(epoch)
        return 0

    def set_engines(self, epoch: int, step: int, _engines: dict[int, Any]) -> int:
        self.fence.check(epoch, step)
        return 0

    def begin(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        self.journal = EpisodeJournal(self.folder, step=step, epoch=epoch, writer=self.writer)
        self.kept.clear()

    def read_ahead(self, epoch: int, step: int, _indices: Sequence[int]) -> None:
        self.fence.check(epoch, step)

    def adopt(self, epoch: int, step: int, *_: Any) -> AdoptedStep:
        self.fence.check(epoch, step)
        nothing = Leftovers(trajectories=(), foreign=0, damaged=())
        return AdoptedStep(leftovers=nothing, rows={}, unfinished=0, unfinished_tokens=0)

    def make_canary(self, epoch: int, step: int, settings: PlaySettings) -> TrajectoryRef:
        self.fence.check(epoch, step)
        return self._play(TrajectoryKey(step, "canary", 0), settings)

    def play(
        self, epoch: int, step: int, order: GroupOrder, settings: PlaySettings, _attempt: int
    ) -> list[TrajectoryRef]:
        self.fence.check(epoch, step)
        return [self._play(TrajectoryKey(step, f"prompt-{order.index}", one), settings) for one in order.samples]

    def seal(self, epoch: int, step: int) -> SealedStep:
        self.fence.check(epoch, step)
        return self.journal.seal()

    def close(self) -> None:
        """Nothing to end."""

    def _play(self, key: TrajectoryKey, settings: PlaySettings) -> TrajectoryRef:
        version, digest = settings.adapter_version or 0, settings.adapter_sha256
        first = hash(key.prompt_id)
        turn = Turn(
            prompt_ids=self.prompt_ids,
            collapsed_ids=self.collapsed_ids,
            response_ids=tuple(range(key.sample, key.sample + _RESPONSE_TOKENS)),
            logprobs=(-0.5,) * _RESPONSE_TOKENS,
            images=tuple(self._image((first + number) % IMAGES) for number in range(self.images)),
            adapter_version=version,
            adapter_sha256=digest,
            stop=StopReason.STOP,
        )
        reward = float(key.sample % 2)
        trajectory = Trajectory(
            key=key,
            turns=(turn,),
            reward=reward,
            rewards={"exact": reward},
            end=EpisodeEnd.TERMINATED,
            seed=key.sample,
            text=("an answer of some words",),
            answer="another answer",
        )
        return self.journal.finished(trajectory, image_patches=4 * _IMAGE_TOKENS * self.images)

    def _image(self, number: int) -> ImageRef:
        if number not in self.kept:
            self.kept[number] = self.journal.image(self.pictures[number])
        return self.kept[number]


@dataclass(slots=True)
class StandInHiring(Hiring):
    """Hires stand-ins, through the same placement."""

    images: int = 1

    def begin_engines(self) -> None:
        """They start in no time."""

    def engine(self, number: int) -> Member:
        actor = self._stand_in("engine", number, StandInEngine)
        return Member(number, actor, actor.start.remote())

    def rank(self, number: int) -> Member:
        return Member(number, self._stand_in("rank", number, StandInRank))

    def episode_worker(self, number: int) -> Member:
        return Member(number, self._stand_in("w", number, StandInEpisodes, self.images))

    def standby(self) -> None:
        """None is kept: nothing here dies."""

    def _stand_in(self, kind: str, number: int, actor_class: type, *arguments: Any) -> Any:
        bundle = None if kind == "w" else self.placement.layout.bundle(kind, number)
        return self.placement.start(kind, number, actor_class, self.folder, *arguments, bundle=bundle, environment={})
