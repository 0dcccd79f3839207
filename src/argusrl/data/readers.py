"""Rows of data files by number, without ever holding a whole file: Parquet, JSONL, folders, `datasets` folders."""

from __future__ import annotations

import bisect
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from argusrl.errors import DataError

Row = Mapping[str, Any]

# A row group up to this size is read whole and kept for the next rows; a larger one is streamed up to the row.
CACHE_BYTES = 64 << 20
_BATCH_ROWS = 32
_BUFFER_BYTES = 1 << 20


class RowReader(Protocol):
    """Rows of one data set. Values are plain Python objects; images are still encoded."""

    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Row `number`, from 0. Raises DataError with the reason (not the place) where it cannot be read."""
        ...

    def scan(self) -> Iterator[Row | DataError]:
        """All rows in order, read as a stream; a DataError stands for a row that cannot be read."""
        ...

    def where(self, number: int) -> str:
        """For messages: file and place of the row."""
        ...

    def base(self, number: int) -> Path:
        """The folder that relative image paths of this row start from."""
        ...


class _ArrowRows:
    """Arrow records as rows of plain Python objects.

    `datasets` stores lists whose items differ (text and image parts of a message) as JSON text inside Arrow; those
    come out as what they stand for.
    """

    def __init__(self, schema: Any) -> None:
        found = {field.name: _json_decoder(field.type) for field in schema}
        self._decoders = {name: decoder for name, decoder in found.items() if decoder is not None}

    def __call__(self, records: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = records.to_pylist()
        for row in rows:
            for name, decoder in self._decoders.items():
                if name in row:
                    row[name] = decoder(row[name])
        return rows


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """What turns a value of Arrow type `kind` into one without JSON text in it; None if there is none in it."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _json_decoder(kind.value_type)
        return inner and (lambda items: None if items is None else [inner(item) for item in items])
    if pa.types.is_struct(kind):
        found = {field.name: _json_decoder(field.type) for field in kind.fields}
        fields = {name: decoder for name, decoder in found.items() if decoder is not None}
        if fields:
            return lambda value: (
                None if value is None else {**value, **{name: fields[name](value[name]) for name in fields}}
            )
    return None


class ParquetReader:
    """One Parquet file. Holds a page (1,024 rows as most writers write it) or small row groups, never the file.

    Reading one row decodes its row group up to it, so small row groups (100 rows, as `datasets` writes) are fast.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        import pyarrow.parquet as parquet

        self.path = path
        try:
            # Buffered: otherwise a whole column chunk, often all images of the file, is read at once.
            self._file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except Exception as error:  # pyarrow raises several kinds
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        names = self._file.schema_arrow.names
        self._rows = _ArrowRows(self._file.schema_arrow)
        self.columns = tuple(names)
        self._wanted = None if columns is None else [name for name in names if name in columns]
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        self._groups: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        group = bisect.bisect_right(self._starts, number) - 1
        offset = number - self._starts[group]
        try:
            if group not in self._groups and self._file.metadata.row_group(group).total_byte_size > CACHE_BYTES:
                return self._streamed(group, offset)
            return self._rows(self._cached(group).slice(offset, 1))[0]
        except (OSError, ValueError, NotImplementedError) as error:
            raise DataError(f"cannot be read: {error}") from error

    def scan(self) -> Iterator[Row | DataError]:
        done = 0
        try:
            for batch in self._file.iter_batches(batch_size=_BATCH_ROWS, columns=self._wanted):
                for row in self._rows(batch):
                    done += 1
                    yield row
        except (OSError, ValueError, NotImplementedError) as error:
            for _ in range(done, len(self)):
                yield DataError(f"cannot be read: {error}")

    def where(self, number: int) -> str:
        return f"{self.path.name} row {number}"

    def base(self, number: int) -> Path:
        return self.path.parent

    def _streamed(self, group: int, offset: int) -> Row:
        for batch in self._file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=self._wanted):
            if offset < batch.num_rows:
                return self._rows(batch.slice(offset, 1))[0]
            offset -= batch.num_rows
        raise ValueError("the row group ends before this row")

    def _cached(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group][0]
        table = self._file.read_row_group(group, columns=self._wanted)
        self._groups[group] = (table, table.nbytes)
        while len(self._groups) > 1 and sum(size for _, size in self._groups.values()) > CACHE_BYTES:
            self._groups.popitem(last=False)
        return table


class JsonlReader:
    """One file with a JSON object per line. Keeps the offset of every line (8 bytes each) and nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("Q")
        self._lines = array("Q")  # line numbers from 1: blank lines do not count as rows
        columns: dict[str, None] = {}
        offset = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._offsets.append(offset)
                        self._lines.append(number)
                        if len(self._offsets) <= 100:
                            columns.update(dict.fromkeys(_column_names(line)))
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        self.columns = tuple(columns)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> Row:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offsets[number])
                return self._parsed(file.readline())
        except OSError as error:
            raise DataError(f"cannot be read: {error}") from error

    def scan(self) -> Iterator[Row | DataError]:
        with self.path.open("rb") as file:
            for offset in self._offsets:
                file.seek(offset)
                try:
                    yield self._parsed(file.readline())
                except DataError as error:
                    yield error

    def where(self, number: int) -> str:
        return f"{self.path.name} line {self._lines[number]}"

    def base(self, number: int) -> Path:
        return self.path.parent

    def _parsed(self, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"a JSON {type(row).__name__}, not an object")
        return row


