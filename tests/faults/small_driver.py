"""A driver without a model: the real journal, commits and storage around arithmetic that takes no time.

Everything it computes is a pure function of what is committed, so a run that was disturbed must end with the logical
content of one that was not. It tells `say` what it believes to be durable: nobody may ever lose that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.commits import (
    Adopted,
    Commit,
    CommitChain,
    CommittedTrajectory,
    metrics_line,
    rebuild_metrics,
)
from argusrl.journal.episodes import EpisodeJournal, SealedStep, read_finished
from argusrl.journal.epochs import Epoch, claim_epoch
from argusrl.journal.retention import collect_garbage, sweep_temporaries
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import write_manifest
from argusrl.storage.publish import append_line, publish_file, publish_folder
from argusrl.types import AdapterRef, EpisodeEnd, Image, StopReason, Trajectory, TrajectoryKey, TrajectoryRef, Turn

GROUP_SIZE = 2
CONFIG = {"algorithm": {"num_steps": 2, "group_size": GROUP_SIZE, "prompts_per_step": 1}}
Say = Callable[..., None]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


CONFIG_SHA256 = sha256(json.dumps(CONFIG, sort_keys=True, separators=(",", ":")))
_CONFIG_FILE = json.dumps({"format_version": 1, "sha256": CONFIG_SHA256, "config": CONFIG}).encode()  # YAML, too


def tensors(state: str) -> bytes:
    """A safetensors file of one float32 tensor made of a state's digest."""
    header = b'{"lora":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    values = [byte / 256 for byte in bytes.fromhex(state)[:4]]
    return struct.pack("<Q", len(header)) + header + struct.pack("<4f", *values)


def reward_of(key: TrajectoryKey) -> float:
    return float((key.step + key.sample) % 3)


def next_state(state: str, rewards: list[float]) -> str:
    """What an update makes of the state before it and the rewards of the group, in order of samples."""
    return sha256(f"{state} {rewards}")


def play(journal: EpisodeJournal, key: TrajectoryKey, adapter: AdapterRef) -> TrajectoryRef:
    """One episode of one turn that shows an image. Durable on return."""
    proof = {"adapter_version": adapter.version, "adapter_sha256": adapter.sha256}
    journal.started(key, attempt=0, seed=key.sample, environment={}, **proof)
    journal.sync()
    image = journal.image(Image(data=f"image {key.step}".encode(), width=8, height=6))
    ids = tuple(int(adapter.sha256[place : place + 2], 16) for place in range(0, 8, 2))
    turn = Turn(
        prompt_ids=(1, 2, 3), collapsed_ids=(1, 3), response_ids=ids, logprobs=(-0.5,) * len(ids), images=(image,),
        stop=StopReason.STOP, **proof,
    )  # fmt: skip
    trajectory = Trajectory(
        key=key, turns=(turn,), reward=reward_of(key), rewards={"exact": reward_of(key)}, end=EpisodeEnd.TERMINATED,
        seed=key.sample, seconds=float(journal.epoch),
    )  # fmt: skip
    ref = journal.finished(trajectory, image_patches=4)
    journal.sync()
    return ref


def publish_adapter(run: RunFolder, version: int, epoch: int, state: str) -> AdapterRef:
    folder = run.adapter(version, epoch)
    weights = tensors(state)
    with publish_folder(folder) as temporary:
        (temporary / "adapter_model.safetensors").write_bytes(weights)
    digest, file_digest = sha256(f"adapter {state}"), hashlib.sha256(weights).hexdigest()
    name = {"version": version, "epoch": epoch, "sha256": digest, "file": "adapter_model.safetensors"}
    write_manifest(folder, name)
    path = run.relative(folder)
    return AdapterRef(version=version, epoch=epoch, path=path, sha256=digest, file_sha256=file_digest)


