"""The trainable model on one rank.

Every method is a collective: all ranks call it alike and with equal arguments, except for the rows, of which each
rank has its own.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from argusrl.algorithms.kl import with_kl
from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss
from argusrl.errors import CorruptionError, ModelError
from argusrl.policy import adapter, checkpoint, sharding
from argusrl.policy.attention import choose_strategy
from argusrl.policy.build import BuildScorer, build_scorer
from argusrl.policy.inputs import InputBuilder, PackedBatch
from argusrl.policy.lora import ADAPTER, peft_name, without_adapter
from argusrl.policy.model import packs, torch_dtype
from argusrl.policy.optimizer import gradient_norm, make_adamw
from argusrl.policy.rows import Row, RowTurn
from argusrl.policy.seal import Seal
from argusrl.policy.settings import PolicySettings
from argusrl.policy.stats import Broken, Compute, Stats, UpdateStats
from argusrl.policy.step_work import ImageFeatures, StepWork, of_all
from argusrl.policy.tally import Tally, agree, gather

_ROOT = "model."  # the Scorer's attribute that holds the model

ANOTHER_REFUSED = "another rank refused its rows"


class Policy:
    """Build it after group.connect. Raises ModelError for a model or adapter that cannot be used."""

    def __init__(self, settings: PolicySettings, build: BuildScorer = build_scorer) -> None:
        self.settings = settings
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        self._device = torch.device(settings.device)
        self._clip = ClipSettings(settings.clip_low, settings.clip_high, settings.importance_cap)
        self._banned = torch.tensor(settings.banned_ids, dtype=torch.long, device=self._device)
        self._scorer, self._watch = build(settings, self.rank, self.world)
        attention = choose_strategy(self._device, torch_dtype(settings.dtype))
        self._inputs = InputBuilder(self._scorer.base, settings, attention)
        self._canary_features: dict[bytes, ImageFeatures] = {}
        self._works: dict[int, StepWork] = {}  # of the step under way, by the rank that has or had the rows
        named = {name.removeprefix(_ROOT): p for name, p in self._scorer.named_parameters() if p.requires_grad}
        self._optimizer = make_adamw([named[name] for name in sorted(named)], settings)
        self.state = checkpoint.TrainingState(named, self._optimizer)
        self._checkpoints = checkpoint.CheckpointWriter(sharding.make_mesh("cpu"))
        self._seal: Seal | None = None
        self._broken: Broken | None = None  # what forward_backward met since the last update
        self._offloaded = False
        torch.manual_seed(settings.seed)  # last: the rank that reads the model draws more numbers than the others

    # ------------------------------------------------------------------ learning

    def forward_backward(
        self,
        micro_batches: Sequence[Sequence[Row]],
        denominator_tokens: int,
        begun: Callable[[Sequence[Row]], None] = lambda _: None,
    ) -> Stats:
        """Add the gradient of one update. Ranks hand in equally many micro-batches (empty ones fill up).

        `begun` hears of each micro-batch before it is computed: if this process dies in it, its rows are suspects.

        The loss is the sum over all ranks' tokens divided by `denominator_tokens`, the response tokens of the whole
        update; so neither ranks nor micro-batches change the gradient. With one update per step the old
        log-probability is the new one, detached; with more it is the engine's.

        NaN or Inf on any rank is named in the stats of all, and optimizer_step will update nothing. Raises ModelError
        on all ranks where one has rows that cannot be computed; call discard_gradients then.
        """
        self._require_onload()
        tally, work = Tally(self._device), self._work_of(self.rank)
        shaped = self._shaped(micro_batches)
        for number, rows in enumerate(shaped):
            begun(rows)
            self._backward(rows, self.world / max(1, denominator_tokens), tally, work)
            work.keep(self._needed_later(shaped[number + 1 :]))
        return self._noted(gather(tally, denominator_tokens))

    def forward_backward_as(self, ranks: Sequence[Sequence[Sequence[Row]]], denominator_tokens: int) -> Stats:
        """forward_backward as len(ranks) ranks did it, on the ranks there are: a replay after the cluster changed size.

        `ranks[r][m]` are the rows that recorded rank r had in micro-batch m; every rank hands in all of them and
        computes all of them. Gradients are summed in the order of the recorded ranks, then averaged, then added up
        over micro-batches, as FSDP does. Bit for bit that is what one or two recorded ranks got, where the ranks there
        are number a power of two (their equal copies average exactly); otherwise the digest of the state will tell.

        Raises ModelError as forward_backward does.
        """
        self._require_onload()
        shares = [self._shaped(micro_batches) for micro_batches in ranks]
        longest = max(len(share) for share in shares)
        tallies, works = [Tally(self._device) for _ in ranks], [self._work_of(rank) for rank in range(len(ranks))]
        total = self._take_gradients()
        for number in range(longest):
            summed: dict[str, Tensor] = {}
            for share, tally, work in zip(shares, tallies, works, strict=True):
                rows = share[number] if number < len(share) else []
                self._backward(rows, len(ranks) / max(1, denominator_tokens), tally, work)
                work.keep(self._needed_later(share[number + 1 :]))
                _accumulate(summed, self._take_gradients())
            for gradient in summed.values():
                sharding.local(gradient).div_(len(ranks))
            _accumulate(total, summed)
        for name, gradient in total.items():
            self.state.parameters[name].grad = gradient
        return self._noted(agree(tallies, denominator_tokens))

    def _work_of(self, rank: int) -> StepWork:
        """Of the next update of a rank."""
        work = self._works.setdefault(rank, StepWork())
        work.begin_update()
        return work

    def _take_gradients(self) -> dict[str, Tensor]:
        taken = {name: p.grad for name, p in self.state.parameters.items() if p.grad is not None}
        self._optimizer.zero_grad(set_to_none=True)
        return taken

    def _noted(self, stats: Stats) -> Stats:
        self._broken = self._broken or stats.broken
        return stats

    def _backward(self, rows: Sequence[Row], scale: float, tally: Tally, work: StepWork) -> None:
        """Backward of one micro-batch. FSDP averages gradients over ranks, so `scale` is ranks / denominator."""
        batch = self._pack(rows, work)
        reference = None
        if self.settings.kl_weight:
            with torch.no_grad(), without_adapter(self._scorer):
                reference, _ = self._scorer(batch, self.settings.temperature, self._banned, work)
            batch = replace(batch, runs_tower=False)  # every image has its features now
        new, entropies = self._scorer(batch, self.settings.temperature, self._banned, work)
        old = new.detach() if self.settings.updates_per_step == 1 else batch.engine
        parts = clipped_policy_loss(new, old, batch.engine, batch.advantages, self._clip)
        if reference is not None:
            parts = with_kl(parts, new, reference, self.settings.kl_weight)
        (parts.loss * scale).backward()
        gradient = self._watch.take(self.state.parameters.values())
        tally.add(batch, new.detach(), entropies, parts, sum(row.tokens for row in rows), gradient)

    def _pack(self, rows: Sequence[Row], work: StepWork | None = None) -> PackedBatch:
        """The batch on the device. Where one rank refuses its rows, all raise, before anyone waits in a forward.

        The vision tower runs on all ranks where one has an image without features.
        """
        batch, problem = None, None
        try:
            batch = self._inputs.pack(rows, work)
        except Exception as error:  # raised below, where all ranks know
            problem = error
        flags = torch.tensor([problem is not None, batch is not None and batch.runs_tower], dtype=torch.float32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        refused, tower = flags.bool().tolist()
        if batch is None or refused:
            raise problem or ModelError(ANOTHER_REFUSED)
        return replace(batch, runs_tower=tower).to(self._device)

    def _needed_later(self, micro_batches: Sequence[Sequence[Row]]) -> set[bytes] | None:
        """Images of the rest of the step; None where more updates may follow, whose images are not known yet."""
        if self.settings.updates_per_step > 1:
            return None
        return {image for rows in micro_batches for row in rows for image in row.images}

    def finish_step(self) -> Compute:
        """What all ranks computed since the last call, against the least needed; forgets the tower's outputs.

        A collective, once after the last update of a step.
        """
        own = {rank: work.share() for rank, work in self._works.items()}
        self._works = {}
        answers: list[Any] = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(answers, own)
        merged = {rank: share for answer in answers for rank, share in answer.items()}  # emulated ranks: all alike
        return of_all((merged[rank] for rank in sorted(merged)), passes=2 if self.settings.kl_weight else 1)

    def _shaped(self, micro_batches: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """As they are; for models that cannot pack one row per forward, equally many on every rank."""
        if packs(self._scorer.base.config):
            return [list(rows) for rows in micro_batches]
        single = [[row] for rows in micro_batches for row in rows]
        count = torch.tensor(len(single), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return single + [[] for _ in range(int(count) - len(single))]

    def optimizer_step(self, learning_rate: float) -> UpdateStats:
        """Clip to the global norm and update. Gradients are gone afterwards, and so is the seal of the old state.

        After NaN or Inf in what forward_backward saw, and for a gradient that is not finite or zero everywhere, it
        updates nothing: parameters, Adam's state and RNG stay as they are, bit for bit, on all ranks.
        """
        self._require_onload()
        norm, broken = gradient_norm(self.state.parameters), self._broken
        skipped = _reason_to_skip(norm, broken)
        if skipped is None:
            self._seal = None
            scale = min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
            for parameter in self.state.parameters.values():
                if parameter.grad is not None:
                    sharding.local(parameter.grad).mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.state.updates += 1
        self._clear_gradients()
        return UpdateStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped, broken=broken)

    def discard_gradients(self) -> None:
        """Forget what forward_backward added in this step, e.g. after a fault in the middle of an update."""
        self._clear_gradients()
        self._works = {}

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._broken = None

    # ------------------------------------------------------------------ publishing

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Trained tensors, whole and on the CPU, by their names in a published folder, on every rank.

        LoRA tensors keep the trainer's float32; full weights have the computation type.
        """
        whole = dict(sharding.gather_full({name: p.detach() for name, p in self.state.parameters.items()}))
        if self.settings.kind == "full":
            return {name: tensor.to(torch_dtype(self.settings.dtype)) for name, tensor in whole.items()}
        return {peft_name(name): tensor for name, tensor in whole.items()}

    def publish_adapter(self, folder: Path, version: int, epoch: int) -> adapter.Publication:
        """Publish the trained tensors: in memory at once (rank 0), in `folder`, which must not exist, in a thread.

        Raises NumericsError on all ranks where a tensor holds NaN or Inf: nothing is handed out or written. Ask the
        result, on rank 0, whether the folder is durable.
        """
        tensors = self.adapter_tensors()
        answer: list[Any] = [None]
        files, written = None, None
        if self.rank == 0:
            config = self._scorer.model.peft_config[ADAPTER] if self.settings.kind == "lora" else None
            try:
                ref, files = adapter.stage(tensors, folder, version=version, epoch=epoch, peft_config=config)
                answer, written = [ref], adapter.write_in_background(ref, files, folder)
            except Exception as error:  # every rank must hear of it, or the others wait for ever
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return adapter.Publication(answer[0], files, written or adapter.written())

    def load_adapter(self, folder: Path) -> float:
        """Take the tensors of a published folder, e.g. the committed one after a replay that was not exact.

        Returns the largest |difference| to what they replace, of one number; a collective that all ranks call.
        """
        tensors = adapter.read_tensors(folder)
        before = self.adapter_tensors()
        for name, parameter in self.state.parameters.items():
            value = tensors.get(peft_name(name))
            if value is None or value.shape != parameter.shape:
                raise ModelError(f"{folder} does not fit: {peft_name(name)} is missing or of another shape")
            sharding.fill(parameter, value)
        self.seal_state()
        return max((float((tensors[name] - old).abs().max()) for name, old in before.items()), default=0.0)

    def logprob_digest(self, rows: Sequence[Row]) -> str:
        """SHA-256 of the log-probabilities of one micro-batch of this rank, without gradient.

        To look for a rank that computes wrongly: all ranks call it with rows of their own, then each with those of its
        neighbour; equal rows must have equal digests, whoever computes them. Raises ModelError on all ranks alike.
        """
        self._require_onload()
        digest = hashlib.sha256()
        for batch in self._shaped([rows]):
            with torch.no_grad():
                logprobs, _ = self._scorer(self._pack(batch), self.settings.temperature, self._banned)
            digest.update(logprobs.cpu().numpy().tobytes())
        return digest.hexdigest()

    def canary(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[bytes],
        response_ids: Sequence[int],
        adapter: Literal["current", "base"] = "current",
    ) -> list[float]:
        """[R] log-probabilities at temperature 1 with nothing banned, equal on all ranks.

        `prompt_ids` has its images expanded. Raises ModelError for "base" in full training, which keeps no base.
        """
        self._require_onload()
        if adapter == "base" and self.settings.kind == "full":
            raise ModelError("full training keeps no base model to compare with")
        turn = RowTurn(
            prompt_ids=tuple(prompt_ids), response_ids=tuple(response_ids), logprobs=(0.0,) * len(response_ids)
        )
        work = StepWork()
        work.features = self._canary_features  # the same images in every step: the frozen tower sees them once
        batch = self._pack([Row(turns=(turn,), advantage=0.0, images=tuple(images))], work)
        with torch.no_grad(), without_adapter(self._scorer) if adapter == "base" else nullcontext():
            logprobs, _ = self._scorer(batch, 1.0, self._banned[:0], work)
        return logprobs.tolist()

    # ------------------------------------------------------------------ state

    def state_digest(self) -> str:
        """Logical digest of trained tensors, Adam, RNG and update count; the same for any number of ranks."""
        return self.state.digest()

    def save_checkpoint(self, folder: Path, fields: dict[str, Any] | None = None) -> Future[Path]:
        """Copy the state now and write it in a thread; `.result()` returns when folder and manifest are durable.

        `fields` go into the manifest. The future raises FileExistsError or StorageError.
        """
        return self._checkpoints.save(self.state, folder, {"world": self.world, **(fields or {})})

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Go back to a saved state, whatever number of ranks wrote it; returns the manifest. Raises CorruptionError."""
        self.discard_gradients()
        manifest = checkpoint.load(self.state, folder)
        self.seal_state()
        return manifest

    def seal_state(self) -> None:
        """Remember a fingerprint of this rank's shards: weights, frozen or trained, and moments. No collective."""
        self._require_onload()
        self._seal = Seal(self._at_rest())

    def check_state(self) -> None:
        """Raises CorruptionError, on this rank alone, where a bit changed since seal_state. No collective.

        An update ends the seal; loading a state makes a new one. Without a seal there is nothing to compare with.
        """
        self._require_onload()
        now = self._at_rest()
        broken = self._seal.broken(now) if self._seal is not None else []
        if broken:
            raise CorruptionError(
                f"rank {self.rank}: {len(broken)} of {len(now)} tensors changed in memory, the first is {broken[0]}",
                "memory or device may be faulty: replace the rank, preferably on another node",
            )

    def _at_rest(self) -> dict[str, Tensor]:
        frozen = {f"frozen/{name}": p for name, p in self._scorer.named_parameters() if not p.requires_grad}
        return {**self.state.tensors(), **frozen}

    def offload(self) -> None:
        """Move parameters, gradients and moments to the CPU, so that the engine can have the GPU."""
        if not self._offloaded and self.settings.device == "cuda":
            self._move("cpu")
            torch.cuda.empty_cache()
        self._offloaded = True

    def onload(self) -> None:
        """Undo offload."""
        if self._offloaded and self.settings.device == "cuda":
            self._move("cuda")
        self._offloaded = False

    def close(self) -> None:
        """Give the model's memory back, in whatever state the group is; never waits, and nothing works afterwards.

        A checkpoint that is still being written is given up and its future cancelled: wait for it first where it
        matters. Then this process may leave the group, join another and build a new Policy.
        """
        self._checkpoints.close()
        del self._scorer, self._inputs, self._optimizer, self.state, self._watch, self._seal
        gc.collect()  # modules, parameters and FSDP's states refer to each other in circles
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: str) -> None:
        self._scorer.to(device)
        for moments in self._optimizer.state.values():
            for name in checkpoint.MOMENTS:
                moments[name] = moments[name].to(device)

    def _require_onload(self) -> None:
        if self._offloaded:
            raise RuntimeError("the policy is offloaded: call onload first")


def _reason_to_skip(norm: float, broken: Broken | None) -> str | None:
    if broken is not None:
        return f"non-finite {broken.what}"
    if norm == 0.0:
        return "no signal"
    return None if norm < float("inf") else "non-finite gradient"


def _accumulate(into: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Add in place, as FSDP does."""
    for name, gradient in gradients.items():
        if name in into:
            sharding.local(into[name]).add_(sharding.local(gradient))
        else:
            into[name] = gradient
