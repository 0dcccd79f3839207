"""Where prompts come from: rows of files, a function, or the starts of an environment. All look the same."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Protocol

from argusrl.config.objects import load_object
from argusrl.config.sections import DataSection, EnvironmentSection
from argusrl.data.formats import check_columns, row_format
from argusrl.data.images import validate_image
from argusrl.data.messages import build_prompt, decorate
from argusrl.data.readers import Row, open_reader
from argusrl.errors import ArgusError, ConfigError, DataError
from argusrl.types import Image, Message, Prompt

Split = Literal["train", "heldout"]

TRAIN_SEED = 0  # environments without starts: training plays seeds from here on,
HELDOUT_SEED = 1_000_000  # evaluation from here on


class PromptSource(Protocol):
    """A sized sequence of prompts. The same index always gives the same Prompt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt:
        """Prompt `index`, from 0. Raises DataError naming the row if it is unusable, IndexError if there is none."""
        ...

    def scan(self) -> Iterator[Prompt | DataError]:
        """All prompts in order, as a stream; a DataError stands for a row that is unusable."""
        ...


def has_split(data: DataSection, environment: EnvironmentSection, split: Split) -> bool:
    """Whether the recipe says where the prompts of `split` come from."""
    if data.kind == "files":
        return _pick(split, data.train, data.heldout) is not None
    if data.kind == "environment" and _pick(split, environment.starts, environment.heldout_starts):
        return True
    return _pick(split, data.train_size, data.heldout_size) is not None


def open_source(data: DataSection, environment: EnvironmentSection, split: Split) -> PromptSource:
    """The prompts of `split` as the recipe describes them. Cheap: rows are read when they are asked for.

    Raises ConfigError (nothing named for this split, no such column or function) or DataError (no such file, not
    readable, empty). check.check_source looks at the rows.
    """
    if not has_split(data, environment, split):
        key = split if data.kind == "files" else f"{split}_size"
        raise ConfigError(f"data.{key} is not set", f"data.kind '{data.kind}' needs it for the {split} prompts")
    if data.kind == "files":
        return FileSource(data, split)
    if data.kind == "generated":
        return GeneratedSource(data, environment, split)
    return EnvironmentSource(data, environment, split)


class FileSource:
    """Rows of files. Holds no row: prompts and images are read and validated when they are asked for."""

    def __init__(self, data: DataSection, split: Split) -> None:
        path = _pick(split, data.train, data.heldout)
        self._data, self._split = data, split
        self._format = row_format(data)
        self._reader = open_reader(path, self._format.columns)
        check_columns(self._format.required, self._reader.columns, str(path))
        limit = _pick(split, data.train_size, data.heldout_size)
        if limit is not None and limit > len(self._reader):
            raise DataError(
                f"data.{split}_size is {limit:,}, but {path} holds {len(self._reader):,} rows", "lower or remove it"
            )
        self._size = len(self._reader) if limit is None else limit

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        _check_index(index, self._size)
        try:
            row = self._reader.row(index)
        except DataError as error:
            raise self._named(index, error) from error
        return self._prompt(index, row)

    def scan(self) -> Iterator[Prompt | DataError]:
        threads = os.cpu_count() or 1  # decoding images releases the interpreter lock
        with ThreadPoolExecutor(threads, thread_name_prefix="argusrl-rows") as pool:
            waiting: deque[Future[Prompt | DataError]] = deque()
            for index, row in zip(range(self._size), self._reader.scan(), strict=False):
                waiting.append(pool.submit(self._outcome, index, row))
                if len(waiting) > 2 * threads:  # so that no more rows than this are in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _outcome(self, index: int, row: Row | DataError) -> Prompt | DataError:
        if isinstance(row, DataError):
            return self._named(index, row)
        try:
            return self._prompt(index, row)
        except DataError as error:
            return error

    def _prompt(self, index: int, row: Row) -> Prompt:
        try:
            parts = self._format.parts(row)
            if self._data.columns.id and self._data.format == "columns" and parts.id in (None, ""):
                raise DataError(f"the id (column {self._data.columns.id}) is missing")
            id = f"{self._split}-{index}" if parts.id is None else str(parts.id)
            return build_prompt(parts, id=id, section=self._data, base=self._reader.base(index))
        except DataError as error:
            raise self._named(index, error) from error

    def _named(self, index: int, error: DataError) -> DataError:
        return DataError(f"{self._split} row {index} ({self._reader.where(index)}): {error.message}", error.hint)


