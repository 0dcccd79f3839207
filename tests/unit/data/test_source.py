import itertools
from pathlib import Path

import pytest

from argusrl.config.sections import ColumnSection, DataSection, EnvironmentSection
from argusrl.data.source import SelectedSource, has_split, open_source
from argusrl.errors import ConfigError, DataError
from argusrl.types import Prompt

ASK = EnvironmentSection()
PLAY = EnvironmentSection(kind="gymnasium", id="FrozenLake-v1")

GENERATOR = """
from PIL import Image
from argusrl.types import Message, Prompt

def dots(index, split, *, colour="red"):
    picture = Image.new("RGB", (8, 8), colour)
    picture.putpixel((index % 8, index // 8), (0, 0, 0))
    message = Message(role="user", content=(picture, f"{split} {index}?"))
    return Prompt(id="", messages=(message,), answer=str(index))

def empty(index, split):
    return Prompt(id=f"p{index}", info={"level": index})

def wrong(index, split):
    if index == 1:
        raise KeyError("level")
    return "a prompt"
"""


@pytest.fixture
def generator(tmp_path: Path) -> str:
    path = tmp_path / "make.py"
    path.write_text(GENERATOR)
    return str(path)


def texts(prompt: Prompt) -> list[str]:
    return [part for message in prompt.messages for part in message.content if isinstance(part, str)]


def test_files(write_parquet, png):
    path = write_parquet([{"prompt": f"q{i}", "images": [png(i)], "answer": i, "level": "easy"} for i in range(5)])
    section = DataSection(train=path, columns=ColumnSection(info=["level"]))
    source = open_source(section, ASK, "train")
    assert len(source) == 5
    prompt = source[3]
    assert (prompt.id, prompt.answer, prompt.info) == ("train-3", 3, {"level": "easy"})
    assert prompt.messages[0].images[0].data == png(3)
    assert list(source.scan()) == [source[i] for i in range(5)]


def test_ids_of_splits_differ_unless_a_column_names_them(write_parquet):
    path = write_parquet([{"prompt": "q", "key": 41}])
    named = DataSection(train=path, heldout=path, columns=ColumnSection(id="key"))
    assert open_source(named, ASK, "train")[0].id == "41"
    plain = DataSection(train=path, heldout=path)
    assert open_source(plain, ASK, "train")[0].id != open_source(plain, ASK, "heldout")[0].id


def test_image_paths_are_relative_to_the_file(write_jsonl, tmp_path, png):
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    (tmp_path / "data" / "pictures" / "a.png").write_bytes(png(1))
    path = write_jsonl([{"prompt": "q", "images": "pictures/a.png"}], "data/rows.jsonl")
    assert open_source(DataSection(train=path), ASK, "train")[0].messages[0].images[0].data == png(1)


def test_size_limits_rows(write_jsonl):
    path = write_jsonl([{"prompt": f"q{i}"} for i in range(5)])
    source = open_source(DataSection(train=path, train_size=2), ASK, "train")
    assert len(source) == 2
    assert len(list(source.scan())) == 2
    with pytest.raises(IndexError):
        source[2]
    with pytest.raises(DataError, match=r"train_size is 6, but .* holds 5 rows"):
        open_source(DataSection(train=path, train_size=6), ASK, "train")


def test_a_bad_row_is_an_error_that_names_it_and_leaves_the_others_usable(write_jsonl):
    path = write_jsonl([{"prompt": "good"}, {"prompt": "q", "images": ["gone.png"]}, "{broken\n", {"prompt": "fine"}])
    source = open_source(DataSection(train=path), ASK, "train")
    with pytest.raises(DataError, match=r"train row 1 \(rows.jsonl line 2\): image 1: there is no file .*gone.png"):
        source[1]
    with pytest.raises(DataError, match=r"train row 2 \(rows.jsonl line 3\): not valid JSON"):
        source[2]
    assert [isinstance(row, DataError) for row in source.scan()] == [False, True, True, False]
    assert texts(source[3]) == ["fine"]


def test_a_file_that_vanishes_in_the_middle_of_a_run(write_jsonl):
    path = write_jsonl([{"prompt": "q"}])
    source = open_source(DataSection(train=path), ASK, "train")
    path.unlink()
    with pytest.raises(DataError, match=r"train row 0 .* cannot be read"):
        source[0]


def test_a_missing_id_is_a_bad_row(write_jsonl):
    path = write_jsonl([{"prompt": "q", "key": "a"}, {"prompt": "q", "key": None}])
    source = open_source(DataSection(train=path, columns=ColumnSection(id="key")), ASK, "train")
    with pytest.raises(DataError, match=r"the id \(column key\) is missing"):
        source[1]


