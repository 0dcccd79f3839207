"""Adapter versions inside vLLM: through LoRA kernels, merged into the weights, or as weights of their own.

Everything here runs between two steps of the engine.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from argusrl.errors import EngineError, WorkerLost
from argusrl.rollout.adapter_check import check_lora_config, check_reports, refusal
from argusrl.rollout.engine import EngineSettings
from argusrl.rollout.sequences import ServedAdapter
from argusrl.types import AdapterFiles, AdapterRef


class Versions(ABC):
    """What an engine can sample from. `changed` hears of other weights, `lost` that the engine has none any more."""

    def __init__(
        self, engine: Any, settings: EngineSettings, *, changed: Callable[[], None], lost: Callable[[WorkerLost], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._changed = changed
        self._lost = lost
        self.live: ServedAdapter | None = None
        self._earlier: list[ServedAdapter] = []  # versions before, newest first: wanted, or with sequences running

    def load(self, ref: AdapterRef, files: AdapterFiles, running: int) -> None:
        """Make a version the live one; `running` sequences run now. Raises AdapterRefused, EngineError, WorkerLost."""
        if self.live is not None and self.live.ref == ref:
            return
        adapter = next((earlier for earlier in self._earlier if earlier.ref == ref), None)
        if adapter is not None:
            self._earlier.remove(adapter)
        else:
            adapter = self._load(ref, files, running)
            self._changed()
        if self.live is not None:
            self._earlier.insert(0, self.live)
        self.live = adapter
        self._let_go()

    def ready(self, version: int | None, running: int) -> ServedAdapter | None:
        """The version a request asks for, ready to be sampled from; None is the base model. Raises EngineError."""
        if version is None:
            self._hold(None, running)
            return None
        for adapter in (self.live, *self._earlier):
            if adapter is not None and adapter.ref.version == version:
                self._hold(adapter, running)
                return adapter
        held = self.live.ref.version if self.live else None
        raise EngineError(f"adapter version {version} is not loaded, the engine serves {held}")

    def release(self, adapter: ServedAdapter | None) -> None:
        """One sequence less runs under it."""
        if adapter is None:
            return
        adapter.running -= 1
        if adapter.running == 0 and adapter in self._earlier:
            self._let_go()

    def _let_go(self) -> None:
        """Drop what nobody asks for any more."""
        for adapter in self._earlier[self._settings.live_versions - 1 :]:
            if not adapter.running:
                self._earlier.remove(adapter)
                self._drop(adapter)

    @abstractmethod
    def _load(self, ref: AdapterRef, files: AdapterFiles, running: int) -> ServedAdapter: ...

    def _hold(self, adapter: ServedAdapter | None, running: int) -> None:
        """Get a loaded version, or the base model, ready for the next sequences."""
        return

    def _drop(self, adapter: ServedAdapter) -> None:
        """Nothing runs under it any more."""
        return

    @contextmanager
    def _replacing(self, running: int) -> Iterator[None]:
        """Replace weights: all of them, or the engine is lost. What the prefix cache holds belongs to those before."""
        _require_idle(running)
        try:
            yield
            if not self._engine.reset_prefix_cache():
                raise EngineError("vLLM did not let go of the prefixes that it holds")
        except Exception as error:
            lost = WorkerLost(f"weights were replaced in part: {error}", "start a new engine")
            self._lost(lost)
            raise lost from error
        self._changed()


class LoraVersions(Versions):
    """A slot of vLLM's LoRA kernels for each version; an older one is served while sequences run under it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._numbers = itertools.count(1)

    def _load(self, ref: AdapterRef, files: AdapterFiles, running: int) -> ServedAdapter:
        from vllm.lora.request import LoRARequest

        check_lora_config(ref, files.config, self._settings)
        number = next(self._numbers)
        # A name and an id that never existed: vLLM serves stale weights and stale caches under known ones. The path
        # is part of the key of cached prefixes, and never read: the adapter is there before a request names it.
        name = f"v{ref.version:06d}-{ref.sha256[:12]}-{number}"
        request = LoRARequest(name, number, name)
        try:
            loading = (number, files.config, files.tensors)
            check_reports(ref, self._engine.collective_rpc("argusrl_load_adapter", args=loading))
        except Exception as error:
            self._engine.remove_lora(number)
            raise refusal(ref, error) from error
        return ServedAdapter(ref, request)

    def _drop(self, adapter: ServedAdapter) -> None:
        self._engine.remove_lora(adapter.request.lora_int_id)


class MergedVersions(Versions):
    """The weights hold the live version or the base model, whichever was asked for last. Decodes at base speed."""

    _held: ServedAdapter | None = None

    def _load(self, ref: AdapterRef, files: AdapterFiles, running: int) -> ServedAdapter:
        _require_idle(running)
        check_lora_config(ref, files.config, self._settings)
        try:
            offered = (files.config, files.tensors)
            check_reports(ref, self._engine.collective_rpc("argusrl_offer_adapter", args=offered))
        except Exception as error:
            raise refusal(ref, error) from error
        adapter = ServedAdapter(ref, None)
        self._hold(adapter, running)
        return adapter

    def _hold(self, adapter: ServedAdapter | None, running: int) -> None:
        if adapter is self._held:
            return
        with self._replacing(running):  # the vision tower is never adapted: what it made stays good
            self._engine.collective_rpc("argusrl_merge", args=(adapter.ref.sha256 if adapter else None,))
        self._held = adapter


class FullVersions(Versions):
    """Full-parameter training: every version brings its own weights, and the base model is gone with the first."""

    def _load(self, ref: AdapterRef, files: AdapterFiles, running: int) -> ServedAdapter:
        _require_idle(running)
        try:
            check_reports(ref, self._engine.collective_rpc("argusrl_check_weights", args=(files.tensors,)))
        except Exception as error:
            raise refusal(ref, error) from error
        with self._replacing(running):
            self._engine.collective_rpc("argusrl_load_weights", args=(files.tensors,))
            self._engine.reset_encoder_cache()  # reloading empties the worker's, and the scheduler must know
        return ServedAdapter(ref, None)

    def _hold(self, adapter: ServedAdapter | None, running: int) -> None:
        if adapter is None and self.live is not None:
            raise EngineError("full training replaced the base model, there is nothing to sample without a version")


def versions_of(settings: EngineSettings) -> type[Versions]:
    """The way in which an engine with these settings serves versions."""
    if settings.lora_rank is None:
        return FullVersions
    return MergedVersions if settings.merged else LoraVersions


def _require_idle(running: int) -> None:
    if running:
        raise EngineError(f"weights cannot be replaced while {running} sequences run")
