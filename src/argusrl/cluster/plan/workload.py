"""What one step of a recipe consists of, on average: prompts, turns, tokens, images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from argusrl.cluster.plan.assumptions import Assumptions
from argusrl.config.estimate import MicroBatch
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config

_LATER_TEXT_SHARE = 0.25  # of the first prompt's text, in a later turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Averages. What a group shares (its first prompt with its image) is counted once in `shared_tokens`."""

    groups: int
    group_size: int
    turns: float
    first_prompt_tokens: int
    later_prompt_tokens: float  # of one later turn: its image and text
    response_tokens: float  # of one turn
    image_patches: int  # of one image
    images: float  # of one trajectory that are its own: one for each later turn
    shared_images: int  # of a group
    image_bytes: int  # of one image, encoded

    @property
    def trajectories(self) -> int:
        return self.groups * self.group_size

    @property
    def trajectory_tokens(self) -> float:
        """Prompts of all turns and replies."""
        return self.first_prompt_tokens + self.own_tokens

    @property
    def own_tokens(self) -> float:
        """Of a trajectory, behind the prompt that it shares with its group."""
        return self.turns * self.response_tokens + (self.turns - 1) * self.later_prompt_tokens

    @property
    def sampled_tokens(self) -> float:
        """Of the step."""
        return self.trajectories * self.turns * self.response_tokens

    @property
    def prefill_tokens(self) -> float:
        """Of the step, computed by engines: a group's prompt once, later turns of each trajectory."""
        return self.groups * self.first_prompt_tokens + self.trajectories * (self.turns - 1) * self.later_prompt_tokens

    @property
    def training_tokens(self) -> float:
        """Of the step, through the ranks: a group's prompt once."""
        return self.groups * (self.first_prompt_tokens + self.group_size * self.own_tokens)

    @property
    def step_images(self) -> float:
        """Different images of the step."""
        return self.groups * (self.shared_images + self.group_size * self.images)

    @property
    def patches(self) -> float:
        """Of all different images of the step."""
        return self.step_images * self.image_patches

    def to_json(self) -> dict[str, Any]:
        derived = {
            name: getattr(self, name)
            for name in (
                "trajectories",
                "trajectory_tokens",
                "sampled_tokens",
                "prefill_tokens",
                "training_tokens",
                "step_images",
                "patches",
            )
        }
        return {**asdict(self), **derived}


def workload_of(config: Config, shape: ModelShape, assumed: Assumptions) -> Workload:
    """Of one step. Turns end where a sequence would grow beyond model.max_tokens."""
    environment, model, rollout = config.environment, config.model, config.rollout
    response = max(1.0, assumed.response_share * rollout.max_response_tokens)
    bound = rollout.max_prompt_tokens or model.max_tokens - rollout.max_response_tokens
    pixels = int(assumed.image_pixels) if model.max_pixels is None else model.max_pixels
    if environment.image_size is not None:
        pixels = min(pixels, environment.image_size**2)
    shows = shape.vision is not None
    patches = 0
    if shape.vision is not None:
        patches = min(shape.vision.patches(pixels), (bound - 1) * shape.vision.merge**2)
    image_tokens = shape.vision.tokens(patches) if shape.vision is not None else 0
    first = min(bound, image_tokens + int(assumed.question_tokens))
    later = image_tokens + _LATER_TEXT_SHARE * assumed.question_tokens
    most = 1 + max(0.0, model.max_tokens - first - response) / (later + response)  # until the sequence is full
    turns = max(1.0, min(assumed.turn_share * environment.max_turns, most))
    return Workload(
        groups=config.algorithm.prompts_per_step,
        group_size=config.algorithm.group_size,
        turns=turns,
        first_prompt_tokens=first,
        later_prompt_tokens=later if turns > 1 else 0.0,
        response_tokens=response,
        image_patches=patches,
        images=turns - 1 if shows else 0.0,
        shared_images=1 if shows else 0,
        image_bytes=int(patches * shape.vision.patch_pixels**2 * assumed.encoded_pixel_bytes) if shape.vision else 0,
    )


def typical_micro_batch(workload: Workload, budget_tokens: int, groups_at_most: int) -> MicroBatch:
    """The row that a budget is filled with by average groups, or the share of an update that a rank has."""
    prompt, own = workload.first_prompt_tokens, max(1, round(workload.own_tokens))
    members = int(max(1, min(workload.group_size, (budget_tokens - prompt) // own)))
    groups = int(max(1, min(groups_at_most, budget_tokens // (prompt + members * own))))
    images = groups * (workload.shared_images + members * workload.images)
    return MicroBatch.of_groups(
        groups,
        prompt_tokens=prompt,
        response_tokens=own,
        group_size=members,
        patches=round(images * workload.image_patches / groups),
    )
