"""Any Gymnasium environment that renders to pixels, played by a model that sees frames and answers words.

The start of an episode comes from the prompt's info:

    seed           for `reset`; without it the session's seed is taken
    options        keyword arguments of the environment, over those of the recipe's `environment.options`
    reset_options  handed to `reset(options=…)`

Each turn the model sees one frame. Its reply is searched for `action_pattern`; the first group, in lower case and
without outer blanks, is looked up in `actions`. A reply that names no known action costs its turn: the environment is
not stepped, the reward is 0 and the model sees the same frame again.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from argusrl.config.objects import load_object
from argusrl.config.sections import EnvironmentSection
from argusrl.environments.base import StepResult
from argusrl.errors import ConfigError
from argusrl.types import Image, Message, Prompt

if TYPE_CHECKING:
    import gymnasium
    import numpy


def frame_image(frame: numpy.ndarray, size: int | None = None) -> Image:
    """A rendered frame ([height, width, 3], uint8) as PNG; `size` is the longer side in pixels, None keeps it.

    Shrinking by a whole number averages whole blocks of pixels, so tiles stay crisp; anything else is a Lanczos
    resize. Equal frames give equal bytes.
    """
    import PIL.Image

    picture = PIL.Image.fromarray(frame)
    longer = max(picture.size)
    if size is not None and size != longer:
        if longer % size == 0 and not any(side % (longer // size) for side in picture.size):
            picture = picture.reduce(longer // size)
        else:
            width, height = (max(1, round(side * size / longer)) for side in picture.size)
            picture = picture.resize((width, height), PIL.Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    picture.convert("RGB").save(encoded, format="PNG")
    return Image(data=encoded.getvalue(), width=picture.width, height=picture.height)


def make_environment(section: EnvironmentSection, info: Mapping[str, Any]) -> gymnasium.Env:
    """Build the Gymnasium environment of one start. Raises what its constructor raises."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not look for a display
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import gymnasium

    options = {**section.options, **info.get("options", {})}
    if section.factory is not None:
        return load_object(section.factory)(dict(info), **options)
    if section.id is None:
        raise ConfigError("environment: kind gymnasium needs `id` or `factory`")
    if section.id.startswith(("MiniGrid-", "BabyAI-")):
        import minigrid  # noqa: F401  (registers its ids)
    return gymnasium.make(section.id, **{"render_mode": "rgb_array", **options})


class GymnasiumEnvironment:
    """An Environment around one Gymnasium environment, made anew for every episode."""

    def __init__(self, section: EnvironmentSection) -> None:
        """Raises ConfigError without `actions`; the action space must be Discrete."""
        self.section = section
        self._pattern = re.compile(section.action_pattern, re.DOTALL)
        if not section.actions:
            raise ConfigError("environment.actions: kind gymnasium needs words and the actions they stand for")
        self._actions = {word.strip().lower(): action for word, action in section.actions.items()}
        self._env: gymnasium.Env | None = None
        self._turns = 0

    def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        """Start an episode: the prompt's own messages, then a user message with the first frame and the instruction."""
        self.close()
        self._env = make_environment(self.section, prompt.info)
        self._turns = 0
        self._env.reset(seed=int(prompt.info.get("seed", seed)), options=prompt.info.get("reset_options"))
        return (*prompt.messages, self._observe(self.section.instruction))

    def step(self, reply: str) -> StepResult:
        """Play one reply. `action` of the result is the word that was understood, or None."""
        if self._env is None:
            raise RuntimeError("step before reset")
        self._turns += 1
        word = self.understood(reply)
        reward, terminated, truncated = 0.0, False, False
        if word is not None:
            _, paid, terminated, truncated, _ = self._env.step(self._actions[word])
            reward, terminated, truncated = float(paid), bool(terminated), bool(truncated)
        truncated = not terminated and (truncated or self._turns >= self.section.max_turns)
        messages = () if terminated or truncated else (self._observe(self.section.turn_text),)
        return StepResult(messages=messages, reward=reward, terminated=terminated, truncated=truncated, action=word)

    def understood(self, reply: str) -> str | None:
        """The action word of a reply; None where there is none or it is not one of `actions`."""
        match = self._pattern.search(reply)
        if match is None:
            return None
        word = (match.group(1 if self._pattern.groups else 0) or "").strip().lower()
        return word if word in self._actions else None

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _observe(self, text: str) -> Message:
        assert self._env is not None
        image = frame_image(_frame(self._env), self.section.image_size)
        return Message(role="user", content=(image, text) if text else (image,))


def _frame(env: gymnasium.Env) -> Any:
    frame = env.render()
    if getattr(frame, "ndim", 0) != 3:
        raise ValueError(
            f"the environment rendered {type(frame).__name__}, not a [height, width, 3] frame: "
            'make it with render_mode="rgb_array"'
        )
    return frame
