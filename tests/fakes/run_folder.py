"""Builds a small, healthy run folder with the real journal, step by step, without a model."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argusrl.journal.commits import Commit, CommitChain, CommittedTrajectory, metrics_line
from argusrl.journal.episodes import EpisodeJournal, SealedStep
from argusrl.journal.epochs import Epoch, claim_epoch, newest_epoch
from argusrl.journal.records import Partial
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import write_manifest
from argusrl.storage.publish import append_line, publish_file, publish_folder
from argusrl.storage.sealed_json import read_sealed
from argusrl.types import (
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


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary folder in memory where there is one: thousands of fsyncs are too slow for unit tests on a disk."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def image(number: int = 0) -> Image:
    return Image(data=f"encoded image {number}".encode() * 3, width=8, height=6 + number)


def turn(adapter: AdapterRef, *images: ImageRef, ids: tuple[int, ...] = (7, 8, 9)) -> Turn:
    return Turn(
        prompt_ids=(1, 2, 2, 3),
        collapsed_ids=(1, 2, 3),
        response_ids=ids,
        logprobs=tuple(-0.1 * (index + 1) for index in range(len(ids))),
        images=images,
        adapter_version=adapter.version,
        adapter_sha256=adapter.sha256,
        stop=StopReason.STOP,
        action="left",
    )


def trajectory(key: TrajectoryKey, *turns: Turn, reward: float = 0.5) -> Trajectory:
    return Trajectory(
        key=key,
        turns=turns,
        reward=reward,
        rewards={"exact": reward},
        end=EpisodeEnd.TERMINATED,
        seed=2**63 + key.sample,
        text=("go left",),
        answer="left",
        info={"row": 3, "nested": {"list": [1, 2.5, None, "x"]}},
        seconds=0.25,
    )


def safetensors_bytes(values: list[float]) -> bytes:
    """A safetensors file with one float32 tensor."""
    size = 4 * len(values)
    header = json.dumps({"lora": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values)


def publish_adapter(run: RunFolder, version: int, epoch: int) -> AdapterRef:
    """An adapter folder with the manifest every reader expects; its bytes depend on the version alone."""
    folder = run.adapter(version, epoch)
    weights = safetensors_bytes([version + 0.5] * 4)
    with publish_folder(folder) as temporary:
        (temporary / "adapter_model.safetensors").write_bytes(weights)
        (temporary / "adapter_config.json").write_text('{"r": 8}')
    ref = AdapterRef(
        version=version,
        epoch=epoch,
        path=run.relative(folder),
        sha256=digest(f"logical {version}"),
        file_sha256=hashlib.sha256(weights).hexdigest(),
    )
    write_manifest(
        folder,
        {
            "version": version,
            "epoch": epoch,
            "sha256": ref.sha256,
            "file": "adapter_model.safetensors",
            "base_model": "tiny",
        },
    )
    return ref


class RunBuilder:
    """A driver without a model. `open()` claims an epoch and commits the root; `step()` commits one step."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root / "run")
        config = {"run": {"seed": 0}, "algorithm": {"num_steps": 3}}
        self.config_sha256 = digest(json.dumps(config, sort_keys=True, separators=(",", ":")))
        fields = {"format_version": 1, "sha256": self.config_sha256, "config": config}
        publish_file(self.run.config, json.dumps(fields, indent=1).encode())  # JSON is YAML, too
        self.reopen()
        self.chain.append(
            Commit(
                step=0,
                epoch=self.epoch.number,
                outcome="initial",
                adapter=publish_adapter(self.run, 0, self.epoch.number),
                state_digest=digest("state 0"),
                config_sha256=self.config_sha256,
            )
        )

    @classmethod
    def attach(cls, root: Path) -> RunBuilder:
        """The same driver in another process: holds the newest epoch, writes nothing by itself."""
        builder = cls.__new__(cls)
        builder.run = RunFolder(root / "run")
        builder.config_sha256 = json.loads(builder.run.config.read_bytes())["sha256"]
        newest = newest_epoch(builder.run)
        builder.epoch = Epoch(builder.run, newest, read_sealed(builder.run.epoch(newest))["nonce"])
        builder.chain = CommitChain(builder.run, builder.epoch)
        return builder

    def reopen(self) -> None:
        """What a new driver does: claim the next epoch."""
        self.epoch: Epoch = claim_epoch(self.run)
        self.chain = CommitChain(self.run, self.epoch)

    @property
    def head(self) -> Commit:
        head = self.chain.head()
        assert head is not None
        return head

    def journal(self, step: int, writer: str = "w0") -> EpisodeJournal:
        return EpisodeJournal(self.run, step, self.epoch.number, writer)

    def play(
        self,
        journal: EpisodeJournal,
        prompt: str,
        sample: int,
        reward: float = 0.5,
        adapter: AdapterRef | None = None,
    ) -> TrajectoryRef:
        """One episode with one image shared by the group and one of its own."""
        key = TrajectoryKey(journal.step, prompt, sample)
        adapter = adapter or self.head.adapter
        journal.started(
            key,
            attempt=0,
            seed=sample,
            adapter_version=adapter.version,
            adapter_sha256=adapter.sha256,
            environment={"kind": "single_turn"},
        )
        journal.sync()
        first = turn(adapter, journal.image(image(0)))
        span = Partial(
            key=key,
            turn=0,
            offset=0,
            ids=(7, 8),
            logprobs=(-0.1, -0.2),
            adapter_version=adapter.version,
            adapter_sha256=adapter.sha256,
        )
        journal.partial(span)
        journal.turn(key, 0, first)
        second = turn(adapter, journal.image(image(1 + sample)), ids=(5, 6))
        return journal.finished(trajectory(key, first, second, reward=reward), image_patches=24)

    def commit(
        self, step: int, sealed: list[SealedStep], refs: list[TrajectoryRef], outcome: str = "updated"
    ) -> Commit:
        segments = tuple(segment for item in sealed for segment in item.segments)
        places = {segment.path: index for index, segment in enumerate(segments)}
        return Commit(
            step=step,
            epoch=self.epoch.number,
            outcome=outcome,
            adapter=publish_adapter(self.run, step, self.epoch.number),
            state_digest=digest(f"state {step}"),
            config_sha256=self.config_sha256,
            segments=segments,
            trajectories=tuple(
                CommittedTrajectory(
                    key=ref.key,
                    segment=places[ref.segment],
                    offset=ref.offset,
                    length=ref.length,
                    reward=ref.reward,
                )
                for ref in refs
            ),
            prompt_position=step,
            metrics={"reward/mean": 0.5, "policy/grad_norm": 1.25, "adapter/version": step},
        )

    def step(self, *, checkpoint: bool = True) -> Commit:
        """Play, commit, note the metrics, checkpoint."""
        step = self.head.step + 1
        journal = self.journal(step)
        refs = [self.play(journal, "p0", sample, reward=float(sample)) for sample in range(2)]
        commit = self.chain.append(self.commit(step, [journal.seal()], refs))
        self.note(commit)
        if checkpoint:
            self.checkpoint(commit)
        return commit

    def note(self, commit: Commit) -> None:
        append_line(self.run.metrics, metrics_line(commit))

    def checkpoint(self, commit: Commit) -> Path:
        folder = self.run.checkpoint(commit.step, self.epoch.number)
        with publish_folder(folder) as temporary:
            (temporary / "shard.distcp").write_bytes(b"optimizer state" * 4)
        fields = {
            "step": commit.step,
            "epoch": self.epoch.number,
            "commit_sha256": self.chain.read_bytes(commit.step)[1],
            "state_digest": commit.state_digest,
            "world_size": 1,
        }
        write_manifest(folder, fields)
        return folder
