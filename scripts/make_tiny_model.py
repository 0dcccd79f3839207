"""Makes the tiny Qwen3-VL checkpoints in models/: a real Qwen3VLForConditionalGeneration, small enough for a laptop.

    python scripts/make_tiny_model.py --task shapes --out models/tiny-qwen3vl

A checkpoint starts from random weights and gets a short supervised warm start on one task, so that it answers in the
right form but not well: reinforcement learning has something to do. docs/tiny_model.md says what each one has learnt
and how good it is. The same task and seed give the same tensors on the same kind of machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the order of sums must not depend on the machine's cores

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not look for a display

import argparse
import hashlib
import importlib.util
import io
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image as PillowImage
from tiny_qwen3vl import IMAGE_PAD, PIXELS_PER_TOKEN, build_model, build_processor
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from argusrl.data import shapes
from argusrl.environments.gymnasium_adapter import frame_image

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Turn:
    """One user message, image first, and the reply to learn."""

    image: PillowImage.Image
    text: str
    reply: str


Episode = list[Turn]


@dataclass(frozen=True)
class Task:
    """What a warm start learns from. `episode` makes one example; its last argument says whether to soften."""

    episode: Callable[[np.random.Generator, bool], Episode]
    clean_steps: int
    batch_size: int  # episodes
    soft_steps: int = 0  # at the end, with labels that are mostly random
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    learning_rate: float = 3e-3
    schedule_steps: int | None = None  # the rate falls as if there were this many steps


RANDOM_SHARE = 0.75  # of the answers in softened steps

SHAPES_CLEAN, SHAPES_SOFT = 160, 25  # steps
DIGITS_CLEAN, DIGITS_SOFT = 100, 15
DIGITS_QUESTION = "Which digit is this?"
DIGITS_MEAN, DIGITS_STD = (0.3, 0.3, 0.3), (0.35, 0.35, 0.35)  # of the pixels, about
LAKE_CLEAN = 72
LAKE_TEXT = "reach the goal."
LAKE_TEACHER_SHARE = 0.7  # of the moves that lead to the goal; the others are random
LAKE_MEAN, LAKE_STD = (0.75, 0.85, 0.92), (0.15, 0.15, 0.15)


def load_example(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode(data: bytes) -> PillowImage.Image:
    return PillowImage.open(io.BytesIO(data)).convert("RGB")


# --------------------------------------------------------------------------- tasks


def shapes_task() -> Task:
    """Questions on generated shapes; at the end most answers are random, so that the model knows but is unsure."""
    indices = itertools.count()

    def episode(rng: np.random.Generator, soften: bool) -> Episode:
        prompt = shapes.prompt(next(indices), "warmstart")
        image, question = prompt.messages[0].content
        assert not isinstance(image, str)
        assert isinstance(question, str)
        answer = prompt.answer
        if soften and rng.random() < RANDOM_SHARE:
            answer = str(rng.choice(shapes.ANSWERS[question]))
        return [Turn(decode(image.data), question, f"<answer>{answer}</answer>")]

    return Task(episode=episode, clean_steps=SHAPES_CLEAN, soft_steps=SHAPES_SOFT, batch_size=40)


def digits_task() -> Task:
    """scikit-learn's handwritten digits, training rows only; softened at the end like the shapes."""
    from sklearn.datasets import load_digits

    example = load_example("digits_to_parquet")
    digits = load_digits()
    rows, _ = example.split_rows(digits.images, heldout_rows=256, seed=0)
    images = {
        row: decode(example.render(digits.images[row], side_pixels=96, background=example.BACKGROUND)) for row in rows
    }

    def episode(rng: np.random.Generator, soften: bool) -> Episode:
        row = int(rng.choice(rows))
        random_answer = soften and rng.random() < RANDOM_SHARE
        answer = rng.integers(10) if random_answer else digits.target[row]
        return [Turn(images[row], DIGITS_QUESTION, f"<answer>{answer}</answer>")]

    return Task(
        episode=episode,
        clean_steps=DIGITS_CLEAN,
        soft_steps=DIGITS_SOFT,
        batch_size=40,
        image_mean=DIGITS_MEAN,
        image_std=DIGITS_STD,
    )


def lake_frames(example: ModuleType, desc: list[str]) -> dict[tuple[int, int], PillowImage.Image]:
    """Gymnasium's picture of a map for every cell the agent may stand on, as the environment adapter shows it."""
    env = example.make({}, desc=desc)
    env.reset(seed=0)
    frames = {}
    for state in range(len(desc) ** 2):
        env.unwrapped.s = state
        frames[divmod(state, len(desc))] = decode(frame_image(env.render(), size=96).data)
    env.close()
    return frames


