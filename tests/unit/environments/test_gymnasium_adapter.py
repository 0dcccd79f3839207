from __future__ import annotations

import io
from pathlib import Path

import gymnasium
import numpy
import PIL.Image
import pytest

from argusrl.config.objects import load_object
from argusrl.config.sections import EnvironmentSection
from argusrl.environments.gymnasium_adapter import GymnasiumEnvironment, frame_image
from argusrl.types import Message, Prompt

EXAMPLES = Path(__file__).parents[3] / "examples"
FROZEN_LAKE = EXAMPLES / "frozen_lake.py"
MINIGRID = EXAMPLES / "minigrid_empty.py"

ROW = ["SFG"]
WORDS = {"left": 0, "down": 1, "right": 2, "up": 3}


def lake(**values) -> GymnasiumEnvironment:
    section = {
        "kind": "gymnasium",
        "id": "FrozenLake-v1",
        "options": {"is_slippery": False, "desc": ROW},
        "actions": WORDS,
        "max_turns": 5,
        **values,
    }
    return GymnasiumEnvironment(EnvironmentSection(**section))


def say(word: str) -> str:
    return f"I think <action> {word} </action>"


def pixels(image) -> numpy.ndarray:
    return numpy.asarray(PIL.Image.open(io.BytesIO(image.data)))


def test_frames_keep_their_pixels_or_average_whole_blocks() -> None:
    frame = numpy.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=numpy.uint8)
    assert (pixels(frame_image(frame)) == frame).all()
    assert (pixels(frame_image(frame, 16)) == frame).all()
    small = frame_image(frame, 8)
    assert (small.width, small.height) == (8, 4)
    blocks = frame.reshape(4, 2, 8, 2, 3).mean(axis=(1, 3))
    assert abs(pixels(small) - blocks).max() <= 1
    odd = frame_image(frame, 10)
    assert (odd.width, odd.height) == (10, 5)
    assert frame_image(frame, 10).sha256 == odd.sha256


def test_an_episode_is_played_in_words_and_ends_terminated() -> None:
    env = lake(instruction="Go to the goal.", turn_text="And now?", image_size=32)
    own = Message(role="system", content=("be brief",))
    first = env.reset(Prompt(id="a", messages=(own,)), 1)
    assert first[0] == own
    assert first[1].content[1] == "Go to the goal."
    assert (first[1].images[0].width, first[1].images[0].height) == (32, 11)
    moved = env.step(say("Right"))
    assert (moved.reward, moved.terminated, moved.truncated, moved.action) == (0.0, False, False, "right")
    assert moved.messages[0].content[1] == "And now?"
    assert moved.messages[0].images[0].sha256 != first[1].images[0].sha256
    end = env.step(say("right"))
    assert (end.reward, end.terminated, end.truncated, end.messages) == (1.0, True, False, ())
    env.close()
    env.close()


def test_a_reply_without_known_action_costs_a_turn_and_moves_nothing() -> None:
    env = lake(max_turns=3)
    first = env.reset(Prompt(id="a"), 1)
    for reply in ("right", say("jump")):
        result = env.step(reply)
        assert result.action is None
        assert result.reward == 0.0
        assert result.messages[0].images == first[0].images
    assert env.step(say("right")).truncated  # max_turns


def test_a_goal_reached_in_the_last_turn_is_terminated_not_truncated() -> None:
    env = lake(max_turns=2)
    env.reset(Prompt(id="a"), 1)
    env.step(say("right"))
    end = env.step(say("right"))
    assert (end.terminated, end.truncated) == (True, False)


def test_the_environments_own_time_limit_truncates() -> None:
    env = lake(options={"is_slippery": False, "desc": ROW, "max_episode_steps": 1})
    env.reset(Prompt(id="a"), 1)
    end = env.step(say("left"))
    assert (end.terminated, end.truncated, end.messages) == (False, True, ())