def test_a_misspelt_column_is_told_before_any_row_is_read(write_parquet):
    path = write_parquet([{"question": "q"}])
    with pytest.raises(ConfigError, match=r"no column 'questions': did you mean 'question'\?"):
        open_source(DataSection(train=path, columns=ColumnSection(prompt="questions")), ASK, "train")


def test_generated(generator):
    section = DataSection(kind="generated", generator=f"{generator}:dots", options={"colour": "blue"}, train_size=10)
    source = open_source(section, ASK, "train")
    assert len(source) == 10
    assert (source[7].id, source[7].answer, texts(source[7])) == ("train-7", "7", ["train 7?"])
    assert source[7].messages[0].images[0].width == 8
    assert source[7] == source[7]
    assert source[6] != source[7]


def test_generated_gets_suffix_and_system_prompt(generator):
    section = DataSection(
        kind="generated", generator=f"{generator}:dots", train_size=1, suffix="Be brief.", system_prompt="See."
    )
    assert texts(open_source(section, ASK, "train")[0]) == ["See.", "train 0? Be brief."]


def test_generated_failures_name_the_prompt(generator):
    source = open_source(DataSection(kind="generated", generator=f"{generator}:wrong", train_size=2), ASK, "train")
    with pytest.raises(DataError, match=r"train prompt 0 of .*:wrong is a str, not an argusrl.types.Prompt"):
        source[0]
    with pytest.raises(DataError, match=r"train prompt 1 of .* raised KeyError"):
        source[1]


def test_generated_prompts_without_messages_need_an_environment_that_writes_them(generator):
    section = DataSection(kind="generated", generator=f"{generator}:empty", train_size=2)
    assert open_source(section, EnvironmentSection(kind="python", factory="x:y"), "train")[1].info == {"level": 1}
    with pytest.raises(DataError, match="no user message"):
        open_source(section, ASK, "train")[1]


def test_environment_seeds_of_splits_are_disjoint():
    section = DataSection(kind="environment", train_size=3, heldout_size=2)
    train, heldout = open_source(section, PLAY, "train"), open_source(section, PLAY, "heldout")
    assert [train[i].info for i in range(3)] == [{"seed": i, "options": {}} for i in range(3)]
    assert [heldout[i].info["seed"] for i in range(2)] == [1_000_000, 1_000_001]
    assert train[0].messages == ()
    assert len({prompt.id for prompt in itertools.chain(train.scan(), heldout.scan())}) == 5


def test_environment_starts():
    starts = [{"seed": 5, "options": {"desc": ["SF", "FG"]}}, {"options": {"size": 4}}]
    play = EnvironmentSection(kind="gymnasium", id="FrozenLake-v1", starts=starts, heldout_starts=[{"seed": 9}])
    section = DataSection(kind="environment")
    train, heldout = open_source(section, play, "train"), open_source(section, play, "heldout")
    assert [prompt.info for prompt in train.scan()] == [
        {"seed": 5, "options": {"desc": ["SF", "FG"]}},
        {"seed": 1, "options": {"size": 4}},
    ]
    assert heldout[0].info == {"seed": 9, "options": {}}
    assert len(open_source(DataSection(kind="environment", train_size=1), play, "train")) == 1
    with pytest.raises(ConfigError, match="lists 2"):
        open_source(DataSection(kind="environment", train_size=3), play, "train")


def test_wrong_starts_are_all_listed():
    starts = [{"sed": 1}, {"seed": "a"}, {"options": 3}]
    play = EnvironmentSection(kind="gymnasium", id="FrozenLake-v1", starts=starts)
    with pytest.raises(ConfigError) as caught:
        open_source(DataSection(kind="environment"), play, "train")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (DataSection(), "data.train is not set"),
        (DataSection(kind="generated", generator="x:y"), "data.train_size is not set"),
        (DataSection(kind="environment"), "data.train_size is not set"),
        (DataSection(kind="generated", train_size=3), "data.generator is not set"),
    ],
)
def test_nothing_named(section, key):
    with pytest.raises(ConfigError, match=key):
        open_source(section, ASK, "train")


def test_has_split():
    assert has_split(DataSection(train="x"), ASK, "train")
    assert not has_split(DataSection(train="x"), ASK, "heldout")
    assert has_split(DataSection(kind="environment", heldout_size=1), PLAY, "heldout")
    assert not has_split(DataSection(kind="environment", train_size=1), PLAY, "heldout")


def test_selected(write_jsonl):
    source = open_source(DataSection(train=write_jsonl([{"prompt": f"q{i}"} for i in range(4)])), ASK, "train")
    chosen = SelectedSource(source, [3, 1])
    assert [texts(prompt) for prompt in chosen.scan()] == [["q3"], ["q1"]]
    assert chosen[1].id == "train-1"  # ids stay those of the file, whatever is left out
    with pytest.raises(IndexError):
        chosen[2]
