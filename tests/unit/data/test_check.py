import io
import itertools
from pathlib import Path

import pytest
from PIL import Image as Pillow

from argusrl.config.sections import ColumnSection, DataSection, EnvironmentSection
from argusrl.data.check import check_source, find_overlap
from argusrl.data.source import open_source
from argusrl.errors import DataError

ASK = EnvironmentSection()


def encoded(image: Pillow.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def source_of(path, split="train", **section):
    return open_source(DataSection(**{split: path}, max_image_pixels=1_000_000, **section), ASK, split)


def check_message(source, **options) -> str:
    with pytest.raises(DataError) as caught:
        check_source(source, **options)
    return caught.value.message


@pytest.fixture
def mixed(write_parquet, png):
    """Rows of every kind: the first eight cannot be used, the last five are converted."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    images = [
        None,
        encoded(Pillow.effect_noise((100, 100), 80).convert("RGB"))[:3000],
        encoded(Pillow.new("RGB", (1, 1))),
        encoded(Pillow.new("RGB", (2000, 600))),
        encoded(Pillow.new("RGB", (4, 4)), "GIF", save_all=True, append_images=[Pillow.new("RGB", (4, 4), "red")]),
        b"no image at all",
        encoded(Pillow.new("RGB", (1000, 4))),
        b"",
        encoded(Pillow.new("RGBA", (4, 4), (1, 2, 3, 4))),
        encoded(Pillow.new("P", (4, 4))),
        encoded(Pillow.new("I;16", (4, 4))),
        encoded(Pillow.new("RGB", (4, 6)), "JPEG", exif=exif),
        png(3),
    ]
    rows = [{"prompt": f"<image>q{i}?", "images": [image], "answer": "a"} for i, image in enumerate(images)]
    return write_parquet(rows)


def test_every_kind_of_bad_image_is_listed_with_its_row(mixed):
    message = check_message(source_of(mixed))
    lines = message.splitlines()
    assert lines[0] == "8 of 13 train rows cannot be used:"
    expected = ["missing", "truncated", "1x1", "1,200,000 pixels", "animated", "not an image", "200 times", "0 bytes"]
    for row, (line, reason) in enumerate(zip(lines[1:], expected, strict=True)):
        assert line.startswith(f"  train row {row} (rows.parquet row {row}): image 1: ")
        assert reason in line


def test_skip_leaves_bad_rows_out_and_converts_the_others(mixed):
    checked = check_source(source_of(mixed), on_bad_row="skip")
    assert [bad.row for bad in checked.bad] == list(range(8))
    assert [prompt.id for prompt in checked.source.scan()] == [f"train-{row}" for row in range(8, 13)]
    assert checked.source[3].messages[0].images[0].width == 6  # turned upright
    assert len(checked.digests) == 5


def test_rows_without_answer_text_or_with_placeholder_tokens(write_jsonl):
    path = write_jsonl(
        [
            {"prompt": "fine", "answer": "1"},
            {"prompt": "no answer", "answer": None},
            {"prompt": "blank answer", "answer": " "},
            {"prompt": "", "answer": "1"},
            {"prompt": "see <|image_pad|> here", "answer": "1"},
            {"prompt": [{"role": "user", "content": "a <|vision_start|>"}], "answer": "1"},
            {"prompt": "absent answer"},
            {"prompt": "zero is an answer", "answer": 0},
        ]
    )
    forbidden = ("<|image_pad|>", "<|vision_start|>")
    message = check_message(source_of(path), needs_answer=True, forbidden=forbidden)
    assert message.splitlines() == [
        "6 of 8 train rows cannot be used:",
        "  train row 1: no answer",
        "  train row 2: no answer",
        "  train row 3 (rows.jsonl line 4): empty text",
        "  train row 4: the text contains the literal token <|image_pad|>",
        "  train row 5: the text contains the literal token <|vision_start|>",
        "  train row 6: no answer",
    ]
    assert len(check_source(source_of(path), on_bad_row="skip").source) == 7  # answers only where a reward needs them


def test_many_bad_rows_are_counted_and_twenty_shown(write_jsonl):
    path = write_jsonl([{"prompt": ""} for _ in range(30)] + [{"prompt": "fine"}])
    lines = check_message(source_of(path)).splitlines()
    assert lines[0] == "30 of 31 train rows cannot be used:"
    assert len(lines) == 22
    assert lines[-1] == "  … and 10 more"


def test_no_row_left(write_jsonl):
    path = write_jsonl([{"prompt": ""}])
    assert "no usable train row is left" in check_message(source_of(path), on_bad_row="skip")


def test_repeated_ids(write_jsonl):
    path = write_jsonl([{"prompt": "a", "key": "x"}, {"prompt": "b", "key": "y"}, {"prompt": "c", "key": "x"}])
    columns = ColumnSection(id="key")
    assert "train row 2: its id is the id of row 0" in check_message(source_of(path, columns=columns))
    checked = check_source(source_of(path, columns=columns), on_bad_row="skip")
    assert [prompt.id for prompt in checked.source.scan()] == ["x", "y"]
    assert len(checked.digests) == 2


def test_one_more_check_of_the_caller(write_jsonl):
    path = write_jsonl([{"prompt": "short"}, {"prompt": "long " * 50}, {"prompt": "odd"}])

    def also(prompt):
        text = prompt.messages[0].content[0]
        if text == "odd":
            raise DataError("cannot be rendered")
        return f"{len(text)} characters" if len(text) > 100 else None

    message = check_message(source_of(path), also=also)
    assert "train row 1: 250 characters" in message
    assert "train row 2: cannot be rendered" in message


def test_progress(write_jsonl):
    seen = []
    path = write_jsonl([{"prompt": "q"} for _ in range(1200)])
    check_source(source_of(path), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(500, 1200), (1000, 1200), (1200, 1200)]


def test_overlap_is_found_by_content(write_parquet, png):
    rows = [{"prompt": f"q{i}", "images": [png(i)], "answer": "a"} for i in range(4)]
    train = check_source(source_of(write_parquet(rows, "train.parquet")))
    other_image = {"prompt": "q1", "images": [png(9)], "answer": "a"}
    held = [rows[2], other_image, {"prompt": "q2", "images": [png(2)], "answer": "b"}, rows[0]]
    heldout = check_source(source_of(write_parquet(held, "heldout.parquet"), "heldout"), split="heldout")
    assert find_overlap(train, heldout) == [0, 3]


def test_overlap_of_environment_starts_is_told_by_seed_and_options():
    layout = {"desc": ["SF", "FG"]}
    starts = [{"seed": 0, "options": layout}, {"seed": 1, "options": {}}]
    held = [{"seed": 0, "options": {}}, {"seed": 0, "options": layout}]
    play = EnvironmentSection(kind="gymnasium", id="FrozenLake-v1", starts=starts, heldout_starts=held)
    section = DataSection(kind="environment")
    train, heldout = (check_source(open_source(section, play, split), split=split) for split in ("train", "heldout"))
    assert find_overlap(train, heldout) == [1]


def test_a_generator_must_repeat_itself(tmp_path: Path):
    path = tmp_path / "make.py"
    path.write_text(
        "import itertools\nfrom argusrl.types import Message, Prompt\ncount = itertools.count()\n"
        "def drifting(index, split):\n"
        "    return Prompt(id='', messages=(Message(role='user', content=(f'{next(count)}',)),))\n"
        "def steady(index, split):\n"
        "    return Prompt(id='', messages=(Message(role='user', content=(f'{index}',)),))\n"
    )
    for name in ("steady", "drifting"):
        section = DataSection(kind="generated", generator=f"{path}:{name}", train_size=3)
        source = open_source(section, ASK, "train")
        if name == "steady":
            assert len(check_source(source).source) == 3
        else:
            assert "another one on the second call" in check_message(source)


def test_a_source_that_is_read_once_as_a_stream_stays_a_stream(write_jsonl, monkeypatch):
    source = source_of(write_jsonl([{"prompt": f"q{i}"} for i in range(10)]))
    monkeypatch.setattr(type(source), "__getitem__", lambda *_: pytest.fail("rows were read one by one"))
    prompts = check_source(source).source.scan()
    assert len(list(itertools.islice(prompts, 3))) == 3
