"""A pool of processes for code that may hang or crash: the user's rewards and environments, math parsing.

A call has a deadline; at its end the process is killed (with everything it forked) and only that call fails. Others
that were waiting for the same process lose nothing: stateless calls are run again, and owners of objects that lived in
it are told that they died innocently, so that they can make them anew. User code is imported in the children alone.

Functions run one at a time in a process. Coroutine functions all share one more process, side by side, since they
wait rather than compute; there a deadline cancels the call, and kills only if that does not help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import count
from typing import Any, TypeVar

from argusrl.cluster.pool_worker import LENGTH

LOAD_SECONDS = 120.0  # deadline for starting a process and importing user code
CANCEL_SECONDS = 2.0  # a coroutine that does not end this soon after its deadline blocks its event loop
INNOCENT_RETRIES = 5  # a call that meets this many foreign deaths is given up

Result = TypeVar("Result")


class PoolError(Exception):
    """Base class of what a call can end with."""


class PoolTimeout(PoolError):
    """The call ran past its deadline; its process was killed."""


class PoolDied(PoolError):
    """The process died. `innocent`: because of another call; this one can be done again."""

    def __init__(self, message: str, innocent: bool) -> None:
        super().__init__(message, innocent)
        self.message, self.innocent = message, innocent

    def __str__(self) -> str:
        return self.message


class PoolRaised(PoolError):
    """The called code raised. `traceback` is the text from the child."""

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(type_name, message, traceback)
        self.type_name, self.message, self.traceback = type_name, message, traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class _Process:
    """One living child. Frames go over a socket; death is learnt from the kernel, not from the socket,
    because a copy forked by user code may hold that open."""

    def __init__(self, shared: bool) -> None:
        """Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from argusrl.cluster.pool_worker import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {shared})"
        )
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its own group: killed with all it forked, untouched by Ctrl-C
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.loaded: dict[str, dict[str, Any]] = {}
        self.alive = True
        self._shared = shared
        self._socket = ours
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"pool-{self._child.pid}").start()

    def _watch(self) -> None:
        # WNOWAIT leaves a zombie until _bury, so its process group number cannot be taken by somebody else before.
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored the kernel reaps
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._bury)

    def _bury(self) -> None:
        self.kill()
        code = self._child.wait()
        names = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {names.get(-code, -code)}" if code < 0 else f"exited with code {code}"
        for future in self._waiting.values():
            if not future.done():
                # In a shared process nobody knows which of the calls it was.
                future.set_exception(PoolDied(f"the process {how}", innocent=self._shared))
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        self._socket.close()
        self._gone.set()

    def kill(self) -> None:
        """Kill the child and everything it forked. Burying follows by itself."""
        self.alive = False
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until the child is reaped and its socket closed."""
        await self._gone.wait()

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._reading = asyncio.create_task(self._read(reader))

    async def request(self, verb: str, payload: Any, deadline_seconds: float) -> Any:
        """Send one request and await its answer. Raises PoolRaised, PoolTimeout, PoolDied."""
        if not self.alive:
            raise PoolDied("the process was ended by another call", innocent=True)
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        allowed = deadline_seconds
        if self._shared:
            payload, allowed = (payload, deadline_seconds), deadline_seconds + CANCEL_SECONDS
        try:
            async with asyncio.timeout(allowed):
                await self._send(_pickled((number, verb, payload)))
                outcome, result = await future
        except TimeoutError:
            self.kill()
            raise PoolTimeout(f"ran longer than {deadline_seconds:g} s and was killed") from None
        finally:
            del self._waiting[number]
        if outcome == "late":
            raise PoolTimeout(f"ran longer than {deadline_seconds:g} s and was cancelled")
        if outcome == "raised":
            raise PoolRaised(*_unpickled(result))
        return _unpickled(result)

    async def _send(self, body: bytes) -> None:
        assert self._writer is not None
        with contextlib.suppress(OSError):  # it died: _bury says how
            self._writer.write(LENGTH.pack(len(body)) + body)
            await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                body = await reader.readexactly(length)
                number, outcome, result = pickle.loads(body)
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result((outcome, result))


def _pickled(request: Any) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception as error:
        raise PoolRaised(type(error).__name__, f"the arguments cannot be sent: {error}", "") from None


def _unpickled(result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:  # an object of the user's own class, which only the child knows
        message = f"the answer cannot be read outside its process: {error}"
        raise PoolRaised(type(error).__name__, message, "") from None


class _Slot:
    """A place for a process; after a kill the next user starts a new one."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.users = 0  # calls that run or wait, and objects that live here
        self._lock = asyncio.Lock()
        self.closed = False
        self.process: _Process | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> _Slot:
        """Have the process to oneself."""
        self.users += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self.users -= 1
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()
        self.users -= 1

    async def ready(self, reference: str) -> _Process:
        """A living process that has loaded `reference`. Raises PoolRaised, PoolTimeout or PoolDied."""
        async with self._starting:
            if self.closed:
                raise PoolDied("the pool is closed", innocent=True)
            if self.process is None or not self.process.alive:
                try:
                    self.process = _Process(self.shared)
                except OSError as error:
                    raise PoolDied(f"no process can be started: {error}", innocent=False) from None
                await self.process.connect()
            process = self.process
            if reference not in process.loaded:
                process.loaded[reference] = await process.request("load", reference, LOAD_SECONDS)
        return process


