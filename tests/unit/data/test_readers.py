import random
from pathlib import Path

import pytest

from argusrl.data import readers
from argusrl.data.readers import open_reader
from argusrl.errors import DataError


def rows_of(count: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"question {i}", "n": i} for i in range(start, start + count)]


def test_parquet_by_number_and_as_a_stream(write_parquet):
    reader = open_reader(write_parquet(rows_of(10), row_group_size=3))
    assert len(reader) == 10
    assert [reader.row(i)["n"] for i in (9, 0, 3, 2)] == [9, 0, 3, 2]
    assert [row["n"] for row in reader.scan()] == list(range(10))
    assert reader.where(4) == "rows.parquet row 4"


def test_parquet_row_groups_too_large_to_keep_are_streamed(write_parquet, monkeypatch):
    reader = open_reader(write_parquet(rows_of(100)))
    monkeypatch.setattr(readers, "CACHE_BYTES", 0)
    assert [reader.row(i)["n"] for i in (99, 0, 40)] == [99, 0, 40]


def test_only_wanted_columns_are_read(write_parquet):
    reader = open_reader(write_parquet(rows_of(2)), ["prompt", "absent"])
    assert reader.columns == ("prompt", "n")
    assert reader.row(1) == {"prompt": "question 1"}


def test_jsonl_ignores_blank_lines_and_names_lines_of_the_file(write_jsonl):
    reader = open_reader(write_jsonl([{"a": 1}, "\n", {"a": 2, "b": 3}, '{"a": 4}']))
    assert len(reader) == 3
    assert reader.columns == ("a", "b")
    assert reader.row(2) == {"a": 4}
    assert reader.where(1) == "rows.jsonl line 3"
    assert [row["a"] for row in reader.scan()] == [1, 2, 4]


def test_a_broken_jsonl_line_costs_its_own_row_only(write_jsonl):
    reader = open_reader(write_jsonl([{"a": 1}, "{oops\n", "[1]\n", {"a": 2}]))
    good, broken, other, last = reader.scan()
    assert (good, last) == ({"a": 1}, {"a": 2})
    assert "not valid JSON" in str(broken)
    assert "JSON list" in str(other)
    with pytest.raises(DataError, match="not valid JSON"):
        reader.row(1)


def test_a_folder_is_its_files_by_name(write_parquet, write_jsonl, tmp_path: Path):
    write_parquet(rows_of(3), "data/b.parquet")
    write_jsonl(rows_of(2, start=3), "data/c.jsonl")
    write_jsonl(rows_of(9), "data/_hidden.jsonl")
    reader = open_reader(tmp_path / "data")
    assert [row["n"] for row in reader.scan()] == [0, 1, 2, 3, 4]
    assert [reader.row(i)["n"] for i in range(5)] == [0, 1, 2, 3, 4]
    assert (reader.where(2), reader.where(3)) == ("b.parquet row 2", "c.jsonl line 1")
    assert reader.base(3) == tmp_path / "data"


def test_a_datasets_folder_keeps_images_encoded(tmp_path: Path, png):
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    data = [png(0), png(1)]
    rows = {"prompt": ["a", "b"], "image": [{"bytes": item, "path": None} for item in data]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.select([1, 0]).save_to_disk(str(tmp_path / "saved"))
    reader = open_reader(tmp_path / "saved")
    assert [row["image"]["bytes"] for row in reader.scan()] == [data[1], data[0]]
    assert reader.row(1)["prompt"] == "a"

    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="several splits") as caught:
        open_reader(tmp_path / "splits")
    assert str(tmp_path / "splits" / "train") in caught.value.hint
    assert len(open_reader(tmp_path / "splits" / "test")) == 2


def test_what_cannot_be_opened_says_why(write_jsonl, write_parquet, tmp_path: Path):
    (tmp_path / "none").mkdir()
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing here")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "state.json").write_text("{}")
    for path, expected in [
        (tmp_path / "absent.parquet", "there is no file"),
        (write_jsonl([]), "holds no rows"),
        (write_parquet(rows_of(2)[:0] or [{"a": 1}][:0], "empty.parquet"), "holds no rows"),
        (tmp_path / "none", r"holds no .parquet or .jsonl"),
        (tmp_path / "rows.csv", "'.csv' files are not read"),
        (tmp_path / "broken.parquet", "not a readable Parquet file"),
        (tmp_path / "wrong", "not a readable datasets folder"),
    ]:
        with pytest.raises(DataError, match=expected):
            open_reader(path)


@pytest.mark.parametrize("layout", [{"row_group_size": 100}, {"row_group_size": 2000, "write_batch_size": 64}])
def test_memory_does_not_grow_with_the_images_of_a_file(tmp_path: Path, layout):
    """2,000 rows with 80 kB each, 160 MB in all, in small row groups or small pages: a part of it is ever held."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    body = random.Random(0).randbytes(80_000)  # does not compress, as images do not
    table = pa.table({"prompt": ["q"] * 2000, "image": [i.to_bytes(4, "big") + body for i in range(2000)]})
    path = tmp_path / "large.parquet"
    pq.write_table(table, path, **layout)
    del table
    reader = open_reader(path)
    before = pa.total_allocated_bytes()
    peak_bytes = 0
    for row in reader.scan():
        assert isinstance(row, dict)
        peak_bytes = max(peak_bytes, pa.total_allocated_bytes() - before)
    for number in range(0, 2000, 190):
        assert reader.row(number)["image"][:4] == number.to_bytes(4, "big")
        peak_bytes = max(peak_bytes, pa.total_allocated_bytes() - before)
    assert peak_bytes < 90 << 20