def test_a_starts_options_go_over_the_recipes_and_its_seed_over_the_sessions() -> None:
    slippery = lake(options={"desc": ["SFFFG"], "is_slippery": True})
    info = {"seed": 3, "options": {"desc": ["SG"], "is_slippery": False}}
    assert slippery.reset(Prompt(id="a", info=info), 1)[0].images[0].width == 128
    assert slippery.step(say("right")).terminated

    def walk(seed: int, session_seed: int) -> list[str]:
        slippery.reset(Prompt(id="b", info={"seed": seed} if seed else {}), session_seed)
        steps = [slippery.step(say("down")) for _ in range(4)]
        return [step.messages[0].images[0].sha256 for step in steps if step.messages]

    assert walk(3, 1) == walk(3, 2) == walk(0, 3)
    assert len({tuple(walk(0, seed)) for seed in range(6)}) > 1


def test_a_pattern_without_a_group_takes_the_whole_match() -> None:
    assert lake(action_pattern="left|right").understood("go right") == "right"


def test_an_environment_that_does_not_render_frames_is_told_so() -> None:
    env = lake(options={"desc": ROW, "render_mode": "ansi"})
    with pytest.raises(ValueError, match="rgb_array"):
        env.reset(Prompt(id="a"), 1)


def test_frozen_lake_layouts_are_many_disjoint_and_solvable_in_time() -> None:
    train, heldout = load_object(f"{FROZEN_LAKE}:layouts")(3)
    assert (len(train), len(heldout)) == (36, 12)
    assert not {tuple(desc) for desc in train} & {tuple(desc) for desc in heldout}
    start, find = load_object(f"{FROZEN_LAKE}:start"), load_object(f"{FROZEN_LAKE}:find")
    assert start(0, "train") != start(0, "heldout")
    assert start(0, "train").info == start(36, "train").info
    assert start(5, "heldout") == start(5, "heldout")
    env = GymnasiumEnvironment(
        EnvironmentSection(kind="gymnasium", factory=f"{FROZEN_LAKE}:make", actions=WORDS, image_size=96, max_turns=6)
    )
    for index in range(0, 48, 5):
        prompt = start(index, "train")
        image = env.reset(prompt, 0)[0].images[0]
        assert (image.width, image.height) == (96, 96)
        desc = prompt.info["options"]["desc"]
        (row, column), (goal_row, goal_column) = find(desc, "S"), find(desc, "G")
        path = ["down" if goal_row > row else "up"] * abs(goal_row - row)
        path += ["right" if goal_column > column else "left"] * abs(goal_column - column)
        results = [env.step(say(word)) for word in path]
        assert results[-1].terminated
        assert sum(result.reward for result in results) == 1.0
        env.reset(prompt, 0)
        lost = [env.step(say("left" if column == 0 else "right" if column == 2 else "up")) for _ in range(len(path))]
        assert not any(result.truncated for result in lost)  # one spare move


def test_minigrid_splits_its_32_starts_and_plays() -> None:
    pytest.importorskip("minigrid")
    seeds = load_object(f"{MINIGRID}:seeds_by_split")()
    assert (len(seeds["train"]), len(seeds["heldout"])) == (24, 8)
    start = load_object(f"{MINIGRID}:start")
    env = GymnasiumEnvironment(
        EnvironmentSection(
            kind="gymnasium",
            id="MiniGrid-Empty-Random-5x5-v0",
            options={"highlight": False},
            actions={"left": 0, "right": 1, "forward": 2},
            max_turns=8,
        )
    )
    first = {
        env.reset(start(index, split), 0)[0].images[0].sha256 for split in seeds for index in range(len(seeds[split]))
    }
    assert len(first) == 32
    result = env.step(say("left"))
    assert result.action == "left"
    assert not result.terminated


def test_gymnasium_accepts_the_examples_environment() -> None:
    from gymnasium.utils.env_checker import check_env

    start = load_object(f"{FROZEN_LAKE}:start")
    made: gymnasium.Env = load_object(f"{FROZEN_LAKE}:make")({}, **start(0, "train").info["options"])
    check_env(made.unwrapped, skip_render_check=True)
    made.close()
