"""The child side of the process pool: loads the user's code by name and runs what it is told, one frame per message.

A frame is four bytes of length and a pickle. Requests are (id, verb, payload), answers (id, outcome, payload). What
user code prints goes to the parent's standard error, never into the frames: they have a socket of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from argusrl.config.objects import load_object

LENGTH = struct.Struct("!I")
PR_SET_PDEATHSIG = 1


def main(socket_fd: int, parent: int, shared: bool) -> None:
    """Serve until the parent closes the socket. `shared` runs coroutine functions side by side."""
    _die_with(parent)
    with socket.socket(fileno=socket_fd) as channel:
        server = _Server()
        if shared:
            _run(_serve_shared(channel, server))
        else:
            _serve_one_by_one(channel, server)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def signature_of(function: Callable[..., Any]) -> dict[str, Any]:
    """{"is_async", "parameters": names, "required": names without default, "takes_any": has **kwargs}."""
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins may have no signature
        parameters = []
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {
        "is_async": inspect.iscoroutinefunction(target),
        "parameters": [p.name for p in named],
        "required": [p.name for p in named if p.default is p.empty],
        "takes_any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


class _Server:
    """Holds what was loaded and created; `find` turns a request into something to call."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._objects: dict[int, Any] = {}

    def find(self, verb: str, payload: Any) -> Callable[[], Any]:
        if verb == "load":
            return lambda: self._load(payload)
        if verb == "call":
            reference, arguments = payload
            return lambda: self._functions[reference](**arguments)
        if verb == "create":
            number, reference, arguments = payload
            return lambda: self._create(number, reference, arguments)
        if verb == "invoke":
            number, method, positional = payload
            return lambda: getattr(self._objects[number], method)(*positional)
        return lambda: self._release(payload)

    def _create(self, number: int, reference: str, arguments: dict[str, Any]) -> None:
        self._objects[number] = self._functions[reference](**arguments)

    def _release(self, number: int) -> None:
        self._objects.pop(number, None)

    def _load(self, reference: str) -> dict[str, Any]:
        function = self._functions[reference] = load_object(reference)
        return signature_of(function)

    def answer(self, number: int, outcome: str, payload: Any) -> bytes:
        if os.getpid() != self._process_id:
            os._exit(0)  # user code forked and the copy came back: it must not answer, too
        try:
            result = pickle.dumps(payload)
        except Exception as error:
            outcome, result = "raised", pickle.dumps(_described(error))
        # Pickled twice, so that the parent can tell whose answer it is even if it cannot read it.
        body = pickle.dumps((number, outcome, result))
        return LENGTH.pack(len(body)) + body


def _described(error: BaseException) -> tuple[str, str, str]:
    """Name, message and traceback of what user code raised, without this file's own frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    text = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
    return type(error).__name__, str(error), text


def _serve_one_by_one(channel: socket.socket, server: _Server) -> None:
    # No event loop runs around user code here: it may start its own.
    stream = channel.makefile("rb")
    while header := stream.read(LENGTH.size):
        number, verb, payload = pickle.loads(stream.read(LENGTH.unpack(header)[0]))
        try:
            result = server.find(verb, payload)()
            if inspect.isawaitable(result):
                result = _run(_awaited(result))
            answer = server.answer(number, "done", result)
        except BaseException as error:  # SystemExit from user code is an error like any other
            answer = server.answer(number, "raised", _described(error))
        channel.sendall(answer)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # half of a child's start, and most children never need it

    return asyncio.run(coroutine)


async def _awaited(result: Any) -> Any:
    return await result


async def _serve_shared(channel: socket.socket, server: _Server) -> None:
    import asyncio

    reader, writer = await asyncio.open_unix_connection(sock=channel)
    running: set[asyncio.Task[None]] = set()

    async def run(number: int, verb: str, payload: Any, deadline_seconds: float) -> None:
        try:
            async with asyncio.timeout(deadline_seconds) as deadline:
                result = server.find(verb, payload)()
                if inspect.isawaitable(result):
                    result = await result
            answer = server.answer(number, "done", result)
        except BaseException as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            answer = server.answer(number, "late" if late else "raised", _described(error))
        writer.write(answer)

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            number, verb, (payload, deadline_seconds) = pickle.loads(await reader.readexactly(length))
            task = asyncio.create_task(run(number, verb, payload, deadline_seconds))
            running.add(task)
            task.add_done_callback(running.discard)
