from dataclasses import replace
from typing import Any

import pytest
import torch

from argusrl.errors import ModelError
from argusrl.policy.rows import Row, RowTurn
from argusrl.types import EpisodeEnd, ImageRef, StopReason, Trajectory, TrajectoryKey, Turn


def test_sources_predict_targets(builder: Any, rows: list[Row]) -> None:
    batch = builder.pack(rows)
    ids = batch.input_ids[0]
    assert torch.equal(ids[batch.sources + 1], batch.targets)
    replies = [token for row in rows for turn in row.turns for token in turn.response_ids]
    assert batch.targets.tolist() == replies
    lengths = [sum(len(turn.response_ids) for turn in row.turns) for row in rows]
    assert batch.advantages.tolist() == [row.advantage for row, n in zip(rows, lengths, strict=True) for _ in range(n)]
    assert len(batch.engine) == len(replies)


def test_positions_are_those_of_each_row_alone(builder: Any, rows: list[Row]) -> None:
    batch = builder.pack(rows)
    tokens = sum(row.tokens for row in rows) - 1  # two of them begin with the same one
    assert batch.position_ids.shape == (4, 1, tokens)
    image = batch.token_types[0].bool()
    assert len(batch.position_ids[3, 0][image].unique()) > 1  # widths differ inside an image
    assert (batch.position_ids[0, 0] == 0).sum() == 2
    alone = [builder.pack([row]) for row in rows]
    expected = torch.cat([one.position_ids[..., one.sources] for one in alone], dim=-1)
    assert torch.equal(batch.position_ids[..., batch.sources], expected)


def test_positions_are_the_models_own(builder: Any, base: Any, rows: list[Row]) -> None:
    for row in rows:
        batch = builder.pack([row])
        grids = batch.image_inputs["image_grid_thw"][list(batch.image_order)] if row.images else None
        places, _ = base.model.get_rope_index(batch.input_ids, batch.token_types, image_grid_thw=grids)
        assert torch.equal(batch.position_ids[1:], places)
        assert torch.equal(batch.position_ids[0, 0], torch.arange(len(row.ids)))


def test_rows_of_one_prompt_share_it(builder: Any, rows: list[Row]) -> None:
    first, other = rows[0], change_turn(rows[0], response_ids=(20, 21), logprobs=(-2.0, -3.0))
    prompt = len(first.turns[0].prompt_ids)
    batch = builder.pack([first, rows[1], other])
    assert batch.input_ids.shape[1] == prompt + 6 + 2 + len(rows[1].ids)
    assert batch.image_order == (0,)
    assert batch.targets.tolist() == [*first.turns[0].response_ids, *rows[1].turns[0].response_ids, 20, 21]
    last = prompt - 1  # predicts the first token of both replies
    assert batch.sources.tolist()[:6] == [last, *range(prompt, prompt + 5)]
    assert batch.sources.tolist()[-2:] == [last, prompt + 6]
    alone = builder.pack([other])
    assert torch.equal(batch.position_ids[..., prompt + 6 : prompt + 8], alone.position_ids[..., prompt:])
    pixels = replace(other, images=(rows[2].images[0],))
    with pytest.raises(ModelError, match="do not match"):
        builder.pack([first, pixels])  # equal ids, another image: no sharing, and here not even the same size


def test_images_with_features_are_not_read_again(builder: Any, rows: list[Row]) -> None:
    from argusrl.policy.step_work import ImageFeatures, StepWork

    work = StepWork()
    fresh = builder.pack(rows, work)
    assert fresh.fresh == (0, 1)
    assert fresh.runs_tower
    for image, grid in zip(fresh.images, fresh.image_inputs["image_grid_thw"], strict=True):
        work.features[image] = ImageFeatures(grid, torch.zeros(0), ())
    again = builder.pack(rows, work)
    assert (again.fresh, again.image_inputs, again.runs_tower) == ((), {}, False)
    assert torch.equal(again.position_ids, fresh.position_ids)
    assert again.image_order == fresh.image_order


def test_an_image_is_processed_once_per_micro_batch(builder: Any, rows: list[Row]) -> None:
    batch = builder.pack(rows)
    assert len(batch.image_inputs["image_grid_thw"]) == 2
    assert batch.images == (rows[0].images[0], rows[2].images[0])
    assert sorted(batch.image_order) == [0, 0, 1]


def test_no_rows_is_one_token_that_predicts_nothing(builder: Any) -> None:
    batch = builder.pack([])
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.targets) == 0


def change_turn(row: Row, **changes: Any) -> Row:
    return replace(row, turns=(replace(row.turns[0], **changes), *row.turns[1:]))


def test_refuses_what_does_not_match(builder: Any, rows: list[Row]) -> None:
    image, text, turns = rows
    without_pixels = replace(image, images=())
    swapped = replace(turns, images=turns.images[::-1])
    with pytest.raises(ModelError, match="image tokens but no pixels"):
        builder.pack([without_pixels])
    with pytest.raises(ModelError, match="do not match"):
        builder.pack([swapped])
    with pytest.raises(ModelError, match="do not match"):
        builder.pack([replace(text, images=image.images)])
    with pytest.raises(ModelError, match="do not match"):
        builder.pack([change_turn(image, prompt_ids=image.turns[0].prompt_ids[2:])])  # a token of the image cut off
    with pytest.raises(ModelError, match=r"banned token ids \[5\]"):
        builder.pack([change_turn(text, response_ids=(9, 5, 9, 9))])
    with pytest.raises(ModelError, match="cannot be processed"):
        builder.pack([replace(image, images=(b"no image",))])
    with pytest.raises(ModelError, match="4 response ids and 1 log-probabilities"):
        builder.pack([change_turn(text, logprobs=(-1.0,))])
    with pytest.raises(ModelError, match="without a prompt"):
        builder.pack([change_turn(text, prompt_ids=())])


def test_row_of_a_trajectory() -> None:
    ref = ImageRef(sha256="ab", segment="images/x", offset=0, length=1, width=1, height=1)

    def turn(prompt: tuple[int, ...], images: tuple[ImageRef, ...]) -> Turn:
        return Turn(
            prompt_ids=prompt,
            collapsed_ids=prompt,
            response_ids=(9,),
            logprobs=(-0.5,),
            images=images,
            adapter_version=0,
            adapter_sha256="",
            stop=StopReason.STOP,
        )

    trajectory = Trajectory(
        key=TrajectoryKey(1, "p", 0),
        turns=(turn((1, 2), (ref,)), turn((3,), ())),
        reward=1.0,
        rewards={},
        end=EpisodeEnd.TERMINATED,
        seed=0,
    )
    row = Row.of(trajectory, 0.5, {"ab": b"png"})
    assert row.ids == [1, 2, 9, 3, 9]
    assert row.images == (b"png",)
    assert row.turns[1] == RowTurn(prompt_ids=(3,), response_ids=(9,), logprobs=(-0.5,))
    with pytest.raises(KeyError):
        Row.of(trajectory, 0.5, {})
