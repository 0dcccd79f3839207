"""The root module: from a packed batch to log-probabilities. Everything a forward needs runs inside it,

because FSDP gathers the root's parameters (embedding, head, patch embedding) only while its forward runs.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from argusrl.errors import ModelError
from argusrl.policy.inputs import PackedBatch
from argusrl.policy.logprobs import token_logprobs
from argusrl.policy.model import has_mrope, head_of, packs
from argusrl.policy.step_work import ImageFeatures, StepWork


class Scorer(nn.Module):
    """Holds `model` (the PeftModel, or the bare model in full training); `base` is the transformers model in it."""

    def __init__(self, model: nn.Module, base: Any) -> None:
        super().__init__()
        self.model = model
        self._base = [base]  # a list, so that its parameters are not registered twice
        self._takes_types = "mm_token_type_ids" in inspect.signature(base.model.forward).parameters

    @property
    def base(self) -> Any:
        return self._base[0]

    def forward(
        self, batch: PackedBatch, temperature: float, banned: Tensor, work: StepWork | None = None
    ) -> tuple[Tensor, Tensor]:
        """([N] log-probabilities with gradient, [N] entropies), float32. `work` keeps features and counts."""
        hidden = self.hidden_states(batch, work)[batch.sources]
        head = head_of(self.base)
        return token_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.targets,
            temperature=temperature,
            banned=banned,
        )

    def hidden_states(self, batch: PackedBatch, work: StepWork | None = None) -> Tensor:
        """[T, H] after the last norm."""
        work = work or StepWork()
        work.tokens += batch.input_ids.shape[1]
        work.places += batch.layout.places
        work.padding += batch.layout.padding
        options: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
        }
        if packs(self.base.config):
            options["packed_layout"] = batch.layout
        if has_mrope(self.base.config):
            features = self._image_features(batch, work)
            if features is not None:
                options["mm_encoder_outputs"] = {"image": features}
        elif batch.image_inputs:
            options.update(batch.image_inputs)
            if self._takes_types:
                options["mm_token_type_ids"] = batch.token_types
                del options["position_ids"]  # one sequence a row: the model derives them from the images
        try:
            return self.base.model(**options).last_hidden_state[0]
        except ValueError as error:
            raise ModelError(f"the model refuses the row: {error}") from error

    def _image_features(self, batch: PackedBatch, work: StepWork) -> Any:
        """The tower's output for every image in reading order; only images without features go through it.

        It runs on all ranks or on none, with a blank image where a rank has none to read, so that the collectives of
        the sharded tower agree. The tower is frozen: its output has no gradient, and the blank adds nothing.
        """
        if batch.runs_tower:
            with torch.no_grad():
                self._run_tower(batch, work)
        if not batch.image_order:
            return None
        held = [work.features[batch.images[number]] for number in batch.image_order]
        return SimpleNamespace(
            pooler_output=tuple(image.tokens for image in held),
            deepstack_features=[tuple(layer) for layer in zip(*(image.deep for image in held), strict=True)],
        )

    def _run_tower(self, batch: PackedBatch, work: StepWork) -> None:
        inner = self.base.model
        if not batch.fresh:
            inner.get_image_features(*_blank_image(self.base.config.vision_config, batch.input_ids.device))
            return
        pixels, grids = batch.image_inputs["pixel_values"], batch.image_inputs["image_grid_thw"]
        output = inner.get_image_features(pixels, grids)
        work.patches += len(pixels)
        for place, number in enumerate(batch.fresh):
            layers = [layer[place].clone() for layer in (output.pooler_output, *output.deepstack_features)]
            work.features[batch.images[number]] = ImageFeatures(grids[place].cpu(), layers[0], tuple(layers[1:]))


def _blank_image(vision: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest image the tower takes: one merged patch."""
    merge = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(merge * merge, values, device=device), torch.tensor([[1, merge, merge]], device=device)
