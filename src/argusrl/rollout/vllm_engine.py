"""vLLM behind the engine port: in this process, stepped by one thread, the same code on CPU and GPU."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from argusrl.errors import EngineError
from argusrl.rollout.adapter_check import check_lora_config, check_published, check_reports, refusal
from argusrl.rollout.engine import Canary, Completion, EngineProgress, EngineSettings, SampleRequest
from argusrl.rollout.image_store import ImageStore
from argusrl.rollout.stepping import SteppingThread
from argusrl.rollout.vllm_arguments import engine_arguments, engine_environment
from argusrl.types import AdapterRef, StopReason

T = TypeVar("T")

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
_IMAGE_STORE_BYTES = 512 << 20
_AWAKE, _WEIGHTS, _ASLEEP = "awake", "awake without its cache", "asleep"
_BROKEN = "broken: its weights were replaced in part"


@dataclass(slots=True, eq=False)
class _Adapter:
    """One adapter version that was proven, and how many sequences run under it."""

    ref: AdapterRef
    request: Any  # vLLM's LoRARequest; None for full parameters
    running: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """The sequences of one call: what came of each, and who waits for all of them."""

    adapter: _Adapter | None
    outputs: list[Any]
    done: Future[list[Any]] = field(default_factory=Future)
    engine_ids: list[str] = field(default_factory=list)  # vLLM's own, for aborting


class VllmEngine:
    """The engine port on vLLM. Start it with `start`; several may not live in one process at a time.

    Images are prepared on a thread of their own; everything that touches the engine runs on the stepping thread.
    """

    def __init__(self, engine: Any, settings: EngineSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._images = ImageStore(_IMAGE_STORE_BYTES)
        self._ids = itertools.count(1)
        self._adapter_ids = itertools.count(1)
        self._live: _Adapter | None = None
        self._draining: list[_Adapter] = []  # earlier versions with sequences still running
        self._batches: dict[str, tuple[_Batch, int]] = {}  # by request id: its batch and place there
        self._state = _AWAKE
        self._closed = False
        self._progress = EngineProgress()
        self._ended_tokens = 0
        self._preparation = ThreadPoolExecutor(1, thread_name_prefix="engine-preparation")
        self._stepping = SteppingThread(
            step=self._step, busy=engine.has_unfinished_requests, failed=self._fail, name="engine-stepping"
        )

    @classmethod
    def start(cls, settings: EngineSettings) -> Self:
        """Load the model and return a running engine (blocks for seconds to minutes). Raises EngineError."""
        os.environ.update(engine_environment(settings))
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would silently override kv_cache_memory_bytes
        from vllm import EngineArgs, LLMEngine

        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))
            _keep_processed_images_here(engine)
            attached = engine.collective_rpc("argusrl_attach_noise")
        except Exception as error:
            raise EngineError(
                f"vLLM did not start with {settings.model}: {type(error).__name__}: {error}",
                "see the lines above; `argusrl doctor` checks this machine",
            ) from error
        if any(count != 1 for count in attached):
            raise EngineError(f"sampling noise was attached {attached} times per worker instead of once")
        return cls(engine, settings)

    # ---- the port

    async def sample(self, request: SampleRequest) -> list[Completion]:
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
            "logprobs": 0,
            "flat_logprobs": True,
            "stop_token_ids": list(self._settings.end_ids),
        }
        outputs = await self._generate(request, parameters)
        return [_completion(output) for output in outputs]

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
        (output,) = await self._generate(request, parameters)
        rows = output.prompt_logprobs[-len(canary.response_ids) :] if canary.response_ids else []
        return [float(row[token].logprob) for row, token in zip(rows, canary.response_ids, strict=True)]

    async def load_adapter(self, ref: AdapterRef, folder: Path) -> str:
        return await self._between_steps(lambda: self._load_adapter(ref, folder))

    async def sleep(self) -> None:
        await self._between_steps(self._sleep)

    async def wake_weights(self) -> None:
        await self._between_steps(lambda: self._wake(_ASLEEP, _WEIGHTS, "weights"))

    async def wake_cache(self) -> None:
        await self._between_steps(lambda: self._wake(_WEIGHTS, _AWAKE, "kv_cache"))

    async def progress(self) -> EngineProgress:
        return self._progress

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # ---- one call, many sequences

    async def _generate(self, request: SampleRequest, parameters: dict[str, Any]) -> list[Any]:
        """vLLM's final output per seed. Cancelling aborts what runs."""
        if self._closed:
            raise EngineError("the engine is closed", "start a new engine")
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._preparation, self._prepare, request, parameters)
        batch = _Batch(adapter=None, outputs=[None] * len(request.seeds))
        batch.done.set_running_or_notify_cancel()  # only the stepping thread ends it
        try:
            await self._between_steps(lambda: self._admit(batch, prepared, request))
            return await asyncio.wrap_future(batch.done)
        except asyncio.CancelledError:
            self._stepping.submit(lambda: self._abort(batch))
            raise

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

    def _admit(self, batch: _Batch, prepared: Any, request: SampleRequest) -> None:
        """Give the engine one sequence per seed; they share prompt and processed images."""
        if self._state != _AWAKE:
            raise EngineError(f"the engine is {self._state}", "wake it before sampling")
        batch.adapter = self._adapter_of(request.adapter_version)
        try:
            for place, seed in enumerate(request.seeds):
                one = copy.copy(prepared)
                one.request_id = f"{request.id}#{next(self._ids)}"
                one.sampling_params = copy.copy(prepared.sampling_params)
                one.sampling_params.seed = seed
                one.lora_request = batch.adapter.request if batch.adapter else None
                name = one.request_id  # vLLM lengthens the id it keeps
                batch.engine_ids.append(self._engine.add_request(name, one, one.sampling_params))
                self._batches[name] = (batch, place)
                if batch.adapter:
                    batch.adapter.running += 1
        except Exception as error:
            self._abort(batch)
            raise EngineError(f"vLLM refused request {request.id}: {error}") from error

    def _adapter_of(self, version: int | None) -> _Adapter | None:
        if version is None:
            if self._live is not None and self._live.request is None:
                raise EngineError("full training replaced the base model, there is nothing to sample without a version")
            return None
        for adapter in (self._live, *self._draining):
            if adapter is not None and adapter.ref.version == version:
                return adapter
        held = self._live.ref.version if self._live else None
        raise EngineError(f"adapter version {version} is not loaded, the engine serves {held}")

    def _abort(self, batch: _Batch) -> None:
        self._ended_tokens += self._running_tokens(batch.engine_ids)
        self._engine.abort_request(batch.engine_ids, internal=True)
        for name in [name for name, (owner, _) in self._batches.items() if owner is batch]:
            del self._batches[name]
            self._release(batch.adapter)
        self._read_progress()

    def _release(self, adapter: _Adapter | None) -> None:
        if adapter is None:
            return
        adapter.running -= 1
        if adapter.running == 0 and adapter in self._draining:
            self._draining.remove(adapter)
            self._drop(adapter)

    # ---- the stepping thread

    def _step(self) -> None:
        finished = []
        for output in self._engine.step():
            batch, place = self._batches.pop(output.request_id, (None, 0))
            if batch is None:
                continue  # aborted meanwhile
            batch.outputs[place] = output
            self._release(batch.adapter)
            self._count(output)
            if all(one is not None for one in batch.outputs):
                finished.append(batch)
        self._read_progress()
        for batch in finished:  # the counters come first: who got an answer finds it counted
            batch.done.set_result(batch.outputs)

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
            generated_tokens=self._ended_tokens + self._running_tokens(self._engine.output_processor.request_states),
            running_requests=len(self._batches),
            adapter_version=self._live.ref.version if self._live else None,
        )

    def _running_tokens(self, engine_ids: Iterable[str]) -> int:
        """Tokens that unfinished sequences have so far."""
        states = self._engine.output_processor.request_states
        return sum(states[name].detokenizer.num_output_tokens() for name in engine_ids if name in states)

    def _fail(self, reason: EngineError) -> None:
        batches = {id(batch): batch for batch, _ in self._batches.values()}
        self._batches.clear()
        for batch in batches.values():
            batch.done.set_exception(reason)

    async def _between_steps(self, operation: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._stepping.submit(operation))

    # ---- adapters

    def _load_adapter(self, ref: AdapterRef, folder: Path) -> str:
        if self._state in (_ASLEEP, _BROKEN):
            raise EngineError(f"the engine is {self._state}", "wake its weights before loading, or start a new engine")
        if self._live is not None and self._live.ref == ref:
            return ref.sha256
        check_published(ref, folder)
        load = self._load_weights if self._settings.lora_rank is None else self._load_lora
        adapter = load(ref, folder)
        previous, self._live = self._live, adapter
        if previous is not None and previous.running:
            self._draining.append(previous)
        elif previous is not None:
            self._drop(previous)
        self._read_progress()
        return ref.sha256

    def _load_lora(self, ref: AdapterRef, folder: Path) -> _Adapter:
        from vllm.lora.request import LoRARequest

        check_lora_config(ref, folder, self._settings)
        number = next(self._adapter_ids)
        # A name and an id that never existed: vLLM serves stale weights and stale caches under known ones.
        request = LoRARequest(f"v{ref.version:06d}-{ref.sha256[:12]}-{number}", number, str(folder))
        try:
            self._engine.add_lora(request)
            check_reports(ref, self._engine.collective_rpc("argusrl_prove_adapter", args=(number, str(folder))))
        except Exception as error:
            self._engine.remove_lora(number)
            raise refusal(ref, error) from error
        return _Adapter(ref, request)

    def _load_weights(self, ref: AdapterRef, folder: Path) -> _Adapter:
        if self._batches:
            raise EngineError(f"weights cannot be replaced while {len(self._batches)} sequences run")
        try:
            check_reports(ref, self._engine.collective_rpc("argusrl_check_weights", args=(str(folder),)))
        except Exception as error:
            raise refusal(ref, error) from error
        before, self._state = self._state, _BROKEN  # until every weight is in
        self._engine.collective_rpc("argusrl_load_weights", args=(str(folder),))
        # Weights changed under the same names: what the caches hold belongs to the weights before.
        self._engine.reset_prefix_cache()
        self._engine.reset_encoder_cache()
        self._state = before
        return _Adapter(ref, None)

    def _drop(self, adapter: _Adapter) -> None:
        if adapter.request is not None:
            self._engine.remove_lora(adapter.request.lora_int_id)

    # ---- sleep and end

    def _sleep(self) -> None:
        if self._batches:
            raise EngineError(f"the engine cannot sleep while {len(self._batches)} sequences run")
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
        self._engine = None
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


def _sampling_parameters(parameters: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # The model's own end token counts only where it is one of the stop tokens.
    return SamplingParams(
        n=1, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **parameters
    )


def _completion(output: Any) -> Completion:
    (sequence,) = output.outputs
    ids = tuple(sequence.token_ids)
    logprobs = tuple(float(row[token].logprob) for row, token in zip(sequence.logprobs, ids, strict=True))
    stop = _STOP_REASONS.get(sequence.finish_reason)
    if stop is None:
        raise EngineError(f"vLLM ended request {output.request_id} with {sequence.finish_reason!r}")
    return Completion(response_ids=ids, logprobs=logprobs, stop=stop)
