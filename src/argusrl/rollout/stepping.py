"""One thread that owns an engine: it steps while there is work and runs control operations between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from argusrl.errors import EngineError, WorkerError, WorkerLost

T = TypeVar("T")


class SteppingThread:
    """Nothing else may touch what `step` touches: that is what makes an engine without locks safe.

    `busy` says whether there is something to step; it and `step` run on the thread. When `step` raises, the engine
    is lost: `failed` is told once, and operations raise WorkerLost from then on (EngineError after `stop`).
    """

    def __init__(
        self, *, step: Callable[[], None], busy: Callable[[], bool], failed: Callable[[WorkerError], None], name: str
    ) -> None:
        self._step = step
        self._busy = busy
        self._failed = failed
        self._wake = threading.Condition()
        self._operations: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._ended: WorkerError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[], T]) -> Future[T]:
        """Run `operation` between two steps, in the order of submission."""
        future: Future[T] = Future()
        with self._wake:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._operations.append((operation, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Run what is queued, then end the thread and wait for it. Steps that remain are not made."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_queued()
                if self._busy():
                    self._step()
            self._run_queued()
            self._end(EngineError("the engine is closed", "start a new engine"))
        except Exception as error:
            died = WorkerLost(f"the engine failed in a step: {type(error).__name__}: {error}", "start a new engine")
            died.__cause__ = error
            self._end(died)

    def _run_queued(self) -> None:
        with self._wake:
            while not (self._operations or self._stopping or self._busy()):
                self._wake.wait()
            operations, self._operations = self._operations, []
        for operation, future in operations:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(operation())
            except Exception as error:
                future.set_exception(error)

    def _end(self, reason: WorkerError) -> None:
        with self._wake:
            self._ended = reason
            operations, self._operations = self._operations, []
        for _, future in operations:
            if future.set_running_or_notify_cancel():
                future.set_exception(reason)
        self._failed(reason)
