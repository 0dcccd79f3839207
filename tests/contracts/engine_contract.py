"""What every engine must do. A test class inherits EngineContract and gives a `case` fixture."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from argusrl.errors import AdapterRefused, EngineError
from argusrl.rollout.engine import Canary, Completion, Engine, EngineImage, EngineSettings, SampleRequest, Span
from argusrl.storage.digests import logical_digest, sha256_file
from argusrl.types import AdapterFiles, AdapterRef, StopReason

PIXELS = 64


@dataclass
class EngineCase:
    """An engine and what a test must know to talk to it."""

    engine: Engine
    settings: EngineSettings
    image_start: int
    image_pad: int
    image_end: int
    tokens_per_image: int  # of a square of PIXELS
    text_ids: range  # ordinary tokens
    lora_shapes: Mapping[str, tuple[int, int]]  # PEFT module name -> (inputs, outputs)
    folder: Path  # for adapters
    versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(work, 120))

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """The whole replies, in the order of their seeds."""
        return assembled([span async for span in self.engine.sample(request)], len(request.seeds))

    def request(self, seeds: tuple[int, ...] = (1,), *, prompt: int = 0, images: int = 1, **changes: Any) -> Any:
        """A request with text drawn by `prompt` and that many images."""
        text = random.Random(prompt).choices(self.text_ids, k=12)
        pictures = tuple(picture(1000 * prompt + number) for number in range(images))
        collapsed, expanded = list(text[:4]), list(text[:4])
        for _ in pictures:
            collapsed += [self.image_start, self.image_pad, self.image_end]
            expanded += [self.image_start, *[self.image_pad] * self.tokens_per_image, self.image_end]
        request = SampleRequest(
            id=f"p{prompt}",
            collapsed_ids=(*collapsed, *text[4:]),
            expanded_ids=(*expanded, *text[4:]),
            images=pictures,
            seeds=seeds,
            temperature=1.0,
            max_tokens=24,
            adapter_version=None,
        )
        return replace(request, **changes)

    def canary(self) -> Canary:
        request = self.request(prompt=77)
        return Canary(
            collapsed_ids=request.collapsed_ids,
            expanded_ids=request.expanded_ids,
            images=request.images,
            response_ids=tuple(self.text_ids[3:9]),
        )

    def publish(
        self, *, rename: Callable[[str], str] = str, rank: int | None = None, poison: float | None = None
    ) -> tuple[AdapterRef, AdapterFiles]:
        """A fresh random adapter of the next version, as a run hands it over: in memory that nobody may write to."""
        version = next(self.versions)
        folder = self.folder / f"v{version:06d}"
        folder.mkdir()
        rank = rank or self.settings.lora_rank or 0
        random_numbers = np.random.default_rng(version)
        tensors = {}
        for module, (inputs, outputs) in self.lora_shapes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = random_numbers.normal(0, 0.08, shape).astype(np.float32)
                tensors[rename(f"base_model.model.{module}.lora_{part}.weight")] = values
        if poison is not None:
            next(iter(tensors.values()))[0, 0] = poison
        file = folder / "adapter_model.safetensors"
        save_file(tensors, file)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": self.settings.lora_alpha, "bias": "none"}
        config["target_modules"] = sorted({module.rpartition(".")[2] for module in self.lora_shapes})
        (folder / "adapter_config.json").write_text(json.dumps(config))
        digest = logical_digest((name, "float32", one.shape, one.tobytes()) for name, one in tensors.items())
        ref = AdapterRef(version=version, epoch=1, path=folder.name, sha256=digest, file_sha256=sha256_file(file))
        return ref, files_of(folder, "adapter_model.safetensors")

    async def load(self) -> AdapterRef:
        ref, files = self.publish()
        assert await self.engine.load_adapter(ref, files) == ref.sha256
        return ref


def assembled(spans: list[Span], seeds: int) -> list[Completion]:
    """What the spans of a request make of its replies; every reply must have ended."""
    replies = []
    for index in range(seeds):
        own = [span for span in spans if span.index == index]
        assert [span.stop is None for span in own] == [True] * (len(own) - 1) + [False]
        assert all(span.ids for span in own[:-1])
        assert all(len(span.ids) == len(span.logprobs) for span in own)
        ids, logprobs = (sum((getattr(span, name) for span in own), ()) for name in ("ids", "logprobs"))
        replies.append(Completion(response_ids=ids, logprobs=logprobs, stop=own[-1].stop))
    return replies


def picture(number: int) -> EngineImage:
    """A square of PIXELS of noise."""
    noise = np.random.default_rng(number).integers(0, 255, (PIXELS, PIXELS, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    data = file.getvalue()
    return EngineImage(sha256=hashlib.sha256(data).hexdigest(), data=data)


class EngineContract:
    """Inherit, and give a fixture `case`: EngineCase."""

    # ---- sampling

    def test_equal_seeds_give_equal_tokens_and_logprobs_alone_and_in_a_crowd(self, case: EngineCase) -> None:
        async def work() -> None:
            alone = await case.sample(case.request((5, 6)))
            crowd = [case.request(tuple(range(8)), prompt=number) for number in range(6)]
            groups = await asyncio.gather(*(case.sample(one) for one in crowd))
            assert groups[0][5:7] == alone

        case.run(work())

    def test_one_completion_per_seed_in_order_and_other_seeds_differ(self, case: EngineCase) -> None:
        replies = case.run(case.sample(case.request((1, 2, 3, 2))))
        assert len(replies) == 4
        assert replies[1] == replies[3]
        assert len({reply.response_ids for reply in replies}) == 3

    def test_a_continuation_from_any_token_of_a_reply_equals_the_rest(self, case: EngineCase) -> None:
        async def work() -> None:
            request = case.request(tuple(range(4)))
            await continued_from_everywhere(case, request, await case.sample(request))
            hot = replace(request, temperature=1.3)
            await continued_from_everywhere(case, hot, await case.sample(hot))

        case.run(work())

    def test_a_long_reply_comes_in_several_spans_that_make_the_whole(self, case: EngineCase) -> None:
        async def work() -> None:
            request = case.request(tuple(range(8)), temperature=2.0, max_tokens=10**6)
            spans = [span async for span in case.engine.sample(request)]
            assert len(spans) > len(request.seeds)
            assert assembled(spans, 8) == await case.sample(request)

        case.run(work())

    def test_a_reply_that_ended_is_not_held_back_by_its_siblings(self, case: EngineCase) -> None:
        async def work() -> None:
            lengths = {}
            for seed, reply in enumerate(await case.sample(case.request(tuple(range(16)), temperature=2.0))):
                lengths[len(reply.response_ids)] = seed
            long, short = lengths[max(lengths)], lengths[min(lengths)]
            assert max(lengths) > min(lengths)
            request = case.request((long, short), temperature=2.0)
            ends = [span.index async for span in case.engine.sample(request) if span.stop is not None]
            assert ends == [1, 0]

        case.run(work())

    def test_greedy_does_not_depend_on_the_seed(self, case: EngineCase) -> None:
        first, second = case.run(case.sample(case.request((1, 2), temperature=0.0)))
        assert first == second

    def test_replies_have_no_banned_token_and_end_at_the_first_end_token(self, case: EngineCase) -> None:
        request = case.request(tuple(range(24)), temperature=2.0, max_tokens=40)
        replies: list[Completion] = case.run(case.sample(request))
        for reply in replies:
            assert not set(reply.response_ids) & set(case.settings.banned_ids)
            assert len(reply.logprobs) == len(reply.response_ids)
            assert all(math.isfinite(one) and one <= 0 for one in reply.logprobs)
            ended = reply.response_ids[-1] in case.settings.end_ids
            assert reply.stop == (StopReason.STOP if ended else StopReason.LENGTH)
            assert not set(reply.response_ids[:-1]) & set(case.settings.end_ids)
            assert ended or len(reply.response_ids) == 40

    def test_the_reply_ends_where_the_model_ends(self, case: EngineCase) -> None:
        request = case.request(max_tokens=10**6, temperature=2.0)
        (reply,) = case.run(case.sample(request))
        room = case.settings.max_tokens - len(request.expanded_ids)
        assert len(reply.response_ids) == room or reply.stop == StopReason.STOP

    # ---- refused requests

    def test_another_expansion_than_the_trainers_is_refused_before_anything_is_sampled(self, case: EngineCase) -> None:
        async def work() -> None:
            request = case.request()
            before = await case.engine.progress()
            extra = (*request.expanded_ids, case.text_ids[0])
            with pytest.raises(EngineError, match=rf"{len(request.expanded_ids)} tokens.*{len(extra)}"):
                await case.sample(replace(request, expanded_ids=extra))
            other = (case.text_ids[0] + case.text_ids[1] - request.expanded_ids[0], *request.expanded_ids[1:])
            with pytest.raises(EngineError):
                await case.sample(replace(request, expanded_ids=other))
            after = await case.engine.progress()
            assert after.generated_tokens == before.generated_tokens
            assert await case.sample(request)

        case.run(work())

    def test_a_request_that_is_too_long_costs_only_itself(self, case: EngineCase) -> None:
        async def work() -> None:
            good = case.request((1, 2))
            text = (case.text_ids[0],) * case.settings.max_tokens
            long = replace(good, collapsed_ids=text, expanded_ids=text, images=())
            refused, served = await asyncio.gather(case.sample(long), case.sample(good), return_exceptions=True)
            assert isinstance(refused, EngineError)
            assert str(case.settings.max_tokens) in str(refused)
            assert served == await case.sample(good)

        case.run(work())

    def test_a_version_that_is_not_loaded_is_refused(self, case: EngineCase) -> None:
        with pytest.raises(EngineError, match="9999"):
            case.run(case.sample(case.request(adapter_version=9999)))

    # ---- images

    def test_an_image_needs_to_be_sent_once(self, case: EngineCase) -> None:
        async def work() -> None:
            request = case.request(prompt=500, images=2)
            bare = tuple(replace(image, data=None) for image in request.images)
            with pytest.raises(EngineError, match=r"^unknown image"):
                await case.sample(replace(request, images=bare))
            sent = await case.sample(request)
            assert await case.sample(replace(request, images=bare)) == sent

        case.run(work())

    def test_the_reply_depends_on_the_image(self, case: EngineCase) -> None:
        async def work() -> None:
            request = case.request(tuple(range(8)))
            other = replace(request, images=(picture(123456),))
            assert await case.sample(request) != await case.sample(other)

        case.run(work())

    def test_text_alone_is_served_too(self, case: EngineCase) -> None:
        request = case.request((1, 2), images=0)
        assert request.collapsed_ids == request.expanded_ids
        assert len(case.run(case.sample(request))) == 2

    # ---- adapters

    def test_an_adapter_changes_the_canary_and_its_digest_is_returned(self, case: EngineCase) -> None:
        async def work() -> None:
            base = await case.engine.score(case.canary(), None)
            ref = await case.load()
            adapted = await case.engine.score(case.canary(), ref.version)
            assert len(base) == len(adapted) == len(case.canary().response_ids)
            assert max(abs(one - other) for one, other in zip(base, adapted, strict=True)) > 1e-3
            assert await case.engine.score(case.canary(), None) == pytest.approx(base, abs=1e-6)
            assert (await case.engine.progress()).adapter_version == ref.version

        case.run(work())

    def test_a_newer_version_takes_the_place_of_the_older(self, case: EngineCase) -> None:
        async def work() -> None:
            older, newer = await case.load(), await case.load()
            assert await case.sample(case.request(adapter_version=newer.version))
            with pytest.raises(EngineError, match=str(older.version)):
                await case.sample(case.request(adapter_version=older.version))

        case.run(work())

    def test_loading_the_live_version_again_changes_nothing(self, case: EngineCase) -> None:
        async def work() -> None:
            ref, files = case.publish()
            assert await case.engine.load_adapter(ref, files) == ref.sha256
            assert await case.engine.load_adapter(ref, files) == ref.sha256

        case.run(work())

    @pytest.mark.parametrize("fault", ["renamed", "truncated", "rank", "nan", "digest", "config"])
    def test_a_bad_adapter_is_refused_and_the_version_before_is_still_served(
        self, case: EngineCase, fault: str
    ) -> None:
        async def work() -> None:
            good = await case.load()
            request = case.request((1, 2), adapter_version=good.version)
            before = await case.sample(request)
            ref, files = bad_adapter(case, fault)
            with pytest.raises(AdapterRefused, match=f"version {ref.version}"):
                await case.engine.load_adapter(ref, files)
            assert await case.sample(request) == before
            assert (await case.engine.progress()).adapter_version == good.version
            with pytest.raises(EngineError, match=str(ref.version)):
                await case.sample(replace(request, adapter_version=ref.version))

        case.run(work())

    # ---- cancelling, sleeping, counting

    def test_cancelling_the_call_aborts_it_in_the_engine(self, case: EngineCase) -> None:
        async def work() -> None:
            long = case.request(tuple(range(8)), temperature=2.0, max_tokens=10**6)
            before = await case.engine.progress()
            call = asyncio.create_task(case.sample(long))
            await until_running(case.engine)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            served = await case.sample(case.request())
            assert served == await case.sample(case.request())
            progress = await case.engine.progress()
            assert progress.running_requests == 0
            assert progress.generated_tokens > before.generated_tokens + 2 * len(served[0].response_ids)

        case.run(work())

    def test_sleep_is_refused_while_requests_run_and_requests_while_asleep(self, case: EngineCase) -> None:
        async def work() -> None:
            call = asyncio.create_task(case.sample(case.request(tuple(range(8)), temperature=2.0, max_tokens=100)))
            await until_running(case.engine)
            with pytest.raises(EngineError, match="sleep"):
                await case.engine.sleep()
            await call
            before = await case.sample(case.request())
            await case.engine.sleep()
            ref, files = case.publish()
            with pytest.raises(EngineError, match="asleep"):
                await case.sample(case.request())
            with pytest.raises(EngineError, match="asleep"):
                await case.engine.load_adapter(ref, files)
            with pytest.raises(EngineError, match="weights"):
                await case.engine.wake_cache()
            await case.engine.wake_weights()
            with pytest.raises(EngineError, match="cache"):
                await case.sample(case.request())
            await case.engine.load_adapter(ref, files)
            await case.engine.wake_cache()
            assert await case.sample(case.request()) == before
            assert await case.sample(case.request(adapter_version=ref.version))

        case.run(work())

    def test_closing_the_iterator_aborts_in_the_engine(self, case: EngineCase) -> None:
        async def work() -> None:
            spans = case.engine.sample(case.request((1, 2, 3, 4), temperature=2.0, max_tokens=10**6))
            async for span in spans:
                if span.ids:
                    break
            await spans.aclose()  # type: ignore[attr-defined]
            await case.sample(case.request())
            assert (await case.engine.progress()).running_requests == 0

        case.run(work())

    def test_progress_counts_tokens_and_requests(self, case: EngineCase) -> None:
        async def work() -> None:
            before = await case.engine.progress()
            replies = await case.sample(case.request((1, 2, 3)))
            after = await case.engine.progress()
            tokens = sum(len(reply.response_ids) for reply in replies)
            assert after.generated_tokens - before.generated_tokens == tokens
            assert after.finished_requests - before.finished_requests == 3
            assert after.prompt_tokens - before.prompt_tokens == 3 * len(case.request().expanded_ids)
            assert after.running_requests == 0
            assert after.steps - before.steps >= max(len(reply.response_ids) for reply in replies)

        case.run(work())


class SeveralVersionsContract(EngineContract):
    """Of an engine that serves an older version beside the newest one while requests under it run."""

    def test_requests_under_way_finish_under_their_own_version(self, case: EngineCase) -> None:
        async def work() -> None:
            older = await case.load()
            request = case.request(tuple(range(8)), temperature=2.0, max_tokens=60, adapter_version=older.version)
            undisturbed = await case.sample(request)
            under_way = asyncio.create_task(case.sample(request))
            await until_running(case.engine)
            newer = await case.load()
            beside = await case.sample(replace(request, adapter_version=newer.version))
            assert await under_way == undisturbed
            assert beside != undisturbed

        case.run(work())


class OneVersionContract(EngineContract):
    """Of an engine whose weights are the version: requests under other weights do not run side by side."""

    def test_nothing_is_loaded_and_no_other_version_sampled_while_requests_run(self, case: EngineCase) -> None:
        async def work() -> None:
            live = await case.load()
            request = case.request(tuple(range(8)), temperature=2.0, max_tokens=100, adapter_version=live.version)
            undisturbed = await case.sample(request)
            under_way = asyncio.create_task(case.sample(request))
            await until_running(case.engine)
            newer, files = case.publish()
            with pytest.raises(EngineError, match=r"while \d sequences run"):
                await case.engine.load_adapter(newer, files)
            with pytest.raises(EngineError, match=r"while \d sequences run"):
                await case.sample(replace(request, adapter_version=None))
            assert await under_way == undisturbed
            assert (await case.engine.progress()).adapter_version == live.version
            await case.engine.load_adapter(newer, files)
            assert await case.sample(replace(request, adapter_version=newer.version)) != undisturbed

        case.run(work())


async def continued_from_everywhere(case: EngineCase, request: SampleRequest, replies: list[Completion]) -> None:
    """Cut every reply after each of its tokens and compare what the engine of `case` makes of the rest."""
    first = await case.sample(request)  # makes the images known
    assert first == replies
    cuts = [
        (seed, whole, cut)
        for seed, whole in zip(request.seeds, replies, strict=True)
        for cut in range(1, len(whole.response_ids))
    ]
    assert cuts
    rests = await asyncio.gather(*(case.sample(continued(request, *one)) for one in cuts))
    for (_, whole, cut), (rest,) in zip(cuts, rests, strict=True):
        assert rest.response_ids == whole.response_ids[cut:]
        assert rest.logprobs == whole.logprobs[cut:]
        assert rest.stop == whole.stop


def continued(request: SampleRequest, seed: int, reply: Completion, cut: int) -> SampleRequest:
    """The request that goes on after the first `cut` tokens of a reply; images are known by now."""
    done = reply.response_ids[:cut]
    return replace(
        request,
        collapsed_ids=request.collapsed_ids + done,
        expanded_ids=request.expanded_ids + done,
        images=tuple(replace(image, data=None) for image in request.images),
        seeds=(seed,),
        max_tokens=request.max_tokens - cut,
    )


def files_of(folder: Path, name: str) -> AdapterFiles:
    """What the engine gets: the safetensors file as memory that nobody may write to, as shared memory is."""
    config = folder / "adapter_config.json"
    tensors = np.frombuffer((folder / name).read_bytes(), np.uint8)
    return AdapterFiles(config=config.read_bytes() if config.exists() else b"", tensors=tensors)


def bad_adapter(case: EngineCase, fault: str) -> tuple[AdapterRef, AdapterFiles]:
    if fault == "renamed":  # names that a lenient loader skips without a word
        return case.publish(rename=lambda name: name.replace("layers.", "blocks."))
    if fault == "rank":
        return case.publish(rank=8)
    if fault == "nan":
        return case.publish(poison=math.nan)
    ref, files = case.publish()
    if fault == "digest":
        return replace(ref, sha256="0" * 64), files
    if fault == "truncated":
        return ref, replace(files, tensors=files.tensors[:-100])
    return ref, replace(files, config=files.config[:-1])


async def until_running(engine: Engine) -> None:
    """Wait until the engine has sampled something of what was just asked."""
    start = (await engine.progress()).generated_tokens
    while True:
        progress = await engine.progress()
        if progress.running_requests and progress.generated_tokens > start:
            return
        await asyncio.sleep(0.001)
