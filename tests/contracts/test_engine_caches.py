"""Within a step no image is processed or encoded twice and no whole block of a prompt is computed twice.

Checked against a hand count, against vLLM's own counters, and against what the vision tower was really called with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argusrl.rollout.engine import EngineProgress, SampleRequest
from argusrl.types import StopReason
from contracts.engine_contract import EngineCase
from contracts.vllm_case import running_vllm

BLOCK = 32
GROUP = 8
COUNTED = ("prompt", "cached_prompt", "computed_prompt", "needed_prompt", "distinct_prompt")
IMAGE_COUNTED = ("encoded_image", "needed_image")


class Work:
    """What the engine did between `begin` and `end`."""

    def __init__(self, case: EngineCase) -> None:
        self.case = case
        self.vllm: Any = case.engine._engine  # type: ignore[attr-defined]
        # A new version makes the engine forget processed images, behind what it prepares.
        case.engine._preparation.submit(lambda: None).result()  # type: ignore[attr-defined]
        self.processed = self.vllm.renderer.mm_processor_cache.make_stats()
        runner = self.vllm.model_executor.driver_worker.worker.model_runner
        self.seen_patches = 0
        self.handle = runner.get_model().visual.register_forward_pre_hook(self._saw, with_kwargs=True)
        self.before: EngineProgress = case.run(case.engine.progress())

    def _saw(self, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.seen_patches += len(arguments[0] if arguments else options["x"])

    def end(self) -> dict[str, int]:
        """Counters of the engine, patches that went through the tower, queries and hits of the processor cache."""
        self.handle.remove()
        after = self.case.run(self.case.engine.progress())
        names = [f"{name}_tokens" for name in (*COUNTED, *IMAGE_COUNTED)]
        counts = {name: getattr(after, name) - getattr(self.before, name) for name in names}
        cache = self.vllm.renderer.mm_processor_cache.make_stats() - self.processed
        return counts | {"patches": self.seen_patches, "queries": cache.total, "hits": cache.hits}


def least(prompt: int, group: int) -> int:
    """Tokens of a prompt that a group must compute with whole blocks cached: the formula of the docs."""
    return prompt + (group - 1) * (prompt - BLOCK * ((prompt - 1) // BLOCK))


def longer(request: SampleRequest, ids: tuple[int, ...]) -> SampleRequest:
    return replace(request, collapsed_ids=request.collapsed_ids + ids, expanded_ids=request.expanded_ids + ids)


@pytest.mark.engine
class TestCaches:
    @pytest.fixture(scope="class", params=[True, False], ids=["merged", "lora"])
    @classmethod
    def case(
        cls, request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[EngineCase]:
        folder = tmp_path_factory.mktemp("adapters")
        with running_vllm(tiny_model, folder, merged=request.param, max_tokens=512, max_images=4) as case:
            yield case

    @pytest.mark.parametrize("extra", [0, 5, 15, 16, 80])  # 38 images' and text tokens of their own before them
    def test_a_step_of_groups_computes_what_it_must_and_not_a_token_more(self, case: EngineCase, extra: int) -> None:
        version = case.run(case.load()).version
        step = [
            longer(
                case.request(tuple(range(GROUP)), prompt=100 + 10 * extra + number, images=2, adapter_version=version),
                tuple(case.text_ids[:extra]),
            )
            for number in range(6)
        ]
        alone = [
            replace(request, id=f"{request.id}.{seed}", seeds=(seed,)) for request in step[3:] for seed in range(GROUP)
        ]
        work = Work(case)

        async def play() -> None:  # three groups in a call each, and three whose siblings come one by one
            await asyncio.gather(*(case.sample(request) for request in (*step[:3], *alone)))

        case.run(play())
        counts = work.end()
        prompt = len(step[0].expanded_ids)
        assert counts["needed_prompt_tokens"] == 6 * least(prompt, GROUP)
        assert counts["computed_prompt_tokens"] == counts["needed_prompt_tokens"]
        assert counts["prompt_tokens"] - counts["cached_prompt_tokens"] == counts["computed_prompt_tokens"]
        assert counts["distinct_prompt_tokens"] == 6 * prompt
        self.assert_images_once(case, counts, images=12, calls=(3 + 3 * GROUP) * 2)

    def test_every_later_turn_computes_its_own_tokens_and_the_block_before_them(self, case: EngineCase) -> None:
        version = case.run(case.load()).version
        first = case.request(tuple(range(GROUP)), prompt=2000, images=1, max_tokens=40, adapter_version=version)
        work = Work(case)

        async def play() -> tuple[int, int]:
            needed, calls = least(len(first.expanded_ids), GROUP), 1
            turns = [(first, reply) for reply in await case.sample(first)]
            for turn in (1, 2):
                asked = []
                for seed, (before, reply) in enumerate(turns):
                    shown = case.request((seed,), prompt=2010 + turn, images=1)  # siblings meet the same picture
                    known = len(before.expanded_ids) + len(reply.response_ids)
                    then = replace(
                        before,
                        id=f"{turn}.{seed}",
                        seeds=(seed,),
                        collapsed_ids=before.collapsed_ids + reply.response_ids + shown.collapsed_ids,
                        expanded_ids=before.expanded_ids + reply.response_ids + shown.expanded_ids,
                        images=(*before.images, *shown.images),
                    )
                    assert reply.stop in (StopReason.STOP, StopReason.LENGTH)
                    needed += len(then.expanded_ids) - (known - 1) // BLOCK * BLOCK  # the last token was never computed
                    calls += 1
                    asked.append(then)
                replies = await asyncio.gather(*(case.sample(one) for one in asked))
                turns = [(one, reply) for one, (reply,) in zip(asked, replies, strict=True)]
            return needed, calls

        needed, calls = case.run(play())
        counts = work.end()
        assert counts["computed_prompt_tokens"] == counts["needed_prompt_tokens"] == needed
        assert counts["prompt_tokens"] - counts["cached_prompt_tokens"] == needed
        self.assert_images_once(case, counts, images=3, calls=1 + (calls - 1) // 2 * (2 + 3))

    def test_what_is_computed_twice_is_counted_twice(self, case: EngineCase) -> None:
        version = case.run(case.load()).version
        request = case.request((1,), prompt=2050, images=2, adapter_version=version)
        vllm = case.engine._engine  # type: ignore[attr-defined]
        work = Work(case)
        for _ in range(3):
            case.run(case.sample(request))
            vllm.reset_prefix_cache()
            vllm.reset_encoder_cache()
        counts = work.end()
        prompt = len(request.expanded_ids)
        assert counts["computed_prompt_tokens"] == 3 * prompt
        assert counts["needed_prompt_tokens"] == least(prompt, 3)
        assert counts["encoded_image_tokens"] == 3 * counts["needed_image_tokens"] == 3 * 2 * case.tokens_per_image

    def test_scores_are_no_part_of_it(self, case: EngineCase) -> None:
        version = case.run(case.load()).version
        case.run(case.engine.score(case.canary(), version))
        work = Work(case)
        case.run(case.engine.score(case.canary(), version))
        assert set(work.end().values()) <= {0, 1, len(case.canary().expanded_ids) + len(case.canary().response_ids)}

    def assert_images_once(self, case: EngineCase, counts: dict[str, int], *, images: int, calls: int) -> None:
        """Encoded once each, by the counters and by the tower; processed once each, found the other times."""
        tokens = images * case.tokens_per_image
        assert counts["encoded_image_tokens"] == counts["needed_image_tokens"] == tokens
        assert counts["patches"] == 4 * tokens  # the merger makes one token of 2 x 2 patches
        assert (counts["queries"], counts["hits"]) == (calls, calls - images)
