"""The trainable model on one rank.

Every method is a collective: all ranks call it alike and with equal arguments, except for the rows, of which each
rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss
from argusrl.errors import ModelError
from argusrl.policy import adapter, checkpoint, sharding
from argusrl.policy.inputs import InputBuilder, PackedBatch
from argusrl.policy.lora import ADAPTER, add_lora, load_initial, peft_name, without_adapter
from argusrl.policy.model import decoder_of, head_of, load_model, packs, torch_dtype
from argusrl.policy.optimizer import make_adamw
from argusrl.policy.rows import Row, RowTurn
from argusrl.policy.scorer import Scorer
from argusrl.policy.settings import PolicySettings
from argusrl.policy.stats import Stats, UpdateStats
from argusrl.types import AdapterRef

_ROOT = "model."  # the Scorer's attribute that holds the model
_SUMS = ("loss", "entropy", "ratio", "clipped", "cut", "clamped", "gap", "tokens", "row_tokens")


class Policy:
    """Build it after group.connect. Raises ModelError for a model or adapter that cannot be used."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        self._device = torch.device(settings.device)
        self._clip = ClipSettings(settings.clip_low, settings.clip_high, settings.importance_cap)
        self._banned = torch.tensor(settings.banned_ids, dtype=torch.long, device=self._device)
        self._scorer = self._build()
        self._inputs = InputBuilder(self._scorer.base, settings)
        named = {name.removeprefix(_ROOT): p for name, p in self._scorer.named_parameters() if p.requires_grad}
        self._optimizer = make_adamw([named[name] for name in sorted(named)], settings)
        self.state = checkpoint.TrainingState(named, self._optimizer)
        self._checkpoints = checkpoint.CheckpointWriter(sharding.make_mesh("cpu"))
        self._offloaded = False
        torch.manual_seed(settings.seed)  # last: the rank that reads the model draws more numbers than the others

    def _build(self) -> Any:
        """Load, adapt, shard, share."""
        settings = self.settings
        reader = self.rank == 0
        base = load_model(settings, reader=reader)
        model = base
        if settings.kind == "lora":
            model = add_lora(base, settings)
            if settings.initial is not None:
                load_initial(model, settings.initial, settings)
        else:
            for part in (decoder_of(base), head_of(base)):
                part.float().requires_grad_(True)  # float32 master weights
        scorer = Scorer(model, base).train(settings.gradient_checkpointing)
        full = scorer.state_dict() if reader and self.world > 1 else {}
        buffers = dict(scorer.named_buffers()) if reader else {}
        sharding.shard(scorer, base, sharding.make_mesh(settings.device), torch_dtype(settings.dtype))
        sharding.share_weights(scorer, full, buffers, settings.device)
        return scorer

    # ------------------------------------------------------------------ learning

    def forward_backward(self, micro_batches: Sequence[Sequence[Row]], denominator_tokens: int) -> Stats:
        """Add the gradient of one update. Ranks hand in equally many micro-batches (empty ones fill up).

        The loss is the sum over all ranks' tokens divided by `denominator_tokens`, the response tokens of the whole
        update; so neither ranks nor micro-batches change the gradient. With one update per step the old
        log-probability is the new one, detached; with more it is the engine's.

        Raises ModelError on all ranks where one has rows that cannot be computed; call discard_gradients then. A NaN
        shows in the stats and is caught by optimizer_step.
        """
        self._require_onload()
        batches = [list(rows) for rows in micro_batches]
        if not packs(self._scorer.base.config):
            batches = self._one_by_one(batches)
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self._device)
        gap_max = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows in batches:
            gap_max = torch.maximum(gap_max, self._backward(rows, denominator_tokens, sums))
        dist.all_reduce(sums)
        dist.all_reduce(gap_max, op=dist.ReduceOp.MAX)
        return _stats(dict(zip(_SUMS, sums.tolist(), strict=True)), gap_max.item(), denominator_tokens)

    def _backward(self, rows: Sequence[Row], denominator_tokens: int, sums: Tensor) -> Tensor:
        """Backward of one micro-batch; adds to `sums` and returns the largest gap to the engine."""
        batch = self._pack(rows)
        new, entropies = self._scorer(batch, self.settings.temperature, self._banned)
        old = new.detach() if self.settings.updates_per_step == 1 else batch.engine
        parts = clipped_policy_loss(new, old, batch.engine, batch.advantages, self._clip)
        # FSDP averages gradients over ranks; the denominator is global already
        (parts.loss * (self.world / max(1, denominator_tokens))).backward()
        gap = (new.detach() - batch.engine).abs()
        row_tokens = sum(len(row.ids) for row in rows)
        values = [parts.loss.detach(), entropies.sum(), parts.ratio, parts.clipped, parts.cut, parts.clamped, gap.sum()]
        sums += torch.stack([value.double() for value in values] + [sums.new_tensor(n) for n in (len(gap), row_tokens)])
        return gap.max().double() if len(gap) else gap.new_zeros((), dtype=torch.float64)

    def _pack(self, rows: Sequence[Row]) -> PackedBatch:
        """The batch on the device. Where one rank refuses its rows, all raise, before anyone waits in a forward."""
        batch, problem = None, None
        try:
            batch = self._inputs.pack(rows)
        except Exception as error:  # raised below, where all ranks know
            problem = error
        refused = torch.tensor(float(problem is not None))
        dist.all_reduce(refused, op=dist.ReduceOp.MAX)
        if batch is None or refused > 0:
            raise problem or ModelError("another rank refused its rows")
        return batch.to(self._device)

    def _one_by_one(self, batches: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """One row per forward, for models that cannot pack; equally many on every rank."""
        single = [[row] for rows in batches for row in rows]
        count = torch.tensor(len(single), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return single + [[] for _ in range(int(count) - len(single))]

    def optimizer_step(self, learning_rate: float) -> UpdateStats:
        """Clip to the global norm and update. Gradients are gone afterwards.

        A gradient that is NaN, Inf or zero everywhere updates nothing, and leaves Adam's state untouched.
        """
        self._require_onload()
        norm = self._gradient_norm()
        skipped = None if 0.0 < norm < float("inf") else "no signal" if norm == 0.0 else "non-finite gradient"
        if skipped is None:
            scale = min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
            for parameter in self.state.parameters.values():
                if parameter.grad is not None:
                    sharding.local(parameter.grad).mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self.state.updates += 1
        self.discard_gradients()
        return UpdateStats(grad_norm=norm, learning_rate=learning_rate, skipped=skipped)

    def discard_gradients(self) -> None:
        """Forget what forward_backward added, e.g. after a fault in the middle of an update."""
        self._optimizer.zero_grad(set_to_none=True)

    def _gradient_norm(self) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self.state.parameters.values():
            if parameter.grad is not None:
                total += sharding.local(parameter.grad).double().square().sum()
        dist.all_reduce(total)
        return total.sqrt().item()

    # ------------------------------------------------------------------ publishing

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Trained tensors, whole and on the CPU, by their names in a published folder, on every rank.

        LoRA tensors keep the trainer's float32; full weights have the computation type.
        """
        whole = dict(sharding.gather_full({name: p.detach() for name, p in self.state.parameters.items()}))
        if self.settings.kind == "full":
            return {name: tensor.to(torch_dtype(self.settings.dtype)) for name, tensor in whole.items()}
        return {peft_name(name): tensor for name, tensor in whole.items()}

    def publish_adapter(self, folder: Path, version: int, epoch: int) -> AdapterRef:
        """Write the trained tensors to `folder`, which must not exist; rank 0 writes, all ranks get the reference.

        Raises NumericsError where a tensor holds NaN or Inf (nothing is written), FileExistsError, StorageError.
        """
        tensors = self.adapter_tensors()
        answer: list[Any] = [None]
        if self.rank == 0:
            config = self._scorer.model.peft_config[ADAPTER] if self.settings.kind == "lora" else None
            try:
                answer = [adapter.publish(tensors, folder, version=version, epoch=epoch, peft_config=config)]
            except Exception as error:  # every rank must hear of it, or the others wait for ever
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def load_adapter(self, folder: Path) -> None:
        """Take the tensors of a published folder, e.g. the committed one after a replay that was not exact."""
        tensors = adapter.read_tensors(folder)
        for name, parameter in self.state.parameters.items():
            value = tensors.get(peft_name(name))
            if value is None or value.shape != parameter.shape:
                raise ModelError(f"{folder} does not fit: {peft_name(name)} is missing or of another shape")
            sharding.fill(parameter, value)

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
        batch = self._pack([Row(turns=(turn,), advantage=0.0, images=tuple(images))])
        with torch.no_grad(), without_adapter(self._scorer) if adapter == "base" else nullcontext():
            logprobs, _ = self._scorer(batch, 1.0, self._banned[:0])
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
        return checkpoint.load(self.state, folder)

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
        """Wait for the checkpoint that is being written."""
        self._checkpoints.close()

    def _move(self, device: str) -> None:
        self._scorer.to(device)
        for moments in self._optimizer.state.values():
            for name in checkpoint.MOMENTS:
                moments[name] = moments[name].to(device)

    def _require_onload(self) -> None:
        if self._offloaded:
            raise RuntimeError("the policy is offloaded: call onload first")


def _stats(sums: dict[str, float], gap_max: float, denominator_tokens: int) -> Stats:
    tokens = int(sums["tokens"])
    mean = {name: sums[name] / max(1, tokens) for name in sums}
    return Stats(
        tokens=tokens,
        row_tokens=int(sums["row_tokens"]),
        loss=sums["loss"] / max(1, denominator_tokens),
        entropy=mean["entropy"],
        ratio=mean["ratio"],
        clip_share=mean["clipped"],
        cut_share=mean["cut"],
        clamped_tokens=int(sums["clamped"]),
        gap_mean=mean["gap"],
        gap_max=gap_max,
    )
