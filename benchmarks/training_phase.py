"""The training phase by itself: against a bare loop that does the same work, and against rows that share nothing.

    python benchmarks/training_phase.py --model models/tiny-qwen3vl

Prints JSON. Times are per update, of one process with one thread; what is compared takes turns (A B A B), and ratios
are of medians. CPU seconds are the ones to trust on a machine that does other things as well.

- `train_vs_bare_loop`: tokens per second of Policy's update (packing, images, forward, backward, checks, optimizer)
  over those of a plain torch loop with the same packed tensors, images, model and adapter, without shards and checks.
- `shared_vs_packed_504`: time of the same update with rows packed side by side, each with its own copy of the prompt,
  over that with prompts shared. Each different image goes through the tower once in both.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

GROUP, ANSWER_TOKENS = 8, 32
MICRO_BATCH_TOKENS = 16_384


def measure(model: str, *, pixels: int = 504, prompts: int = 8, repeats: int = 7) -> dict[str, Any]:
    """Both ratios at one image size, with all raw times."""
    from argusrl.policy import group
    from argusrl.policy.policy import Policy
    from argusrl.policy.settings import PolicySettings

    limits = {"min_pixels": pixels**2, "max_pixels": pixels**2}  # as large as asked for, whatever the model's own are
    settings = PolicySettings(model=model, device="cpu", dtype="float32", rank=16, alpha=32.0, **limits)
    store = group.host_store()
    group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="training-phase")
    try:
        policy = Policy(settings)
        rows = make_rows(policy, pixels, prompts)
        computed: list[Any] = []
        times = in_turns(
            {
                "argusrl": partial(update, policy, rows, computed),
                "bare_loop": bare_loop(settings, rows),
                "packed": partial(without_sharing, policy, rows),
            },
            repeats,
        )
    finally:
        group.disconnect()
    work = computed[-1]
    ratio = lambda slow, fast, kind: median(times[slow][kind]) / median(times[fast][kind])  # noqa: E731
    return {
        "pixels": pixels,
        "prompts": prompts,
        "group": GROUP,
        "answer_tokens": ANSWER_TOKENS,
        "repeats": repeats,
        "tokens": work.tokens,
        "row_tokens": work.row_tokens,
        "tokens_per_second": work.tokens / median(times["argusrl"]["wall"]),
        "train_vs_bare_loop": ratio("bare_loop", "argusrl", "wall"),
        "train_vs_bare_loop_cpu": ratio("bare_loop", "argusrl", "cpu"),
        f"shared_vs_packed_{pixels}": ratio("packed", "argusrl", "wall"),
        f"shared_vs_packed_{pixels}_cpu": ratio("packed", "argusrl", "cpu"),
        "seconds": times,
        "spread": {name: {kind: spread(taken) for kind, taken in both.items()} for name, both in times.items()},
    }


def make_rows(policy: Any, pixels: int, prompts: int) -> list[Any]:
    """Groups of rows with one image each; ids and pixels are random, the same every time."""
    from argusrl.policy.rows import Row, RowTurn

    config = policy._scorer.base.config
    words = random.Random(0)
    special = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    vocabulary = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    rows = []
    for number in range(prompts):
        picture = image(pixels, number)
        shown = (config.image_token_id,) * policy._inputs.image_tokens(picture)
        question = words.choices(vocabulary, k=12 + number % 3)
        prompt = (config.vision_start_token_id, *shown, config.vision_end_token_id, *question)
        for sample in range(GROUP):
            reply = tuple(words.choices(vocabulary, k=ANSWER_TOKENS))
            turn = RowTurn(prompt_ids=prompt, response_ids=reply, logprobs=(-6.0,) * ANSWER_TOKENS)
            rows.append(Row(turns=(turn,), advantage=(-1.0) ** sample, images=(picture,)))
    return rows


def image(pixels: int, seed: int) -> bytes:
    """A PNG of coloured squares."""
    from PIL import Image

    colours = random.Random(seed).randbytes(8 * 8 * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (8, 8), colours).resize((pixels, pixels), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def update(policy: Any, rows: list[Any], computed: list[Any]) -> None:
    """One update as a rank does it, prompts shared."""
    policy.forward_backward([rows], len(rows) * ANSWER_TOKENS)
    policy.optimizer_step(1e-5)
    computed.append(policy.finish_step())


def without_sharing(policy: Any, rows: list[Any]) -> None:
    """The same with a copy of the prompt in every row."""
    from argusrl.policy import inputs

    share = max(1, MICRO_BATCH_TOKENS // rows[0].tokens)
    shared = inputs.grow
    inputs.grow = partial(shared, worth=float("inf"))
    try:
        micro_batches = [rows[start : start + share] for start in range(0, len(rows), share)]
        policy.forward_backward(micro_batches, len(rows) * ANSWER_TOKENS)
        policy.optimizer_step(1e-5)
        policy.finish_step()
    finally:
        inputs.grow = shared


def bare_loop(settings: Any, rows: list[Any]) -> Callable[[], None]:
    """What the update comes down to: images, tower, forward, log-probabilities, clipped loss, backward, AdamW."""
    import torch

    from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss
    from argusrl.policy.inputs import InputBuilder
    from argusrl.policy.lora import add_lora
    from argusrl.policy.model import load_model
    from argusrl.policy.scorer import Scorer
    from argusrl.policy.step_work import StepWork

    base = load_model(settings, reader=True)
    scorer = Scorer(add_lora(base, settings), base).eval()
    builder = InputBuilder(base, settings)
    batch = builder.pack(rows)
    trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    banned = torch.zeros(0, dtype=torch.long)

    def run() -> None:
        batch.image_inputs.update(builder._process(batch.images))
        new, _ = scorer(batch, 1.0, banned, StepWork())
        parts = clipped_policy_loss(new, new.detach(), batch.engine, batch.advantages, ClipSettings())
        (parts.loss / len(new)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def in_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of each, one after the other, `repeats` times; a first round warms up."""
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if turn:
                times[name]["wall"].append(time.perf_counter() - wall)
                times[name]["cpu"].append(time.process_time() - cpu)
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> float:
    """Difference of the quartiles, as a share of the median."""
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "models" / "tiny-qwen3vl"))
    parser.add_argument("--pixels", type=int, default=504)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    choice = parser.parse_args()
    print(json.dumps(measure(**vars(choice)), indent=1))


if __name__ == "__main__":
    main()
