"""The actor that holds one training rank. It reads its rows from the journal; the driver sends places and scalars."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from argusrl.config.sections import Config
from argusrl.errors import ArgusError, CorruptionError, ModelError, NumericsError, SampleError, WorkerError
from argusrl.journal.episodes import read_trajectory
from argusrl.journal.images import read_image
from argusrl.policy.schedule import learning_rate
from argusrl.policy.settings import PolicySettings
from argusrl.policy.stats import Compute
from argusrl.recovery.failpoints import How
from argusrl.storage.layout import RunFolder
from argusrl.training.fence import Fence
from argusrl.training.peaks import rank_peak_bytes
from argusrl.training.process import Lease, import_meanwhile, start_logging
from argusrl.training.shooting import shoot_oneself
from argusrl.types import AdapterFiles, AdapterRef, TrajectoryRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """Train on this trajectory with this advantage."""

    reference: TrajectoryRef
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUpdate:
    """One optimizer update as one rank sees it."""

    micro_batches: tuple[tuple[RowOrder, ...], ...]
    denominator_tokens: int  # of the whole update, all ranks
    recorded_ranks: tuple[tuple[tuple[RowOrder, ...], ...], ...] = ()  # a replay for another number of ranks: all rows


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What the updates of a step did; the same on every rank."""

    skipped: int  # updates without signal: the optimizer was not touched
    metrics: dict[str, float]
    own_seconds: float  # of this rank alone, without waiting for others: it read its rows and hashed its state
    peak_bytes: int = 0  # of its memory so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a driver finds when it attaches to a rank."""

    same: bool  # made for this very run, config and code
    group: str  # the process group it can work in; "" if it has none