class PoolObject:
    """An object that lives in one process of the pool until `release`, or until that process dies."""

    def __init__(self, slot: _Slot, process: _Process, number: int) -> None:
        self._slot, self._process, self._number = slot, process, number
        self._released = False
        slot.users += 1

    async def call(self, method: str, *arguments: Any, deadline_seconds: float) -> Any:
        """Run a method. The deadline counts from when the process begins with it.

        Raises PoolRaised, PoolTimeout, PoolDied.
        """
        return await _finished(self._invoke("invoke", (self._number, method, arguments), deadline_seconds))

    async def release(self) -> None:
        """Forget the object; never raises PoolError, may be called twice."""
        if self._released:
            return
        self._released = True
        self._slot.users -= 1
        with contextlib.suppress(PoolError):
            await _finished(self._invoke("release", self._number, LOAD_SECONDS))

    async def _invoke(self, verb: str, payload: Any, deadline_seconds: float) -> Any:
        async with self._slot:
            return await self._process.request(verb, payload, deadline_seconds)


class ProcessPool:
    """`processes` children for functions and objects, started when first needed, plus one for coroutine functions.

    To be used from one event loop; `close` kills every child. References are `module:name` or `file.py:name`.
    """

    def __init__(self, processes: int = 1) -> None:
        self._slots = [_Slot(shared=False) for _ in range(processes)]
        self._shared = _Slot(shared=True)
        self._free = asyncio.Semaphore(processes)
        self._numbers = count()
        self._described: dict[str, dict[str, Any]] = {}
        self._releasing: set[asyncio.Future[None]] = set()

    async def describe(self, reference: str) -> dict[str, Any]:
        """Import `reference` in a child and say how it is called (see `signature_of`). Raises like `call`."""
        if reference not in self._described:

            async def load() -> dict[str, Any]:
                async with self._free, self._least_used() as slot:
                    return (await slot.ready(reference)).loaded[reference]

            self._described[reference] = await _finished(self._until_guilty(load))
        return self._described[reference]

    async def call(self, reference: str, arguments: Mapping[str, Any], deadline_seconds: float) -> Any:
        """Run a function with keyword arguments in some process.

        Raises PoolRaised (it raised, or cannot be imported), PoolTimeout, PoolDied (it ended its process).
        """
        is_async = (await self.describe(reference))["is_async"]

        async def once() -> Any:
            payload = (reference, dict(arguments))
            if is_async:
                return await (await self._shared.ready(reference)).request("call", payload, deadline_seconds)
            async with self._free, self._least_used() as slot:
                return await (await slot.ready(reference)).request("call", payload, deadline_seconds)

        return await _finished(self._until_guilty(once))

    async def create(self, reference: str, arguments: Mapping[str, Any], deadline_seconds: float) -> PoolObject:
        """Make an object in the process with the fewest. Raises like `call`."""

        async def once() -> PoolObject:
            async with self._least_used() as slot:
                process, number = await slot.ready(reference), next(self._numbers)
                await process.request("create", (number, reference, dict(arguments)), deadline_seconds)
                return PoolObject(slot, process, number)

        made = asyncio.ensure_future(self._until_guilty(once))
        try:
            return await _finished(made)
        except asyncio.CancelledError:
            made.add_done_callback(self._release_unwanted)
            raise

    async def close(self) -> None:
        """Kill and reap every child; calls under way end with PoolDied."""
        slots = (*self._slots, self._shared)
        for slot in slots:
            slot.closed = True
        processes = [slot.process for slot in slots if slot.process is not None]
        for process in processes:
            process.kill()
        for process in processes:
            await process.gone()

    def _release_unwanted(self, made: asyncio.Future[PoolObject]) -> None:
        if not made.cancelled() and made.exception() is None:
            releasing = asyncio.ensure_future(made.result().release())
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    def _least_used(self) -> _Slot:
        return min(self._slots, key=lambda slot: slot.users)

    async def _until_guilty(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        retries = INNOCENT_RETRIES
        while True:
            try:
                return await attempt()
            except PoolDied as died:
                if not died.innocent or self._shared.closed or retries == 0:
                    raise
                retries -= 1


async def _finished(work: Awaitable[Result]) -> Result:
    """Await `work` so that cancelling the caller leaves it running: the child is still busy with it,
    and its process must not be taken for free before it answers or its deadline kills it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)
