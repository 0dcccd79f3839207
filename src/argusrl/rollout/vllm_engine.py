"""vLLM behind the engine port: in this process, stepped by one thread, the same code on CPU and GPU."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, TypeVar

from argusrl.errors import EngineError, WorkerError
from argusrl.rollout.engine import Canary, EngineProgress, EngineSettings, SampleRequest, Span
from argusrl.rollout.image_store import ImageStore
from argusrl.rollout.sequences import Batch, Piece, RunningSequence, hand_over, span_of
from argusrl.rollout.stepping import SteppingThread
from argusrl.rollout.versions import versions_of
from argusrl.rollout.vllm_arguments import engine_arguments, engine_environment
from argusrl.rollout.work_counter import WorkCounter
from argusrl.types import AdapterFiles, AdapterRef

T = TypeVar("T")

_IMAGE_STORE_BYTES = 512 << 20
_SPAN_SECONDS = 0.05  # between two readings of the sequences that run; a finished one does not wait
_AWAKE, _WEIGHTS, _ASLEEP = "awake", "awake without its cache", "asleep"


class VllmEngine:
    """The engine port on vLLM. Start it with `start`; several may not live in one process at a time.

    Images are prepared on a thread of their own; everything that touches the engine runs on the stepping thread.
    """

    def __init__(self, engine: Any, settings: EngineSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._images = ImageStore(_IMAGE_STORE_BYTES)
        self._ids = itertools.count(1)
        self._sequences: dict[str, RunningSequence] = {}  # by request id
        self._state = _AWAKE
        self._closed = False
        self._progress = EngineProgress()
        self._lost: WorkerError | None = None
        self._ended_tokens = 0
        self._steps = 0  # in which something was computed
        self._next_reading = 0.0  # of time.monotonic
        self._preparation = ThreadPoolExecutor(1, thread_name_prefix="engine-preparation")
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._work = WorkCounter(self._scheduler, settings.live_versions)
        self._versions = versions_of(settings)(engine, settings, changed=self._work.forget, lost=self._fail)
        self._stepping = SteppingThread(
            step=self._step, busy=engine.has_unfinished_requests, failed=self._fail, name="engine-stepping"
        )
        self._stepping.submit(_settle_threads)

    @classmethod
    def start(cls, settings: EngineSettings) -> Self:
        """Load the model and return a running engine (blocks for seconds to minutes). Raises EngineError."""
        _prepare_environment(settings)
        from vllm import EngineArgs, LLMEngine

        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))
            _keep_processed_images_here(engine)
            attached = engine.collective_rpc("argusrl_attach_noise")
            if settings.merged:
                engine.collective_rpc("argusrl_keep_pristine", args=(list(settings.lora_targets),))
        except Exception as error:
            raise EngineError(
                f"vLLM did not start with {settings.model}: {type(error).__name__}: {error}",
                "see the lines above; `argusrl doctor` checks this machine",
            ) from error
        if any(count != 1 for count in attached):
            raise EngineError(f"sampling noise was attached {attached} times per worker instead of once")
        return cls(engine, settings)

    # ---- the port

    async def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        room = self._settings.max_tokens - len(request.expanded_ids)
        if room <= 0:
            raise EngineError(
                f"request {request.id} has {len(request.expanded_ids)} tokens with images expanded, "
                f"the model takes {self._settings.max_tokens} with the reply",
                "raise rollout.max_tokens, or shorten the prompt or its images",
            )
        parameters = {
            "temperature": request.temperature,
            "max_tokens": min(request.max_tokens, room),
            "stop_token_ids": list(self._settings.end_ids),
        }
        async with aclosing(self._generate(request, parameters)) as pieces:
            async for piece in pieces:
                yield span_of(request, piece)

    async def score(self, canary: Canary, adapter_version: int | None) -> list[float]:
        request = SampleRequest(
            id="canary",
            collapsed_ids=canary.collapsed_ids + canary.response_ids,
            expanded_ids=canary.expanded_ids + canary.response_ids,
            images=canary.images,
            seeds=(0,),
            temperature=0.0,
            max_tokens=1,
            adapter_version=adapter_version,
        )
        parameters = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        async with aclosing(self._generate(request, parameters)) as pieces:
            (output,) = [piece.output async for piece in pieces if piece.output is not None]
        rows = output.prompt_logprobs[-len(canary.response_ids) :] if canary.response_ids else []
        return [float(row[token].logprob) for row, token in zip(rows, canary.response_ids, strict=True)]

    async def load_adapter(self, ref: AdapterRef, files: AdapterFiles) -> str:
        return await self._between_steps(lambda: self._load_adapter(ref, files))

    async def sleep(self) -> None:
        await self._between_steps(self._sleep)

    async def wake_weights(self) -> None:
        await self._between_steps(lambda: self._wake(_ASLEEP, _WEIGHTS, "weights"))

    async def wake_cache(self) -> None:
        await self._between_steps(lambda: self._wake(_WEIGHTS, _AWAKE, "kv_cache"))

    async def progress(self) -> EngineProgress:
        if self._lost is not None:
            raise self._lost
        return self._progress

    async def running_tokens(self) -> int:
        """Tokens of all replies that have not ended, those that nobody has read yet included."""
        return await self._between_steps(
            lambda: sum(request.num_output_tokens for request in self._scheduler.requests.values())
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # ---- one call, many sequences

    async def _generate(self, request: SampleRequest, parameters: dict[str, Any]) -> AsyncGenerator[Piece]:
        """What comes of every seed, as it comes. Cancelling or closing aborts what runs."""
        if self._closed:
            raise EngineError("the engine is closed", "start a new engine")
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._preparation, self._prepare, request, parameters)
        batch = Batch(len(request.seeds))
        try:
            await self._between_steps(lambda: self._admit(batch, prepared, request))
            while not batch.ended:
                for piece in await batch.receive():
                    yield piece
        finally:
            if not batch.ended:
                self._stepping.submit(lambda: self._abort(batch))

    def _prepare(self, request: SampleRequest, parameters: dict[str, Any]) -> Any:
        """Process tokens and images once, whatever the number of seeds, and compare the expansion. Own thread."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.collapsed_ids)}
        if request.images:
            prompt["multi_modal_data"] = {"image": [self._images.open(image) for image in request.images]}
            prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
        engine = self._engine
        try:
            parsed = parse_model_prompt(engine.model_config, prompt)
            (rendered,) = engine.renderer.render_cmpl([parsed], engine.renderer.default_cmpl_tok_params)
            prepared = engine.input_processor.process_inputs(
                request.id,
                rendered,
                _sampling_parameters(parameters),
                supported_tasks=engine.get_supported_tasks(),
            )
        except Exception as error:
            raise EngineError(f"vLLM refused request {request.id}: {type(error).__name__}: {error}") from error
        expanded = tuple(prepared.prompt_token_ids)
        if expanded != request.expanded_ids:
            raise EngineError(
                f"request {request.id}: the engine expands {len(request.collapsed_ids)} tokens and "
                f"{len(request.images)} images to {len(expanded)} tokens, the trainer to {len(request.expanded_ids)}"
                + ("" if len(expanded) != len(request.expanded_ids) else " others"),
                "engine and trainer must use the same processor settings (pixels, revision)",
            )
        return prepared

    def _admit(self, batch: Batch, prepared: Any, request: SampleRequest) -> None:
        """Give the engine one sequence per seed; they share prompt and processed images."""
        if self._lost is not None:
            raise self._lost
        if self._state != _AWAKE:
            raise EngineError(f"the engine is {self._state}", "wake it before sampling")
        batch.adapter = self._versions.ready(request.adapter_version, len(self._sequences))
        try:
            for place, seed in enumerate(request.seeds):
                one = copy.copy(prepared)
                one.request_id = f"{request.id}#{next(self._ids)}"
                one.sampling_params = copy.copy(prepared.sampling_params)
                one.sampling_params.seed = seed
                one.lora_request = batch.adapter.request if batch.adapter else None
                name = one.request_id  # vLLM lengthens the id it keeps
                batch.engine_ids.append(self._engine.add_request(name, one, one.sampling_params))
                state = self._engine.output_processor.request_states[batch.engine_ids[-1]]
                scheduled = self._scheduler.requests[batch.engine_ids[-1]]
                self._sequences[name] = RunningSequence(batch, place, state, scheduled)
                if batch.adapter:
                    batch.adapter.running += 1
                self._work.arrived(scheduled)
        except Exception as error:
            self._abort(batch)
            raise EngineError(f"vLLM refused request {request.id}: {error}") from error

    def _abort(self, batch: Batch) -> None:
        self._engine.abort_request(batch.engine_ids, internal=True)
        for name in [name for name, sequence in self._sequences.items() if sequence.batch is batch]:
            sequence = self._sequences.pop(name)
            self._ended_tokens += sequence.tokens
            self._work.left(sequence.scheduled)
            self._versions.release(batch.adapter)
        self._read_progress()

    # ---- the stepping thread

    def _step(self) -> None:
        news: dict[Batch, list[Piece]] = defaultdict(list)
        for output in self._engine.step():
            sequence = self._sequences.pop(output.request_id, None)
            if sequence is None:
                continue  # aborted meanwhile
            self._versions.release(sequence.batch.adapter)
            self._work.left(sequence.scheduled)
            self._count(output)
            if (piece := sequence.take(output)) is not None:
                news[sequence.batch].append(piece)
        if reading := time.monotonic() >= self._next_reading:
            for sequence in self._sequences.values():
                if (piece := sequence.take()) is not None:
                    news[sequence.batch].append(piece)
            self._next_reading = time.monotonic() + _SPAN_SECONDS
        self._steps += bool(self._scheduler.prev_step_scheduled_req_ids)
        if reading or news:
            self._read_progress()
            hand_over(news)  # after the counters: who got an answer finds it counted

    def _count(self, output: Any) -> None:
        self._ended_tokens += len(output.outputs[0].token_ids)
        self._progress = replace(
            self._progress,
            finished_requests=self._progress.finished_requests + 1,
            prompt_tokens=self._progress.prompt_tokens + len(output.prompt_token_ids),
            cached_prompt_tokens=self._progress.cached_prompt_tokens + (output.num_cached_tokens or 0),
        )

    def _read_progress(self) -> None:
        self._progress = replace(
            self._progress,
            steps=self._steps,
            generated_tokens=self._ended_tokens + sum(sequence.tokens for sequence in self._sequences.values()),
            running_requests=len(self._sequences),
            adapter_version=self._versions.live.ref.version if self._versions.live else None,
            **self._work.read(),
        )

    def _fail(self, reason: WorkerError) -> None:
        self._lost = reason
        batches = {sequence.batch for sequence in self._sequences.values()}
        self._sequences.clear()
        hand_over(dict.fromkeys(batches, reason))

    async def _between_steps(self, operation: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._stepping.submit(operation))

    # ---- adapters

    def _load_adapter(self, ref: AdapterRef, files: AdapterFiles) -> str:
        if self._lost is not None:
            raise self._lost
        if self._state == _ASLEEP:
            raise EngineError("the engine is asleep", "wake its weights before loading")
        self._versions.load(ref, files, len(self._sequences))
        self._read_progress()
        self._preparation.submit(self._forget_processed_images)
        return ref.sha256

    def _forget_processed_images(self) -> None:
        """Groups and turns of one step share them; vLLM would keep those of all steps, up to 4 GiB."""
        cache = self._engine.renderer.mm_processor_cache
        if cache is not None:
            cache.clear_cache()

    # ---- sleep and end

    def _sleep(self) -> None:
        if self._sequences:
            raise EngineError(f"the engine cannot sleep while {len(self._sequences)} sequences run")
        if self._state == _ASLEEP:
            return
        if self._settings.device != "cpu":
            self._engine.sleep(level=1)
        self._state = _ASLEEP

    def _wake(self, before: str, after: str, tag: str) -> None:
        if self._state == before:
            if self._settings.device != "cpu":
                self._engine.wake_up([tag])
            self._state = after
        elif self._state == _ASLEEP:
            raise EngineError("the engine is asleep", "wake its weights before its cache")

    def _close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        if self._closed:
            return
        self._closed = True
        self._preparation.shutdown(wait=True)
        self._stepping.stop()
        self._engine.engine_core.shutdown()
        self._engine = self._scheduler = None
        cleanup_dist_env_and_memory()


