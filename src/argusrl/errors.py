"""Every error a user can meet, and the exit code it ends with.

ArgusError                 1   anything below; says what is wrong, with the values, and what to do
|- ConfigError             2   the recipe or the command line is wrong (all problems at once)
|- DataError               3   data set, image or row is unusable
|- ModelError              4   model folder, adapter or processor is unusable
|- StorageError            5   run root not writable, disk full, no atomic rename or link
|  |- StorageUnusable         it stayed away until the deadline, or cannot hold runs
|  `- CorruptionError      6   bytes do not match their digest
|- ClusterError            7   Ray, placement, device or port
|  `- NodesMissing            nodes were lost and nothing took their place in time
|- FencedError             8   another driver owns this run now
|- WorkerError             9   an engine, rank or episode worker failed and could not be replaced
|  |- EngineError
|  |- AdapterRefused          the engine did not prove the adapter
|  `- WorkerLost              its process is gone, or does not answer any more
|- NumericsError          10   NaN or Inf where the rule says stop
|  `- SampleError             samples that end their step: the same ones again and again are left out of it
|- DeadlineError          11   a wait ran past its deadline
`- Interrupted            75   stopped by a signal with everything sealed: run the same command to resume
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class ArgusError(Exception):
    """Base class. `message` is shown as it is; `hint` says what to do."""

    exit_code = 1
    member = ""  # the worker it is a fault of, where that is known: "rank 1"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both in args: must survive pickling through Ray
        self.message = message
        self.hint = hint

    def of(self, member: str) -> Self:
        """Name the worker, unless it is named already; this error."""
        self.member = self.member or member
        return self

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class ConfigError(ArgusError):
    """The recipe or the command line is wrong. `problems` lists every mistake, one line each."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str, hint: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems), hint)


class DataError(ArgusError):
    exit_code = 3


class ModelError(ArgusError):
    exit_code = 4


class StorageError(ArgusError):
    exit_code = 5


class StorageUnusable(StorageError):
    """The run folder stayed away until the deadline of the recipe, or cannot hold runs: waiting again is of no use."""


class CorruptionError(StorageError):
    exit_code = 6


class ClusterError(ArgusError):
    exit_code = 7


class NodesMissing(ClusterError):
    """No node came in place of a lost one until the deadline of the recipe: trying again would only wait again."""


class FencedError(ArgusError):
    exit_code = 8


class WorkerError(ArgusError):
    exit_code = 9


class EngineError(WorkerError):
    """The engine refused or failed one request, or died."""


class AdapterRefused(WorkerError):
    """The engine did not prove that it serves the adapter: digest or canary disagree."""


class WorkerLost(WorkerError):
    """The worker's process is gone, or it does not answer any more."""


class NumericsError(ArgusError):
    exit_code = 10


class SampleError(NumericsError):
    """These samples end their step. `keys` names them as "prompt/sample"."""

    def __init__(self, message: str, hint: str = "", keys: Sequence[str] = ()) -> None:
        super().__init__(message, hint)
        self.args = (message, hint, tuple(keys))
        self.keys = tuple(keys)


class DeadlineError(ArgusError):
    exit_code = 11


class Interrupted(ArgusError):
    exit_code = 75
