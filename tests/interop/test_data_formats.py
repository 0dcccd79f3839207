"""Files as the data scripts of verl, SkyRL and TRL lay them out, written through `datasets` as those scripts do."""

import base64
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from argusrl.config.sections import DataSection, EnvironmentSection
from argusrl.data.check import check_source
from argusrl.data.images import decode
from argusrl.data.source import open_source


def picture(seed: int) -> Pillow.Image:
    return Pillow.fromarray(np.random.RandomState(seed).randint(0, 256, (20, 30, 3), dtype=np.uint8))


def encoded(image: Pillow.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return buffer.getvalue()


@pytest.fixture
def geometry() -> datasets.Dataset:
    """Three rows with the columns of a hub data set: images, problem, answer."""
    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = {
        "images": [[picture(0)], [picture(1), picture(2)], [picture(3)]],
        "problem": ["<image>Find x.", "<image><image>Compare.", "<image>Find y."],
        "answer": ["5", "left", "7"],
    }
    return datasets.Dataset.from_dict(rows, features=features)


def checked(path: Path, **section):
    source = open_source(DataSection(train=path, **section), EnvironmentSection(), "train")
    return list(check_source(source, needs_answer=True).source.scan())


def test_verl_geometry(geometry, tmp_path: Path):
    def row(example, index):
        return {
            "data_source": "hub/geometry",
            "prompt": [{"role": "user", "content": example["problem"] + " Put the answer in \\boxed{}."}],
            "images": example["images"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": example["answer"]},
            "extra_info": {"split": "train", "index": index, "answer": example["answer"]},
        }

    made = geometry.map(row, with_indices=True, remove_columns=["problem", "answer"])
    made.to_parquet(str(tmp_path / "train.parquet"))
    prompts = checked(tmp_path / "train.parquet", format="verl")
    assert [prompt.answer for prompt in prompts] == ["5", "left", "7"]
    first, second, _ = prompts
    assert first.messages[0].content[1] == "Find x. Put the answer in \\boxed{}."
    assert decode(first.messages[0].content[0]).tobytes() == picture(0).tobytes()
    assert [decode(image).tobytes() for image in second.messages[0].images] == [
        picture(1).tobytes(),
        picture(2).tobytes(),
    ]
    assert second.info == {
        "data_source": "hub/geometry",
        "ability": "math",
        "extra_info": {"split": "train", "index": 1, "answer": "left"},
    }


def test_verl_text_only(tmp_path: Path):
    rows = [
        {
            "data_source": "hub/sums",
            "prompt": [{"role": "system", "content": "Be exact."}, {"role": "user", "content": f"{i} + {i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(3)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    prompts = checked(tmp_path / "train.parquet", format="verl")
    assert [prompt.answer for prompt in prompts] == ["0", "2", "4"]
    assert [message.role for message in prompts[0].messages] == ["system", "user"]


@pytest.mark.parametrize("saved", ["parquet", "datasets folder", "structs"])
def test_skyrl_geometry_with_images_inside_the_messages(geometry, tmp_path: Path, saved):
    """Releases of `datasets` differ: new ones store mixed parts as JSON, old ones as structs with all keys."""

    def row(example, index):
        uris = [
            "data:image/jpeg;base64," + base64.b64encode(encoded(image, "JPEG")).decode() for image in example["images"]
        ]
        parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
        return {
            "prompt": [
                {"role": "user", "content": [*parts, {"type": "text", "text": "Solve.\n" + example["problem"]}]}
            ],
            "env_class": "geometry3k",
            "reward_spec": {"method": "rule", "ground_truth": example["answer"]},
            "extra_info": {"split": "train", "index": index},
        }

    path = tmp_path / "train.parquet"
    if saved == "structs":
        pq.write_table(pa.Table.from_pylist([row(example, i) for i, example in enumerate(geometry)]), path)
    else:
        made = geometry.map(row, with_indices=True, remove_columns=geometry.column_names)
        made.to_parquet(str(path)) if saved == "parquet" else made.save_to_disk(str(path))
    prompts = checked(path, format="skyrl")
    assert [prompt.answer for prompt in prompts] == ["5", "left", "7"]
    assert [len(prompt.messages[0].images) for prompt in prompts] == [1, 2, 1]
    assert prompts[0].messages[0].images[0].data == encoded(picture(0), "JPEG")
    assert prompts[0].messages[0].content[1:] == ("Solve.\n", "Find x.")
    assert prompts[1].info == {"env_class": "geometry3k", "extra_info": {"split": "train", "index": 1}}


def test_skyrl_text_only(tmp_path: Path):
    rows = [
        {
            "data_source": "hub/sums",
            "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
            "env_class": "sums",
            "reward_spec": {"method": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
            "max_turns": 3,
        }
        for i in range(2)
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    prompts = checked(tmp_path / "train.parquet", format="skyrl")
    assert prompts[1].answer == "2"
    assert prompts[1].info["max_turns"] == 3


@pytest.mark.parametrize("saved", ["parquet", "datasets folder"])
def test_trl_conversations_with_one_image(tmp_path: Path, saved):
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "problem": datasets.Value("string"),
            "solution": datasets.Value("string"),
        }
    )
    rows = {"image": [picture(0), picture(1)], "problem": ["How many?", "Where?"], "solution": ["$4$", "left"]}
    dataset = datasets.Dataset.from_dict(rows, features=features).map(
        lambda example: {
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": example["problem"]}]
        }
    )
    path = tmp_path / "train"
    if saved == "parquet":
        path = tmp_path / "train.parquet"
        dataset.to_parquet(str(path))
    else:
        dataset.save_to_disk(str(path))
    prompts = checked(path, format="trl")
    assert [prompt.answer for prompt in prompts] == ["$4$", "left"]
    assert [message.role for message in prompts[0].messages] == ["system", "user"]
    assert decode(prompts[1].messages[1].content[0]).tobytes() == picture(1).tobytes()
    assert prompts[1].messages[1].content[1] == "Where?"
    assert prompts[1].info == {"problem": "Where?"}


def test_trl_parts_and_several_images(tmp_path: Path):
    features = datasets.Features(
        {
            "prompt": [
                {
                    "role": datasets.Value("string"),
                    "content": [{"type": datasets.Value("string"), "text": datasets.Value("string")}],
                }
            ],
            "images": datasets.Sequence(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    content = [{"type": "image", "text": None}, {"type": "text", "text": "vs"}, {"type": "image", "text": None}]
    rows = {"prompt": [[{"role": "user", "content": content}]], "images": [[picture(0), picture(1)]], "answer": ["a"]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    (prompt,) = checked(tmp_path / "train.parquet", format="trl")
    assert [part if isinstance(part, str) else "image" for part in prompt.messages[0].content] == [
        "image",
        "vs",
        "image",
    ]


def test_trl_plain_text_as_jsonl(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "The sky is", "ground_truth": "blue"}) + "\n")
    (prompt,) = checked(tmp_path / "train.jsonl", format="trl")
    assert (prompt.answer, prompt.info) == ("blue", {})
