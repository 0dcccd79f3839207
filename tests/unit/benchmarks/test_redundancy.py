"""The hand count of `make bench`, against numbers counted with a pencil."""

from argusrl.types import EpisodeEnd, ImageRef, StopReason, Trajectory, TrajectoryKey, Turn
from fakes.benchmark import load_benchmark

redundancy = load_benchmark("redundancy")
PAD = 6


def turn(prompt: tuple[int, ...], response: tuple[int, ...], image: str = "") -> Turn:
    """`prompt` has PAD where the image is; it takes 60 tokens."""
    expanded = tuple(token for one in prompt for token in ((PAD,) * 60 if one == PAD else (one,)))
    shown = ImageRef(sha256=image, segment="", offset=0, length=0, width=1, height=1)
    return Turn(
        prompt_ids=expanded,
        collapsed_ids=prompt,
        response_ids=response,
        logprobs=(0.0,) * len(response),
        images=(shown,) if image else (),
        adapter_version=0,
        adapter_sha256="",
        stop=StopReason.STOP,
    )


def trajectory(sample: int, *turns: Turn) -> Trajectory:
    return Trajectory(
        key=TrajectoryKey(1, "p", sample),
        turns=turns,
        reward=0.0,
        rewards={},
        end=EpisodeEnd.TERMINATED,
        seed=0,
        text=(),
        answer=None,
        info={},
        seconds=0.0,
    )


PROMPT = (*range(100, 105), PAD, *range(200, 205))  # 70 tokens


def test_a_group_needs_its_prompt_once_and_then_its_last_block() -> None:
    group = [trajectory(sample, turn(PROMPT, (1, 2, 50 + sample), "a")) for sample in range(8)]
    counted = redundancy.count_prefill(group, block=32)
    assert counted == {"asked_tokens": 8 * 70, "least_tokens": 70 + 7 * (70 - 2 * 32)}


def test_a_prompt_of_whole_blocks_still_computes_its_last_one() -> None:
    group = [trajectory(sample, turn((*range(100, 164),), (sample,))) for sample in range(3)]
    assert redundancy.count_prefill(group, block=32)["least_tokens"] == 64 + 2 * 32


def test_equal_placeholders_of_other_images_are_other_tokens() -> None:
    group = [trajectory(sample, turn(PROMPT, (1,), image)) for sample, image in enumerate("ab")]
    assert redundancy.count_prefill(group, block=32)["least_tokens"] == 140
    plan = {"updates": [{"ranks": [[[0, 1]]]}]}
    assert redundancy.count_training(group, plan)["least_tokens"] == 5 + 2 * (60 + 5 + 1)
    assert redundancy.count_images(group) == {"shown_images": 2, "unique_images": 2}


def test_training_counts_the_tree_that_episodes_share() -> None:
    first = turn(PROMPT, (1, 2), "a")
    rows = [trajectory(0, first, turn((7, 8), (3,))), trajectory(1, first, turn((7, 9), (3,)))]
    whole = redundancy.count_training(rows, {"updates": [{"ranks": [[[0, 1]]]}]})
    assert whole == {"plan_tokens": 70 + 2 + 1 + 2 + 2, "least_tokens": 77, "rows_tokens": 150}
    parted = redundancy.count_training(rows, {"updates": [{"ranks": [[[0], [1]]]}]})
    assert parted == {"plan_tokens": 150, "least_tokens": 77, "rows_tokens": 150}


def test_a_later_turn_finds_its_own_past_in_the_cache() -> None:
    # 70 + 3 + 2 = 75 tokens; of what came before, 72 went through the model: two blocks of 32.
    episode = trajectory(0, turn(PROMPT, (1, 2, 3), "a"), turn((7, 8), (3,)))
    assert redundancy.count_prefill([episode], block=32)["least_tokens"] == 70 + 75 - 64
