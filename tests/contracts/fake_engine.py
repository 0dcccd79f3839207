"""An engine without a model: replies are drawn from a hash of everything that a real reply depends on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from argusrl.errors import AdapterRefused, EngineError
from argusrl.rollout.engine import Canary, EngineImage, EngineProgress, EngineSettings, SampleRequest, Span
from argusrl.storage.digests import logical_digest
from argusrl.types import AdapterFiles, AdapterRef, StopReason


@dataclass
class _Reply:
    index: int
    seed: int
    ids: list[int]  # the prompt's before them
    fresh: list[tuple[int, float]] = field(default_factory=list)  # tokens that were not handed out yet

    def span(self, stop: StopReason | None) -> Span:
        fresh, self.fresh = self.fresh, []
        ids, logprobs = zip(*fresh, strict=True)
        return Span(index=self.index, ids=ids, logprobs=logprobs, stop=stop)


class FakeEngine:
    """Same contract as the real engine, in plain Python. `tokens_per_image` placeholders stand for each image."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        image_pad: int,
        tokens_per_image: int,
        vocabulary: int,
        lora_modules: Sequence[str],
        span_tokens: int = 3,
    ) -> None:
        self._settings = settings
        self._image_pad = image_pad
        self._tokens_per_image = tokens_per_image
        self._vocabulary = vocabulary
        self._span_tokens = span_tokens
        self._names = {f"base_model.model.{name}.lora_{part}.weight" for name in lora_modules for part in "AB"}
        self._known_images: set[str] = set()
        self._live: AdapterRef | None = None
        self._state = "awake"
        self._closed = False
        self._progress = EngineProgress()

    async def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        context = self._context(request, request.adapter_version)
        replies = [_Reply(index, seed, list(request.expanded_ids)) for index, seed in enumerate(request.seeds)]
        running = list(replies)
        self._add(running_requests=len(running), steps=1)
        try:
            while running:
                for reply in list(running):
                    stop = self._grow(request, reply, context)
                    if stop is not None:
                        running.remove(reply)
                        self._add(running_requests=-1, finished_requests=1, prompt_tokens=len(request.expanded_ids))
                    if stop is not None or len(reply.fresh) == self._span_tokens:
                        yield reply.span(stop)
                self._add(steps=1)
                await asyncio.sleep(0)
        finally:
            self._add(running_requests=-len(running))

    async def score(self, canary: Canary, adapter_version: int | None) -> list[float]:
        request = SampleRequest(
            id="canary",
            collapsed_ids=canary.collapsed_ids,
            expanded_ids=canary.expanded_ids,
            images=canary.images,
            seeds=(0,),
            temperature=1.0,
            max_tokens=1,
            adapter_version=adapter_version,
        )
        context = self._context(request, adapter_version)
        ids = list(canary.expanded_ids)
        scores = []
        for token in canary.response_ids:
            scores.append(self._logprobs(context, ids, 1.0, banned=())[token])
            ids.append(token)
        return scores

    async def load_adapter(self, ref: AdapterRef, files: AdapterFiles) -> str:
        if self._state == "asleep":
            raise EngineError("the engine is asleep")
        if ref != self._live:
            problem = self._problem(ref, files)
            if problem:
                raise AdapterRefused(f"adapter version {ref.version}: {problem}")
            self._live = ref
            self._progress = replace(self._progress, adapter_version=ref.version)
        return ref.sha256

    async def sleep(self) -> None:
        if self._progress.running_requests:
            raise EngineError("the engine cannot sleep while requests run")
        self._state = "asleep"

    async def wake_weights(self) -> None:
        if self._state == "asleep":
            self._state = "awake without its cache"

    async def wake_cache(self) -> None:
        if self._state == "asleep":
            raise EngineError("wake the weights first")
        self._state = "awake"

    async def progress(self) -> EngineProgress:
        return self._progress

    async def close(self) -> None:
        self._closed = True

    def _context(self, request: SampleRequest, version: int | None) -> str:
        """What the reply depends on besides its tokens. Raises EngineError as the real engine does."""
        if self._closed:
            raise EngineError("the engine is closed")
        if self._state != "awake":
            raise EngineError(f"the engine is {self._state}")
        if len(request.expanded_ids) >= self._settings.max_tokens:
            raise EngineError(f"{len(request.expanded_ids)} tokens, the model takes {self._settings.max_tokens}")
        self._remember(request.images)
        expanded = self._expand(request.collapsed_ids)
        if expanded != request.expanded_ids:
            raise EngineError(f"expands to {len(expanded)} tokens, the trainer to {len(request.expanded_ids)}")
        if version is not None and (self._live is None or self._live.version != version):
            raise EngineError(f"adapter version {version} is not loaded")
        adapter = self._live.sha256 if version is not None and self._live else "base"
        return " ".join([adapter, *(image.sha256 for image in request.images)])

    def _remember(self, images: Sequence[EngineImage]) -> None:
        for image in images:
            if image.data is None and image.sha256 not in self._known_images:
                raise EngineError(f"unknown image {image.sha256}")
            self._known_images.add(image.sha256)

    def _expand(self, ids: Sequence[int]) -> tuple[int, ...]:
        pad = self._image_pad
        return tuple(one for token in ids for one in [token] * (self._tokens_per_image if token == pad else 1))

    def _grow(self, request: SampleRequest, reply: _Reply, context: str) -> StopReason | None:
        """Sample one token; why it was the last one."""
        table = self._logprobs(context, reply.ids, request.temperature or 1.0, self._settings.banned_ids)
        noise = random.Random(f"{reply.seed} {len(reply.ids)}")
        gumbel = [-math.log(-math.log(noise.uniform(1e-12, 1 - 1e-12))) for _ in table]
        scale = 1.0 if request.temperature else 0.0
        token = max(table, key=lambda one: table[one] + scale * gumbel[one])
        reply.ids.append(token)
        reply.fresh.append((token, table[token]))
        self._add(generated_tokens=1)
        if token in self._settings.end_ids:
            return StopReason.STOP
        sampled = len(reply.ids) - len(request.expanded_ids)
        full = sampled == request.max_tokens or len(reply.ids) == self._settings.max_tokens
        return StopReason.LENGTH if full else None

    def _logprobs(
        self, context: str, ids: Sequence[int], temperature: float, banned: Sequence[int]
    ) -> Mapping[int, float]:
        """Log-probability of every token after `ids`; banned ones are -inf."""
        key = hashlib.sha256(f"{context} {ids}".encode()).digest()
        draws = random.Random(key)
        logits = [draws.gauss(0, 2) / temperature for _ in range(self._vocabulary)]
        for token in banned:
            logits[token] = -math.inf
        total = math.log(sum(math.exp(one) for one in logits))
        return {token: logit - total for token, logit in enumerate(logits)}

    def _problem(self, ref: AdapterRef, files: AdapterFiles) -> str | None:
        try:
            tensors = load(bytes(files.tensors))
            rank = json.loads(files.config)["r"]
        except (SafetensorError, ValueError) as error:
            return str(error)
        if rank != self._settings.lora_rank:
            return f"rank {rank} is not {self._settings.lora_rank}"
        if set(tensors) != self._names:
            return "its names are not the model's"
        if not all(np.isfinite(one).all() for one in tensors.values()):
            return "it holds NaN or Inf"
        digest = logical_digest((name, str(one.dtype), one.shape, one.tobytes()) for name, one in tensors.items())
        return None if digest == ref.sha256 else f"{digest} is not {ref.sha256}"

    def _add(self, **counts: int) -> None:
        changed = {name: getattr(self._progress, name) + count for name, count in counts.items()}
        self._progress = replace(self._progress, **changed)