class SmallDriver:
    """One attempt of a run: claim, resume, step until the end. `rollout` may be replaced."""

    def __init__(self, run: RunFolder, say: Say, *, steps: int = 2) -> None:
        self.run, self.say, self.steps = run, say, steps
        self.clock = 0.0
        self.epoch: Epoch
        self.chain: CommitChain
        self.head: Commit

    def drive(self) -> None:
        """Until the run is complete. Raises whatever ends the attempt."""
        with suppress(FileExistsError):
            publish_file(self.run.config, _CONFIG_FILE)
        attempt = next_attempt(self.run)
        self.epoch = claim_epoch(self.run)
        self.say("claimed", self.epoch.number)
        sweep_temporaries(self.run)
        self.chain = CommitChain(self.run, self.epoch)
        head = self.chain.head()
        self.head = self._append(self._root()) if head is None else head
        self.say("resumed", self.head.step)
        rebuild_metrics(self.run)
        while self.head.step < self.steps:
            self.step(self.head.step + 1)
        verdict = Verdict(outcome="complete", exit_code=0, reason="all steps are committed", step=self.head.step)
        write_verdict(self.run, attempt, verdict)
        self.say("complete", self.head.step)

    def step(self, step: int) -> None:
        refs, sealed = self.rollout(step)
        state = next_state(self.head.state_digest, [ref.reward for ref in refs])
        adapter = publish_adapter(self.run, step, self.epoch.number, state)
        commit = self._append(self._commit(step, state, adapter, refs, sealed))
        ours = commit.epoch == self.epoch.number
        self.head = commit
        if not ours:
            rebuild_metrics(self.run)
            return
        append_line(self.run.metrics, metrics_line(commit))
        append_line(self.run.events, {"time": "2026-01-01T00:00:00.000+00:00", "kind": "step", "message": str(step)})
        self._checkpoint(commit)
        collect_garbage(self.run, self.chain, keep_checkpoints=1, keep_adapters=2, from_step=max(0, step - 1))

    def rollout(self, step: int) -> tuple[list[TrajectoryRef], list[SealedStep]]:
        journal = EpisodeJournal(self.run, step, self.epoch.number, "w0")
        refs = {ref.key.sample: ref for ref in journal.adopt(self.head.adapter.sha256).trajectories}
        for sample in range(GROUP_SIZE):
            if sample not in refs:
                refs[sample] = play(journal, TrajectoryKey(step, "p0", sample), self.head.adapter)
                self.say("finished", step, sample, self.epoch.number)
        return [refs[sample] for sample in range(GROUP_SIZE)], [journal.seal()]

    def _append(self, commit: Commit) -> Commit:
        try:
            there = self.chain.append(commit)
        except Adopted as adopted:
            return adopted.commit
        self.say("committed", there.step, there.nonce)
        return there

    def _root(self) -> Commit:
        state = sha256("the state before the first step")
        adapter = publish_adapter(self.run, 0, self.epoch.number, state)
        return Commit(
            step=0, epoch=self.epoch.number, outcome="initial", adapter=adapter, state_digest=state,
            config_sha256=CONFIG_SHA256, time=self.clock,
        )  # fmt: skip

    def _commit(
        self, step: int, state: str, adapter: AdapterRef, refs: list[TrajectoryRef], sealed: list[SealedStep]
    ) -> Commit:
        segments = tuple(segment for item in sealed for segment in item.segments)
        places = {segment.path: index for index, segment in enumerate(segments)}
        return Commit(
            step=step,
            epoch=self.epoch.number,
            outcome="updated",
            adapter=adapter,
            state_digest=state,
            config_sha256=CONFIG_SHA256,
            segments=segments,
            trajectories=tuple(
                CommittedTrajectory(
                    key=ref.key, segment=places[ref.segment], offset=ref.offset, length=ref.length, reward=ref.reward
                )
                for ref in refs
            ),
            prompt_position=step,
            metrics={"reward/mean": sum(ref.reward for ref in refs) / GROUP_SIZE},
            time=self.clock,
        )

    def _checkpoint(self, commit: Commit) -> None:
        folder = self.run.checkpoint(commit.step, self.epoch.number)
        with publish_folder(folder) as temporary:
            (temporary / "shard.distcp").write_bytes(commit.state_digest.encode())
        digest = self.chain.read_bytes(commit.step)[1]
        name = {"step": commit.step, "epoch": self.epoch.number}
        write_manifest(folder, {**name, "commit_sha256": digest, "state_digest": commit.state_digest})
        self.say("checkpointed", commit.step)


def logical_content(run: RunFolder) -> list[dict[str, Any]]:
    """What a run says, without who wrote it, when, and where it lies."""
    chain, content = CommitChain(run), []
    head = chain.head()
    for step in range(head.step + 1 if head else 0):
        commit = chain.read(step)
        finished = [finished_of(run, commit, number).trajectory for number in range(len(commit.trajectories))]
        content.append(
            {
                "step": step,
                "outcome": commit.outcome,
                "state": commit.state_digest,
                "adapter": (commit.adapter.version, commit.adapter.sha256, commit.adapter.file_sha256),
                "position": commit.prompt_position,
                "metrics": commit.metrics,
                "trajectories": [
                    (one.key, one.reward, one.seed, [(turn.response_ids, turn.logprobs) for turn in one.turns])
                    for one in finished
                ],
            }
        )
    return content


def finished_of(run: RunFolder, commit: Commit, number: int) -> Any:
    """The record behind trajectory `number` of a commit."""
    item = commit.trajectories[number]
    return read_finished(run, commit.segments[item.segment].path, item.offset, item.length)


def broken_promises(run: RunFolder, said: list[list[Any]]) -> list[str]:
    """What drivers called durable and the run folder does not have."""
    chain, broken = CommitChain(run), []
    head = chain.head()
    newest = -1 if head is None else head.step
    for kind, *details in said:
        if kind == "committed":
            step, nonce = details
            if step > newest or chain.read(step).nonce != nonce:
                broken.append(f"commit {step} ({nonce}) is lost, the head is {newest}")
        elif kind == "finished" and details[0] <= newest:
            step, sample, epoch = details
            kept = [
                finished_of(run, chain.read(step), number).trajectory
                for number in range(len(chain.read(step).trajectories))
            ]
            if not any(one.key.sample == sample and one.seconds <= epoch for one in kept):
                broken.append(f"sample {sample} of step {step}, finished in epoch {epoch}, was played again")
    return broken