class GeneratedSource:
    """Prompts that a function makes: f(index, split, **options) -> Prompt, the same for the same index.

    The messages of such a Prompt may hold Pillow images, encoded bytes or paths besides Images.
    """

    def __init__(self, data: DataSection, environment: EnvironmentSection, split: Split) -> None:
        if not data.generator:
            raise ConfigError("data.generator is not set", "name a function: module:function or file.py:function")
        self._function = load_object(data.generator, field="data.generator")
        if not callable(self._function):
            raise ConfigError(f"data.generator: {data.generator} is not a function")
        self._data, self._split = data, split
        self._needs_messages = environment.kind == "single_turn"
        self._size: int = _pick(split, data.train_size, data.heldout_size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        _check_index(index, self._size)
        where = f"{self._split} prompt {index} of {self._data.generator}"
        try:
            made = self._function(index, self._split, **self._data.options)
        except ArgusError as error:
            raise DataError(f"{where}: {error.message}", error.hint) from error
        except Exception as error:
            raise DataError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Prompt):
            raise DataError(f"{where} is a {type(made).__name__}, not an argusrl.types.Prompt")
        try:
            messages = decorate([self._validated(message) for message in made.messages], self._data)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", error.hint) from error
        if self._needs_messages and not any(message.role == "user" for message in messages):
            raise DataError(f"{where} has no user message")
        return replace(made, id=str(made.id) or f"{self._split}-{index}", messages=messages)

    def scan(self) -> Iterator[Prompt | DataError]:
        return _scan_by_index(self)

    def _validated(self, message: Message) -> Message:
        content: list[str | Image] = []
        for part in message.content:
            if isinstance(part, str):
                content.append(part)
            else:
                value = part.data if isinstance(part, Image) else part
                content.append(validate_image(value, max_pixels=self._data.max_image_pixels, source="image"))
        return Message(role=message.role, content=tuple(content))


class EnvironmentSource:
    """Starts of an environment, which writes the first message itself: info holds `seed` and `options`."""

    def __init__(self, data: DataSection, environment: EnvironmentSection, split: Split) -> None:
        self._split = split
        key = _pick(split, "starts", "heldout_starts")
        self._starts: Sequence[Mapping[str, Any]] = getattr(environment, key)
        self._first_seed = _pick(split, TRAIN_SEED, HELDOUT_SEED)
        limit: int | None = _pick(split, data.train_size, data.heldout_size)
        _check_starts(self._starts, f"environment.{key}")
        if not self._starts:
            self._size = limit or 0
        elif limit is None or limit <= len(self._starts):
            self._size = limit or len(self._starts)
        else:
            raise ConfigError(f"data.{split}_size is {limit:,}, but environment.{key} lists {len(self._starts):,}")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        _check_index(index, self._size)
        start = self._starts[index] if self._starts else {}
        seed = start.get("seed", self._first_seed + index)
        return Prompt(id=f"{self._split}-{index}", info={"seed": seed, "options": dict(start.get("options") or {})})

    def scan(self) -> Iterator[Prompt | DataError]:
        return _scan_by_index(self)


class SelectedSource:
    """Some rows of another source, in the given order."""

    def __init__(self, source: PromptSource, rows: Sequence[int]) -> None:
        self._source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        _check_index(index, len(self.rows))
        return self._source[int(self.rows[index])]

    def scan(self) -> Iterator[Prompt | DataError]:
        return _scan_by_index(self)


def _scan_by_index(source: PromptSource) -> Iterator[Prompt | DataError]:
    for index in range(len(source)):
        try:
            prompt = source[index]
        except DataError as error:
            yield error
        else:
            yield prompt


def _check_starts(starts: Sequence[Mapping[str, Any]], key: str) -> None:
    problems = []
    for index, start in enumerate(starts):
        problems += [f"{key}[{index}]: unknown key '{name}'" for name in start if name not in ("seed", "options")]
        if not isinstance(start.get("seed", 0), int) or start.get("seed", 0) < 0:
            problems.append(f"{key}[{index}]: seed {start['seed']!r} is not a number from 0")
        if not isinstance(start.get("options", {}), Mapping):
            problems.append(f"{key}[{index}]: options is a {type(start['options']).__name__}, not a mapping")
    if problems:
        raise ConfigError(problems, "each start is {seed: …, options: {…}}")


def _check_index(index: int, size: int) -> None:
    if not 0 <= index < size:
        raise IndexError(f"index {index} of {size} prompts")


def _pick(split: Split, train: Any, heldout: Any) -> Any:
    return train if split == "train" else heldout