class DatasetsReader:
    """A folder written by `datasets.Dataset.save_to_disk`: memory-mapped, images stay encoded."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        import datasets

        self.path = path
        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:  # datasets raises several kinds
            raise DataError(f"{path} is not a readable datasets folder: {error}") from error
        if isinstance(loaded, datasets.DatasetDict):
            splits = ", ".join(str(path / name) for name in loaded)
            raise DataError(f"{path} holds several splits", f"name one of them: {splits}")
        self.columns = tuple(loaded.column_names)
        wanted = [name for name in self.columns if columns is None or name in columns]
        self._table = loaded.select_columns(wanted).with_format("arrow")
        self._rows = _ArrowRows(self._table.features.arrow_schema)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, number: int) -> Row:
        return self._rows(self._table[number : number + 1])[0]

    def scan(self) -> Iterator[Row | DataError]:
        for start in range(0, len(self), _BATCH_ROWS):
            yield from self._rows(self._table[start : start + _BATCH_ROWS])

    def where(self, number: int) -> str:
        return f"{self.path.name} row {number}"

    def base(self, number: int) -> Path:
        return self.path


class JoinedReader:
    """Several files one after the other, in the order of their names."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = list(readers)
        self.columns = tuple(dict.fromkeys(name for reader in readers for name in reader.columns))
        self._starts = [0]
        for reader in readers:
            self._starts.append(self._starts[-1] + len(reader))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, number: int) -> Row:
        reader, local = self._locate(number)
        return reader.row(local)

    def scan(self) -> Iterator[Row | DataError]:
        for reader in self._readers:
            yield from reader.scan()

    def where(self, number: int) -> str:
        reader, local = self._locate(number)
        return reader.where(local)

    def base(self, number: int) -> Path:
        reader, local = self._locate(number)
        return reader.base(local)

    def _locate(self, number: int) -> tuple[RowReader, int]:
        index = bisect.bisect_right(self._starts, number) - 1
        return self._readers[index], number - self._starts[index]


def open_reader(path: Path | str, columns: Sequence[str] | None = None) -> RowReader:
    """The reader for `path`: a .parquet or .jsonl file, a folder of them, or a folder saved by `datasets`.

    `columns` names those that will be used; others are not read. Raises DataError: nothing there, another kind of
    file, damaged, or no row at all.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"there is no file or folder {path}", "a hub data set must be downloaded to a folder first")
    reader = _open_folder(path, columns) if path.is_dir() else _open_file(path, columns)
    if len(reader) == 0:
        raise DataError(f"{path} holds no rows")
    return reader


def _open_folder(path: Path, columns: Sequence[str] | None) -> RowReader:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return DatasetsReader(path, columns)
    kinds = (".parquet", ".jsonl", ".ndjson")
    files = sorted(file for file in path.iterdir() if file.suffix in kinds and not file.name.startswith((".", "_")))
    if not files:
        raise DataError(f"{path} holds no .parquet or .jsonl file", "name a file, or a folder with such files")
    readers = [_open_file(file, columns) for file in files]
    return readers[0] if len(readers) == 1 else JoinedReader(readers)


def _open_file(path: Path, columns: Sequence[str] | None) -> RowReader:
    if path.suffix == ".parquet":
        return ParquetReader(path, columns)
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonlReader(path)
    raise DataError(f"{path}: '{path.suffix}' files are not read", "convert it to .parquet or .jsonl")


def _column_names(line: bytes) -> list[str]:
    try:
        row = json.loads(line)
    except ValueError:
        return []
    return list(row) if isinstance(row, dict) else []
