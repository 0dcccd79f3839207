"""Other models and modes on the real stack."""

from __future__ import annotations

import base64
import json

import pytest

from argusrl.data.shapes import prompt
from argusrl.journal.verify import verify_run
from argusrl.storage.publish import read_lines
from e2e.conftest import ROOT, SMALL
from fakes.tiny_text_model import make_text_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sound(folder):
    rows = [row for row in read_lines(folder.metrics) if row["step"] > 0]
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["rollout/failed_trajectories"] == 0 for row in rows)
    assert verify_run(folder) == []
    return rows


def test_a_text_only_causal_model(train, tmp_path):
    model = make_text_model(tmp_path / "model")
    data = write_rows(tmp_path / "train.jsonl", [{"prompt": f"{i} plus 1?", "answer": "2"} for i in range(16)])
    reward = tmp_path / "reward.py"
    reward.write_text("def letters(reply): return sum(c.isalpha() for c in reply) / 8\n")
    recipe = tmp_path / "text.yaml"
    recipe.write_text(
        f"""
model: {{path: {model}, max_tokens: 128}}
adapter: {{rank: 8}}
data: {{train: {data}, columns: {{images: null}}}}
rewards: [{{kind: python, function: "{reward}:letters"}}]
algorithm: {{num_steps: 2, prompts_per_step: 8, group_size: 4}}
optimizer: {{learning_rate: 1.0e-3}}
rollout: {{max_response_tokens: 8}}
evaluate: {{every_steps: 0}}
"""
    )
    rows = sound(train("text", recipe=recipe))
    assert rows[0]["policy/grad_norm"] > 0


def test_rows_without_and_with_several_images_on_two_ranks(train, tmp_path):
    """The vision tower runs on every rank, whatever its rows are."""

    def row(index: int) -> dict:
        example = prompt(index, "train")
        image, question = example.messages[0].content
        uri = "data:image/png;base64," + base64.b64encode(image.data).decode()
        if index % 2:
            return {"prompt": f"what is {index}?", "answer": str(index), "images": []}
        return {"prompt": f"<image> and <image> {question}", "answer": example.answer, "images": [uri, uri]}

    data = write_rows(tmp_path / "train.jsonl", [row(index) for index in range(16)])
    columns = "data.columns={prompt: prompt, images: images, answer: answer}"
    folder = train(
        "mixed",
        *[word for word in SMALL if not word.startswith("data.")],
        "data.heldout=null",
        "evaluate.every_steps=0",
        f"data.train={data}",
        columns,
        "cluster.slots=2",
        "algorithm.num_steps=2",
        "model.max_tokens=192",
        "model.path=models/tiny-qwen3vl",
        recipe=ROOT / "recipes" / "digits.yaml",
    )
    assert any(row["policy/grad_norm"] > 0 for row in sound(folder))


def test_the_maze_recipe_rehearsed(train):
    """The recipe for 8 GPUs with the model and the sizes exchanged."""
    folder = train(
        "maze",
        "model.path=models/tiny-qwen3vl-frozen-lake",
        "model.max_tokens=1024",
        "rollout.max_response_tokens=6",
        "rollout.max_prompt_tokens=null",
        "algorithm.num_steps=1",
        "algorithm.prompts_per_step=4",
        "optimizer.warmup_steps=0",
        "evaluate.every_steps=0",
        "environment.options.cells=2",
        "environment.max_turns=4",
        "environment.image_size=96",
        "environment.instruction=reach the goal.",
        "environment.processes=1",
        "cluster.slots=1",
        "cluster.episode_workers=1",
        recipe=ROOT / "recipes" / "qwen3vl_8b_maze2d.yaml",
    )
    rows = sound(folder)
    assert rows[0]["rollout/trajectories"] == 32
    assert rows[0]["policy/grad_norm"] > 0
