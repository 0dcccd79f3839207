"""The engine port: samples tokens from one adapter version. vllm_engine.py is the real one; tests hold a fake.

Both pass tests/contracts/engine_contract.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from argusrl.types import AdapterFiles, AdapterRef, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImage:
    """An image of a request. `data` may be None where the engine was sent the same image before."""

    sha256: str
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Sample one reply per seed after the same tokens.

    `collapsed_ids` holds one placeholder per image (the engine expands them); `expanded_ids` is what the trainer
    will see. The engine's own expansion must equal it, or the request is refused. A reply is continued by a request
    whose ids end with the reply so far, and whose `max_tokens` is less by as many.
    """

    id: str
    collapsed_ids: tuple[int, ...]
    expanded_ids: tuple[int, ...]
    images: tuple[EngineImage, ...]  # of the whole sequence, in reading order
    seeds: tuple[int, ...]  # [n]; the noise of reply token t depends on (seed, t) alone
    temperature: float  # 0 to 2; 0 is greedy
    max_tokens: int
    adapter_version: int | None  # None is the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The next tokens of one reply. Spans of a seed follow each other without gap or overlap."""

    index: int  # of the seed in the request
    ids: tuple[int, ...]  # [T] T is 0 only in a last span, where everything was sent before
    logprobs: tuple[float, ...]  # [T] finite; natural log, of the sampled distribution
    stop: StopReason | None  # set in the last span of the seed alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole reply: its spans put together."""

    response_ids: tuple[int, ...]  # [R] end token included
    logprobs: tuple[float, ...]  # [R] natural log, of the sampled distribution (temperature and banned tokens applied)
    stop: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A fixed sequence whose log-probabilities tell adapters apart: prompt with image, then fixed reply ids."""

    collapsed_ids: tuple[int, ...]
    expanded_ids: tuple[int, ...]
    images: tuple[EngineImage, ...]
    response_ids: tuple[int, ...]  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgress:
    """Counters that only grow; a watchdog compares two readings."""

    steps: int = 0  # of the scheduler that computed something: a long prompt is progress, too
    generated_tokens: int = 0
    finished_requests: int = 0
    running_requests: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # served from the prefix cache
    computed_prompt_tokens: int = 0  # by the scheduler's orders, those of scores left out
    needed_prompt_tokens: int = 0  # the least of them, with a prefix cache that never evicts
    distinct_prompt_tokens: int = 0  # the same if equal prompts were one
    encoded_image_tokens: int = 0  # that left the vision tower
    needed_image_tokens: int = 0  # of them, each image once per adapter version
    adapter_version: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine needs to start, resolved from the recipe on the driver."""

    model: str
    dtype: str
    device: str  # "cpu" | "cuda"
    max_tokens: int
    max_images: int  # per sequence; 0 is a text-only model
    lora_rank: int | None  # None: full-parameter training
    lora_alpha: float
    banned_ids: tuple[int, ...]  # vision and padding tokens that must never be sampled
    end_ids: tuple[int, ...]
    cache_bytes: int | None
    gpu_memory_share: float
    max_sequences: int
    eager: bool
    tensor_parallel: int
    min_pixels: int | None = None
    max_pixels: int | None = None
    revision: str | None = None
    live_versions: int = 1  # adapters that can be asked for at any time: the newest ones
    merged: bool = False  # LoRA goes into the weights, one version at a time, instead of through kernels
    lora_targets: tuple[str, ...] = ()  # last name parts of the adapted modules, "q_proj"; empty: all vLLM supports
    options: dict[str, object] = field(default_factory=dict)


class Engine(Protocol):
    """Every method may be called while others run. Errors: EngineError (one request or the engine), AdapterRefused."""

    def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        """The replies as they grow, one per seed. Each ends with a span that has `stop`, whatever its siblings do.

        Cancelling the consumer, or closing the iterator, aborts in the engine what still runs. An EngineError ends
        all replies of the request; what was yielded before stays good.
        """
        ...

    async def load_adapter(self, ref: AdapterRef, files: AdapterFiles) -> str:
        """Load an adapter from memory under a new name and id and return the digest of what was loaded.

        The digest is computed from the tensors inside the engine's model layers, and equals `ref.sha256` when
        every published tensor reached a layer unchanged; otherwise AdapterRefused is raised and nothing is served.
        Older versions than `live_versions` are dropped. Loading the version that is already live is a no-op.

        An engine with `settings.merged`, or one of full-parameter training, replaces its weights: it raises EngineError
        while requests run, and refuses a request for other weights than those under which others run.
        """
        ...

    async def score(self, canary: Canary, adapter_version: int | None) -> list[float]:
        """[R] log-probabilities of the canary's reply (temperature 1, nothing banned) under a version or the base."""
        ...

    async def sleep(self) -> None:
        """Give GPU memory back (weights and cache). Refused while requests run. No-op state change on CPU."""
        ...

    async def wake_weights(self) -> None:
        """First half of waking: weights, not the cache, so that adapters can be loaded before the cache returns."""
        ...

    async def wake_cache(self) -> None:
        """Second half of waking; requests are accepted afterwards."""
        ...

    async def progress(self) -> EngineProgress:
        """Raises WorkerLost when the engine can serve no more."""
        ...

    async def close(self) -> None: ...
