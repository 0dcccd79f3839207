"""The root module: from a packed batch to log-probabilities. Everything a forward needs runs inside it,

because FSDP gathers the root's parameters (embedding, head, patch embedding) only while its forward runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from argusrl.errors import ModelError
from argusrl.policy.inputs import PackedBatch
from argusrl.policy.logprobs import token_logprobs
from argusrl.policy.model import has_mrope, head_of, packs


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

    def forward(self, batch: PackedBatch, temperature: float, banned: Tensor) -> tuple[Tensor, Tensor]:
        """([N] log-probabilities with gradient, [N] entropies), float32."""
        hidden = self.hidden_states(batch)[batch.sources]
        head = head_of(self.base)
        return token_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.targets,
            temperature=temperature,
            banned=banned,
        )

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[T, H] after the last norm."""
        options: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
        }
        if packs(self.base.config):
            options["packed_layout"] = batch.layout
        if has_mrope(self.base.config):
            features = self._image_features(batch)
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

    def _image_features(self, batch: PackedBatch) -> Any:
        """The tower's output for every image in reading order; each different image goes through it once.

        A row without images sends a blank one, so that the collectives of the sharded tower run on every rank. The
        tower is frozen: its output carries no gradient, and there is nothing to add to the loss for the blank.
        """
        inner = self.base.model
        with torch.no_grad():
            if not batch.image_order:
                inner.get_image_features(*_blank_image(self.base.config.vision_config, batch.input_ids.device))
                return None
            images = batch.image_inputs
            features = inner.get_image_features(images["pixel_values"], images["image_grid_thw"])
        pick = lambda pieces: tuple(pieces[number] for number in batch.image_order)  # noqa: E731
        features.pooler_output = pick(features.pooler_output)
        features.deepstack_features = [pick(layer) for layer in features.deepstack_features]
        return features


def _blank_image(vision: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest image the tower takes: one merged patch."""
    merge = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(merge * merge, values, device=device), torch.tensor([[1, merge, merge]], device=device)