class RankWorker:
    """Holds one Policy. All ranks get the same calls in the same order; every call carries (epoch, step)."""

    def __init__(
        self, name: str, settings: PolicySettings, config: Config, folder: RunFolder, identity: str, logs: Path
    ) -> None:
        start_logging(logs / f"{name}.log")
        import_meanwhile("argusrl.policy.policy")  # while the engines start, which the first reply waits for

        self.settings, self.config, self.folder, self.identity = settings, config, folder, identity
        self.fence = Fence()
        self.lease = Lease(config.recovery.orphan_seconds)
        self.policy: Any = None
        self._group = ""
        self._rank = -1
        self._suspects: tuple[str, ...] = ()  # what is being computed
        self._store: Any = None
        self._canary: tuple[Any, list[bytes]] | None = None
        self._checkpoint: Any = None
        self._publication: Any = None

    @ray.method(concurrency_group="beat")
    def beat(self, epoch: int) -> None:
        """Answers at once, whatever the rank is doing."""
        self.fence.check_epoch(epoch)
        self.lease.renew()

    @ray.method(concurrency_group="beat")
    def die(self, epoch: int, shot: int, how: How) -> None:
        """A rehearsal's shot, whatever the rank is doing."""
        self.fence.check_epoch(epoch)
        shoot_oneself(how)

    def attach(self, epoch: int, identity: str) -> RankStatus:
        """Take a driver's first call. A call of the driver before it has ended by then."""
        self.fence.enter(epoch)
        self.lease.renew()
        return RankStatus(same=identity == self.identity, group=self._group)

    def rendezvous(self, epoch: int) -> tuple[str, int]:
        """Host the store where the next group meets; (host, port). It lives as long as that group's first rank."""
        from argusrl.policy.group import host_store

        self.fence.check_epoch(epoch)
        host = ray.util.get_node_ip_address()
        self._store = host_store(host)
        return host, self._store.port

    def connect(self, epoch: int, address: tuple[str, int], group: str, rank: int, ranks: int) -> None:
        """Leave the group before, join this one, and build the model anew. Raises ModelError, ClusterError."""
        from argusrl.policy.group import connect
        from argusrl.policy.policy import Policy

        self.fence.check_epoch(epoch)
        self._group = ""
        self._checkpoint = None
        if self.policy is not None:
            self.policy.close()
            self.policy = None
        host, port = address
        connect(
            rank=rank,
            world=ranks,
            host=host,
            port=port,
            name=group,
            device=self.settings.device,
            timeout_seconds=self.config.training.collective_timeout_seconds,
        )
        self.policy = Policy(self.settings)
        self._group, self._rank = group, rank

    def update(self, epoch: int, step: int, updates: list[RankUpdate]) -> UpdateReport:
        """Run the step's optimizer updates. Raises SampleError or NumericsError where numbers are not finite."""
        self._enter(epoch, step)
        from argusrl.policy.policy import ANOTHER_REFUSED

        try:
            started = time.monotonic()
            self.policy.check_state()
            checked = time.monotonic()
            report = self._update(step, updates)
            updated = time.monotonic()
            self.policy.seal_state()
            hashing_seconds = checked - started + time.monotonic() - updated
        except CorruptionError as error:
            self._group = ""
            text = f"rank {self._rank}: {error.message.removeprefix(f'rank {self._rank}: ')}"
            raise WorkerError(text, "its state is restored from storage") from error
        except ModelError as error:
            self.policy.discard_gradients()
            own = () if error.message == ANOTHER_REFUSED else self._suspects
            raise SampleError(f"step {step}: {error.message}", error.hint, own) from error
        except ArgusError:
            self.policy.discard_gradients()  # what half an update left must not leak into the next one
            raise
        except Exception:
            self._group = ""  # a collective failed: nobody can work in this group any more
            raise
        self._note_suspects(step, ())
        return replace(report, own_seconds=report.own_seconds + hashing_seconds, peak_bytes=rank_peak_bytes())

    def _update(self, step: int, updates: list[RankUpdate]) -> UpdateReport:
        algorithm = self.config.algorithm
        stats, done, reading_seconds = [], [], 0.0
        images: dict[str, bytes] = {}  # of the step: a group's rows show the same ones
        for number, update in enumerate(updates):
            started = time.monotonic()
            rows = _Rows(partial(self._row, images=images))
            batches = [[rows.read(order) for order in batch] for batch in update.micro_batches]
            recorded = [[[rows.read(order) for order in b] for b in rank] for rank in update.recorded_ranks]
            reading_seconds += time.monotonic() - started
            if recorded:
                stats.append(self.policy.forward_backward_as(recorded, update.denominator_tokens))
            else:
                note = partial(self._begin_batch, step, rows)
                stats.append(self.policy.forward_backward(batches, update.denominator_tokens, note))
            rate = learning_rate(
                self.config.optimizer,
                step=step,
                update=number,
                updates_per_step=algorithm.updates_per_step,
                num_steps=algorithm.num_steps,
            )
            done.append(self.policy.optimizer_step(rate))
            if (done[-1].skipped or "").startswith("non-finite"):
                raise self._not_finite(f"step {step}, update {number}", done[-1], rows.begun)
        return _report(stats, done, self.policy.finish_step(), reading_seconds)

    def _begin_batch(self, step: int, rows: _Rows, batch: Sequence[Any]) -> None:
        rows.begun.append(rows.keys(batch))
        self._note_suspects(step, rows.begun[-1])

    def _not_finite(self, where: str, done: Any, keys: list[tuple[str, ...]]) -> NumericsError:
        """What to raise for an update that was left out; Adam is untouched."""
        if done.broken is None or done.broken.micro_batch >= len(keys):
            return NumericsError(
                f"the gradient of {where} is not finite (norm {done.grad_norm})",
                "lower optimizer.learning_rate, or look for a reward or log-probability that is not finite",
            )
        # Every rank knows where it began; only that rank knows the samples.
        own = keys[done.broken.micro_batch] if done.broken.rank == self._rank else ()
        return SampleError(f"{where}: {done.broken.what} is not finite on rank {done.broken.rank}", "", own)

    def logprob_digest(self, epoch: int, step: int, orders: list[RowOrder]) -> str:
        """Of the log-probabilities of these rows; all ranks call it, each with its own."""
        self._enter(epoch, step)
        digest: str = self.policy.logprob_digest([self._row(order, {}) for order in orders])
        return digest

    def _note_suspects(self, step: int, keys: Sequence[str]) -> None:
        """Say what is being computed, for the driver of a rank that dies in it. It has to survive this process only."""
        self._suspects = tuple(keys)
        path = self.folder.suspect(self._rank)
        with suppress(OSError):  # a full disk is noticed where it matters
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"epoch": self.fence.epoch, "step": step, "keys": self._suspects}))

    def _enter(self, epoch: int, step: int) -> None:
        self.fence.check(epoch, step)
        if not self._group:
            raise WorkerError(f"rank {self._rank} is in no group", "it was made anew and joins the next one")

    def publish(self, epoch: int, step: int, version: int) -> tuple[AdapterRef, AdapterFiles | None]:
        """The adapter, of rank 0 with its files in memory; its write-once folder is written meanwhile.

        Raises NumericsError.
        """
        self._enter(epoch, step)
        self._publication = self.policy.publish_adapter(self.folder.adapter(version, epoch), version, epoch)
        return self._publication.ref, self._publication.files

    def published(self, epoch: int, step: int) -> None:
        """Returns when the folder is durable. Raises StorageError, FileExistsError."""
        self._enter(epoch, step)
        publication, self._publication = self._publication, None
        publication.result(self.config.cluster.call_timeout_seconds)

    def set_canary(self, epoch: int, step: int, reference: TrajectoryRef) -> list[float]:
        """Take the run's fixed sequence; [R] log-probabilities of its reply under the base model."""
        self._enter(epoch, step)
        turn = read_trajectory(self.folder, reference).turns[0]
        self._canary = (turn, [read_image(self.folder, ref) for ref in turn.images])
        return self._score("current" if self.settings.kind == "full" else "base")

    def canary(self, epoch: int, step: int) -> list[float]:
        """[R] the canary's log-probabilities now."""
        self._enter(epoch, step)
        return self._score("current")

    def state_digest(self, epoch: int, step: int) -> str:
        """Logical digest of adapter, Adam and RNG; also while they are offloaded."""
        self._enter(epoch, step)
        digest: str = self.policy.state_digest()
        return digest

    def _score(self, adapter: str) -> list[float]:
        assert self._canary is not None
        turn, images = self._canary
        values: list[float] = self.policy.canary(turn.prompt_ids, images, turn.response_ids, adapter=adapter)
        return values

    def save_checkpoint(self, epoch: int, step: int, commit_sha256: str, state_digest: str) -> None:
        """Stage the state after `step` and write it in the background. Raises what the write before raised."""
        self._enter(epoch, step)
        self.finish_checkpoint(epoch, step)
        fields = {"step": step, "epoch": epoch, "commit_sha256": commit_sha256, "state_digest": state_digest}
        self._checkpoint = self.policy.save_checkpoint(self.folder.checkpoint(step, epoch), fields)

    def finish_checkpoint(self, epoch: int, step: int) -> None:
        """Wait until the checkpoint under way is durable."""
        self._enter(epoch, step)
        if self._checkpoint is not None:
            under_way, self._checkpoint = self._checkpoint, None
            under_way.result(timeout=self.config.cluster.call_timeout_seconds)

    def load_checkpoint(self, epoch: int, step: int, folder: str) -> None:
        """Become the state of a checkpoint. Raises CorruptionError."""
        self._enter(epoch, step)
        self.policy.load_checkpoint(Path(folder))

    def load_adapter(self, epoch: int, step: int, folder: str) -> float:
        """Take a committed adapter's tensors, after a replay that was not exact; the largest |difference| to it."""
        self._enter(epoch, step)
        difference: float = self.policy.load_adapter(Path(folder))
        return difference

    def offload(self, epoch: int, step: int) -> None:
        self._enter(epoch, step)
        self.policy.offload()

    def onload(self, epoch: int, step: int) -> None:
        self._enter(epoch, step)
        self.policy.onload()

    def _row(self, order: RowOrder, images: dict[str, bytes]) -> Any:
        """Reads the images that are not in `images` yet, and puts them there."""
        from argusrl.policy.rows import Row

        trajectory = read_trajectory(self.folder, order.reference)
        for ref in (ref for turn in trajectory.turns for ref in turn.images):
            if ref.sha256 not in images:
                images[ref.sha256] = read_image(self.folder, ref)
        return Row.of(trajectory, order.advantage, images)