def _keep_processed_images_here(engine: Any) -> None:
    """One cache of processed images instead of a mirrored pair.

    vLLM keeps a sending and a receiving cache that must see the same requests in the same order, as between two
    processes. Here is one process, and a request that is refused after its images were processed must not
    leave the pair disagreeing.
    """
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache

    if engine.renderer.mm_processor_cache is not None:
        engine.renderer._mm_processor_cache = MultiModalProcessorOnlyCache(engine.model_config)
        engine.engine_core.engine_core.mm_receiver_cache = None


def _settle_threads() -> None:
    """Have torch settle how many OpenMP threads this thread uses, at most as many as there are cores.

    It does so at its first parallel operation in a thread. vLLM's attention counts them before and after that in the
    first step, and refuses to work with two numbers.
    """
    import torch

    torch.get_num_threads()


def _prepare_environment(settings: EngineSettings) -> None:
    os.environ.update(engine_environment(settings.device))
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would silently override kv_cache_memory_bytes


def _sampling_parameters(parameters: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # The model's own end token counts only where it is one of the stop tokens.
    return SamplingParams(
        n=1,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,  # what is sent earlier is read from vLLM's own lists
        **parameters,
    )


def preload() -> None:
    """Import what an engine needs: most of the time that its start takes. `import vllm` alone is next to nothing."""
    from vllm import EngineArgs, LLMEngine  # noqa: F401


def preload_model(settings: EngineSettings) -> None:
    """Import, beyond that, what belongs to the model and to this machine; vLLM's configuration asks for it."""
    _prepare_environment(settings)
    from vllm import EngineArgs

    EngineArgs(**engine_arguments(settings)).create_engine_config()
