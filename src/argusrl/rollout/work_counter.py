"""What an engine computes, as its scheduler orders it, against the least that any engine with caches could do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from argusrl.rollout.engine import EngineProgress


class Seen:
    """What was met under the adapter versions that are live, the newest of them last."""

    def __init__(self, live_versions: int) -> None:
        self._sets: deque[set[Any]] = deque([set()], maxlen=live_versions)

    def __contains__(self, item: Any) -> bool:
        return any(item in known for known in self._sets)

    def update(self, items: Iterable[Any]) -> None:
        self._sets[-1].update(items)

    def next_version(self) -> None:
        self._sets.append(set())


@dataclass(slots=True)
class WorkCounter:
    """Counts tokens of prompts and images. Sees every schedule of vLLM's scheduler, and every sequence come and go.

    The least is what a prefix cache that never evicts leaves to do: a sequence computes its prompt from the first
    block on that no sequence before it has computed, at least its last token's block. A group of G equal prompts of
    P tokens needs P + (G - 1) · (P - B · ⌊(P - 1) / B⌋) with blocks of B. Sequences that only score are left out:
    for the log-probabilities of its prompt vLLM computes all of it.
    """

    scheduler: Any
    live_versions: int = 1
    computed_prompt_tokens: int = 0  # after an eviction of a running sequence those of its reply, too
    needed_prompt_tokens: int = 0
    distinct_prompt_tokens: int = 0  # needed if equal prompts were one
    encoded_image_tokens: int = 0
    needed_image_tokens: int = 0
    _blocks: Seen = field(init=False)  # hashes of blocks that were or are being computed
    _prompts: Seen = field(init=False)
    _images: Seen = field(init=False)

    def __post_init__(self) -> None:
        self._blocks, self._prompts, self._images = (Seen(self.live_versions) for _ in range(3))
        schedule = self.scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self._scheduled(output)
            return output

        self.scheduler.schedule = counted

    def _scheduled(self, output: Any) -> None:
        requests = self.scheduler.requests
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            ahead = request.num_prompt_tokens - request.num_computed_tokens + tokens  # of the prompt, before this step
            if (ahead <= 0 and tokens == 1) or _scores(request):
                continue
            prompt = max(0, min(tokens, ahead))
            self.computed_prompt_tokens += prompt + max(0, tokens - prompt - 1)
        for name, places in output.scheduled_encoder_inputs.items():
            if not _scores(requests[name]):
                features = requests[name].mm_features
                self.encoded_image_tokens += sum(features[place].mm_position.get_num_embeds() for place in places)

    def arrived(self, request: Any) -> None:
        """A sequence was given to the scheduler."""
        if _scores(request):
            return
        size = self.scheduler.hash_block_size
        hashes = request.block_hashes[: request.num_prompt_tokens // size]
        known = 0
        for block in hashes[: (request.num_prompt_tokens - 1) // size]:
            if block not in self._blocks:
                break
            known += 1
        self._blocks.update(hashes)
        needed = request.num_prompt_tokens - known * size
        self.needed_prompt_tokens += needed
        features = request.mm_features or ()
        tail = tuple(request.prompt_token_ids[len(hashes) * size :])
        prompt = (hashes[-1] if hashes else None, tail, tuple(feature.identifier for feature in features))
        if prompt not in self._prompts:
            self._prompts.update((prompt,))
            self.distinct_prompt_tokens += needed
        for feature in features:
            if feature.identifier not in self._images:
                self._images.update((feature.identifier,))
                if feature.identifier not in self.scheduler.encoder_cache_manager.cached:
                    self.needed_image_tokens += feature.mm_position.get_num_embeds()

    def left(self, request: Any) -> None:
        """A sequence ended: what it computed of its reply need not be computed again by the next turn."""
        self._blocks.update(request.block_hashes[: request.num_computed_tokens // self.scheduler.hash_block_size])

    def forget(self) -> None:
        """Another version is served: what was computed under one that is gone counts for nothing."""
        for seen in (self._blocks, self._prompts, self._images):
            seen.next_version()

    def read(self) -> dict[str, int]:
        """The counters as EngineProgress calls them."""
        return {name: getattr(self, name) for name in _COUNTED}


_COUNTED = tuple(name for name in EngineProgress.__dataclass_fields__ if name in WorkCounter.__dataclass_fields__)


def _scores(request: Any) -> bool:
    return request.sampling_params.prompt_logprobs is not None