class _Rows:
    """Rows as they are read, and the samples they come from."""

    def __init__(self, read: Callable[[RowOrder], Any]) -> None:
        self._read = read
        self._keys: dict[int, str] = {}
        self.begun: list[tuple[str, ...]] = []  # samples of each micro-batch that was begun

    def read(self, order: RowOrder) -> Any:
        row = self._read(order)
        self._keys[id(row)] = f"{order.reference.key.prompt_id}/{order.reference.key.sample}"
        return row

    def keys(self, rows: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self._keys[id(row)] for row in rows)


def _report(stats: list[Any], done: list[Any], work: Compute, reading_seconds: float) -> UpdateReport:
    """Means over the updates that computed something; the gap of the first one, before weights moved."""
    active = [one for one in stats if one.tokens]
    tokens = sum(one.tokens for one in active)

    def mean(name: str) -> float:
        return sum(getattr(one, name) * one.tokens for one in active) / tokens if tokens else 0.0

    first = active[0] if active else None
    norms = [one.grad_norm for one in done if one.skipped is None]
    return UpdateReport(
        skipped=sum(one.skipped is not None for one in done),
        metrics={
            "policy/loss": sum(one.loss for one in stats) / len(stats),
            "policy/entropy": mean("entropy"),
            "policy/clip_share": mean("clip_share"),
            "policy/importance_cut_share": mean("cut_share"),
            "policy/logprob_gap_max": first.gap_max if first else 0.0,
            "policy/logprob_gap_mean": first.gap_mean if first else 0.0,
            "policy/grad_norm": max(norms, default=0.0),
            "policy/learning_rate": done[-1].learning_rate,
            "policy/trained_tokens": sum(one.row_tokens for one in stats),
            "policy/kl": mean("kl"),
            **_work_metrics(work),
        },
        own_seconds=reading_seconds,
    )


def _work_metrics(work: Compute) -> dict[str, float]:
    """What was computed against the least needed; 1 where nothing was."""

    def factor(computed: int, needed: int) -> float:
        return computed / needed if needed else 1.0

    return {
        "compute/redundancy_training": factor(work.tokens, work.unique_tokens),
        "compute/redundancy_vision": factor(work.patches, work.unique_patches),
        "compute/rows_factor_training": factor(work.row_tokens, work.unique_tokens),
        "compute/rows_factor_vision": factor(work.row_patches, work.unique_patches),
        "compute/padding_share": work.padding / max(1, work.places),
    }
