from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.rollout.work_counter import WorkCounter

BLOCK = 4


@dataclass
class Request:
    """vLLM's, as far as the counter looks at it."""

    prompt: str  # a letter per token
    images: tuple[tuple[str, int], ...] = ()
    reply: str = ""
    scores: bool = False
    num_computed_tokens: int = 0
    mm_features: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling_params = SimpleNamespace(prompt_logprobs=0 if self.scores else None)
        for name, tokens in self.images:
            position = SimpleNamespace(get_num_embeds=lambda tokens=tokens: tokens)
            self.mm_features.append(SimpleNamespace(identifier=name, mm_position=position))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def prompt_token_ids(self) -> list[int]:
        return [ord(letter) for letter in self.prompt]

    @property
    def block_hashes(self) -> list[str]:
        whole = self.prompt + self.reply
        return [whole[:end] for end in range(BLOCK, len(whole) + 1, BLOCK)]


class Scheduler:
    """Schedules what it is told to."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.hash_block_size = BLOCK
        self.encoder_cache_manager = SimpleNamespace(cached={})
        self.next: tuple[dict[str, int], dict[str, list[int]]] = ({}, {})

    def schedule(self) -> Any:
        tokens, encoder = self.next
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_encoder_inputs=encoder)

    def step(self, tokens: dict[str, int], encoder: dict[str, list[int]] | None = None) -> None:
        self.next = (tokens, encoder or {})
        self.schedule()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def counter(scheduler: Scheduler) -> WorkCounter:
    return WorkCounter(scheduler)


def arrive(scheduler: Scheduler, counter: WorkCounter, name: str, request: Request) -> None:
    scheduler.requests[name] = request
    counter.arrived(request)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 11])
def test_a_group_needs_its_prompt_once_and_the_last_block_of_it_per_sibling(
    scheduler: Scheduler, counter: WorkCounter, length: int
) -> None:
    for number in range(8):
        arrive(scheduler, counter, str(number), Request("abcdefghijk"[:length]))
    assert counter.needed_prompt_tokens == length + 7 * (length - BLOCK * ((length - 1) // BLOCK))
    assert counter.distinct_prompt_tokens == length


def test_a_later_turn_needs_its_own_tokens_and_the_block_that_was_open(
    scheduler: Scheduler, counter: WorkCounter
) -> None:
    first = Request("abcdef", reply="ghijk")
    arrive(scheduler, counter, "1", first)
    first.num_computed_tokens = 10  # the last token of a reply is sampled, not computed
    counter.left(first)
    arrive(scheduler, counter, "2", Request("abcdefghijk" + "lmnop"))
    assert counter.needed_prompt_tokens == 6 + (16 - 8)


def test_what_the_scheduler_orders_is_counted_in_chunks_and_again_after_an_eviction(
    scheduler: Scheduler, counter: WorkCounter
) -> None:
    request = Request("abcdefghij")
    arrive(scheduler, counter, "1", request)
    scheduler.step({"1": 7})
    scheduler.step({"1": 3})
    assert counter.computed_prompt_tokens == 10
    for _ in range(5):  # tokens of the reply
        scheduler.step({"1": 1})
    assert counter.computed_prompt_tokens == 10
    request.num_computed_tokens = 8  # evicted, and found in the cache up to here: prompt 2, reply 5 and the next one
    scheduler.step({"1": 8})
    assert counter.computed_prompt_tokens == 10 + 2 + 5


def test_a_cached_prefix_is_not_counted(scheduler: Scheduler, counter: WorkCounter) -> None:
    arrive(scheduler, counter, "1", Request("abcdefghij", num_computed_tokens=8))
    scheduler.step({"1": 2})
    assert counter.computed_prompt_tokens == 2


def test_an_image_is_needed_once_per_version_unless_it_was_encoded_before(
    scheduler: Scheduler, counter: WorkCounter
) -> None:
    scheduler.encoder_cache_manager.cached["old"] = set()
    arrive(scheduler, counter, "1", Request("abc", images=(("old", 9), ("new", 5))))
    arrive(scheduler, counter, "2", Request("abd", images=(("new", 5),)))
    scheduler.step({"1": 3, "2": 3}, {"1": [1], "2": [0]})
    assert (counter.needed_image_tokens, counter.encoded_image_tokens) == (5, 10)
    counter.forget()
    arrive(scheduler, counter, "3", Request("abc", images=(("new", 5),)))
    assert counter.needed_image_tokens == 10
    assert counter.needed_prompt_tokens == 9


def test_what_a_live_version_computed_stays_known(scheduler: Scheduler) -> None:
    counter = WorkCounter(scheduler, live_versions=2)
    arrive(scheduler, counter, "1", Request("abcdefgh"))
    counter.forget()
    arrive(scheduler, counter, "2", Request("abcdefgh"))
    assert counter.needed_prompt_tokens == 8 + BLOCK
    counter.forget()
    counter.forget()
    arrive(scheduler, counter, "3", Request("abcdefgh"))
    assert counter.needed_prompt_tokens == 8 + BLOCK + 8


def test_a_score_is_left_out(scheduler: Scheduler, counter: WorkCounter) -> None:
    arrive(scheduler, counter, "1", Request("abcdefgh", images=(("one", 5),), scores=True))
    scheduler.step({"1": 8}, {"1": [0]})
    assert set(counter.read().values()) == {0}
