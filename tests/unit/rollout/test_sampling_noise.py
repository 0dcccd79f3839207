from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from argusrl.rollout.sampling_noise import BannedTokens, PositionKeyedNoise, noise_key, noise_keys

CPU = torch.device("cpu")


class Batch:
    """The rows of a running batch, as vLLM reports them to a logits processor."""

    def __init__(self) -> None:
        config: Any = SimpleNamespace(additional_config={"banned_ids": []})
        self.noise = PositionKeyedNoise(config, CPU, False)
        self.generators: dict[int, torch.Generator] = {}
        self.outputs: dict[int, list[int]] = {}
        self.noise.attach(self.generators)

    def add(self, row: int, seed: int, prompt_tokens: int, output: list[int]) -> None:
        self.generators[row] = torch.Generator()
        self.outputs[row] = output
        parameters = SamplingParams(seed=seed, temperature=1.0)
        self.update(added=[(row, parameters, [7] * prompt_tokens, output)])

    def update(self, added: Any = (), removed: Any = (), moved: Any = ()) -> None:
        self.noise.update_state(BatchUpdate(batch_size=9, removed=removed, added=added, moved=moved))

    def draw(self, row: int) -> list[float]:
        self.noise.apply(torch.zeros(9, 4))
        return torch.empty(4).exponential_(generator=self.generators[row]).tolist()


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    one, other = Batch(), Batch()
    one.add(0, seed=3, prompt_tokens=10, output=[1, 2])
    other.add(4, seed=9, prompt_tokens=5, output=[])
    other.add(5, seed=3, prompt_tokens=12, output=[])  # the same reply continued: two tokens are in its prompt
    assert one.draw(0) == other.draw(5)
    assert one.draw(0) == one.draw(0)
    assert one.draw(0) != other.draw(4)


def test_the_draw_changes_with_every_token_of_the_reply() -> None:
    batch = Batch()
    output: list[int] = []
    batch.add(0, seed=3, prompt_tokens=10, output=output)
    draws = []
    for token in range(5):
        draws.append(tuple(batch.draw(0)))
        output.append(token)
    assert len(set(draws)) == 5


def test_rows_that_move_take_their_noise_along() -> None:
    batch = Batch()
    batch.add(0, seed=3, prompt_tokens=10, output=[])
    batch.add(1, seed=4, prompt_tokens=10, output=[])
    before = batch.draw(0), batch.draw(1)
    batch.update(moved=[(0, 1, MoveDirectionality.SWAP)])
    assert (batch.draw(1), batch.draw(0)) == before


def test_a_removed_row_is_forgotten() -> None:
    batch = Batch()
    batch.add(0, seed=3, prompt_tokens=10, output=[])
    batch.update(removed=[0])
    batch.generators.clear()
    batch.noise.apply(torch.zeros(9, 4))


def test_noise_that_reaches_no_generator_raises() -> None:
    batch = Batch()
    batch.add(0, seed=3, prompt_tokens=10, output=[])
    batch.generators.clear()
    with pytest.raises(RuntimeError, match="row 0"):
        batch.draw(0)
    batch.noise._generators = None
    with pytest.raises(RuntimeError, match="never attached"):
        batch.draw(0)


def test_greedy_and_unseeded_rows_are_left_alone() -> None:
    batch = Batch()
    greedy, unseeded = SamplingParams(seed=1, temperature=0.0), SamplingParams(temperature=1.0)
    batch.update(added=[(0, greedy, [1], []), (1, unseeded, [1], [])])
    batch.noise.apply(torch.zeros(9, 4))  # there are no generators to seed


def test_keys_of_neighbours_differ_and_fit_a_generator() -> None:
    keys = {noise_key(seed, position) for seed in range(200) for position in range(200)}
    assert len(keys) == 200 * 200
    assert all(0 <= key < 2**63 for key in keys)
    # A CPU generator takes the low 32 bits alone: these must be as good as distinct.
    assert len({key & 0xFFFFFFFF for key in keys}) > 0.9999 * len(keys)


def test_seeds_of_64_bits_and_negative_ones_have_keys() -> None:
    assert noise_key(-1, 0) == noise_key(2**64 - 1, 0)
    assert noise_key(2**63, 5) != noise_key(0, 5)


def test_keys_of_many_draws_are_those_of_each() -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1, 123456789], [0, 7, 1, 2**31, 40_000]
    keys = noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    assert keys == [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_banned_tokens_get_probability_zero_in_every_row() -> None:
    config: Any = SimpleNamespace(additional_config={"banned_ids": [3, 1]})
    banned = BannedTokens(config, CPU, False)
    probabilities = banned.apply(torch.zeros(2, 5)).softmax(-1)
    assert probabilities[:, [1, 3]].eq(0).all()
    assert probabilities[:, [0, 2, 4]].allclose(torch.tensor(1 / 3))
    assert not banned.is_argmax_invariant()  # greedy rows must not see banned tokens either