def frozen_lake_task() -> Task:
    """Walks of a sloppy teacher over the training layouts, stopped early; never softened."""
    example = load_example("frozen_lake")
    maps = example.layouts()[0]
    frames = [lake_frames(example, desc) for desc in maps]
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}

    def after(cell: tuple[int, int], move: str) -> tuple[int, int]:
        row, column = (min(max(at + step, 0), 2) for at, step in zip(cell, moves[move], strict=True))
        return row, column

    def episode(rng: np.random.Generator, _soften: bool) -> Episode:
        which = int(rng.integers(len(maps)))
        cell, goal = example.find(maps[which], "S"), example.find(maps[which], "G")
        turns: Episode = []
        for _ in range(example.distance(cell, goal) + 1):
            good = [move for move in moves if example.distance(after(cell, move), goal) < example.distance(cell, goal)]
            move = str(rng.choice(good if rng.random() < LAKE_TEACHER_SHARE else list(moves)))
            text = "" if turns else LAKE_TEXT
            turns.append(Turn(frames[which][cell], text, f"<action>{move}</action>"))
            cell = after(cell, move)
            if cell == goal:
                break
        return turns

    return Task(
        episode=episode,
        clean_steps=LAKE_CLEAN,
        batch_size=32,
        image_mean=LAKE_MEAN,
        image_std=LAKE_STD,
        schedule_steps=100,
    )


# --------------------------------------------------------------------------- training


def encode(processor: Qwen3VLProcessor, episode: Episode) -> tuple[list[int], list[bool]]:
    """Token ids of an episode with expanded images, and which of them are replies."""
    ids: list[int] = []
    learn: list[bool] = []
    for turn in episode:
        content = [{"type": "image"}, {"type": "text", "text": turn.text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        tokens = turn.image.width * turn.image.height // PIXELS_PER_TOKEN
        prompt = ("\n" if ids else "") + prompt.replace(IMAGE_PAD, IMAGE_PAD * tokens)
        for text, is_reply in ((prompt, False), (f"{turn.reply}<|im_end|>", True)):
            new = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += new
            learn += [is_reply] * len(new)
    return ids, learn


def reply_loss(
    model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, episodes: list[Episode]
) -> torch.Tensor:
    """Mean negative log-likelihood of all reply tokens of a batch."""
    rows = [encode(processor, episode) for episode in episodes]
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), processor.tokenizer.pad_token_id)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.long)
    learn = torch.zeros((len(rows), length), dtype=torch.bool)
    for row, (ids, replies) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
        learn[row, : len(ids)] = torch.tensor(replies)
    pixels = processor.image_processor([turn.image for episode in episodes for turn in episode], return_tensors="pt")
    image_id = processor.tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        mm_token_type_ids=(input_ids == image_id).int(),
        use_cache=False,
        **pixels,
    ).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1][learn[:, 1:]], input_ids[:, 1:][learn[:, 1:]])


def warm_start(task: Task, seed: int) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """Train from random weights: AdamW, 30 steps of warm-up, then a linear fall of the rate."""
    processor = build_processor(task.image_mean, task.image_std)
    model = build_model(processor.tokenizer, seed)
    rng = np.random.default_rng(seed)
    steps = task.clean_steps + task.soft_steps
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * min(1.0, step / 30) * (1 - 0.9 * step / (task.schedule_steps or steps))
        episodes = [task.episode(rng, step > task.clean_steps) for _ in range(task.batch_size)]
        loss = reply_loss(model, processor, episodes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return model, processor


# --------------------------------------------------------------------------- command line

TASKS = {"shapes": shapes_task, "digits": digits_task, "frozen_lake": frozen_lake_task}


def tensor_digest(model: Qwen3VLForConditionalGeneration) -> str:
    """sha256 over names, types, shapes and bytes of all tensors in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of weights and examples (default 0)")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    began, cpu_began = time.monotonic(), time.process_time()
    model, processor = warm_start(TASKS[arguments.task](), arguments.seed)
    model = model.to(torch.bfloat16)
    model.save_pretrained(arguments.out)
    processor.save_pretrained(arguments.out)
    for file in arguments.out.iterdir():
        file.chmod(0o644)  # the weights are written for their owner alone
    wall, cpu = time.monotonic() - began, time.process_time() - cpu_began
    print(f"{arguments.out}: tensors sha256 {tensor_digest(model)}, {wall:.0f} s ({cpu:.0f} CPU-s)")


if __name__ == "__main__":
    main()
