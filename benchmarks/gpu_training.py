"""Training step of Qwen3-VL-8B with random weights on one GPU: tokens/s, utilisation, memory, equality of attention.

Needs torch 2.11 or later, transformers 5.19 and peft (these two may come as wheels). No network, no vLLM, no Ray, no
weights: the model is made from its config. One JSON object per phase is printed as soon as it is known, so that a run
that is cut off leaves numbers; the last line holds everything.

    python benchmarks/gpu_training.py [--peft-wheel peft.whl] [--wheels FOLDER] [--seconds 540]
    python benchmarks/gpu_training.py --rehearse     the same script on a CPU, with a tiny model

A step has 64 prompts with an image of 1 megapixel and 8 replies of 512 tokens each. `shared` packs the replies of a
prompt behind one copy of it, `packed` lays whole sequences side by side (their prompts differ in the first token, so
nothing is shared), `padded` is a plain batch, one sequence a line, each with its own image. A token counts once however
often it is computed ("unique"), and a utilisation counts 4 operations per matrix element and unique token (the base is
frozen), against the peak of the data sheet; what checkpointing computes again, attention and tower are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import io
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Sizes as the model's config.json on the hub has them: https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct
QWEN3_VL_8B: dict[str, Any] = {
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "text_config": {
        **QWEN3_VL_8B["text_config"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {**QWEN3_VL_8B["text_config"]["rope_parameters"], "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        **QWEN3_VL_8B["vision_config"],
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": 505,
    "video_token_id": 506,
    "vision_start_token_id": 503,
    "vision_end_token_id": 504,
    "tie_word_embeddings": False,
}
H200_BF16_FLOPS = 989e12  # dense; NVIDIA H200 data sheet: half of the figure with sparsity
LORA_RANK = 32
MEMORY_SHARE = 0.9  # of the device's free memory that an estimate may fill


@dataclass(frozen=True, slots=True)
class Load:
    """What a step consists of."""

    prompts: int
    group_size: int
    text_tokens: int  # of a prompt, beside its image
    response_tokens: int
    image_side: int


FULL_LOAD = Load(prompts=64, group_size=8, text_tokens=173, response_tokens=512, image_side=1024)
SMALL_LOAD = Load(prompts=4, group_size=3, text_tokens=8, response_tokens=12, image_side=64)


@dataclass(slots=True)
class Bench:
    """The run: where it computes, until when, and what it found."""

    device: str
    dtype: str
    load: Load
    deadline: float
    output: Path | None = None
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def phase(self, name: str, least_seconds: float, run: Callable[[], dict[str, Any]]) -> None:
        """Run and print a phase; one that fails or has too little time leaves its reason, and the others go on."""
        began = time.monotonic()
        if self.seconds_left < least_seconds:
            found: dict[str, Any] = {"skipped": f"{self.seconds_left:.0f} s left, it needs {least_seconds:.0f}"}
        else:
            try:
                found = run()
            except Exception as error:  # whatever a GPU may say: the numbers so far must come out
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        found["seconds"] = round(time.monotonic() - began, 2)
        self.results[name] = found
        print(json.dumps({"phase": name, **found}), flush=True)
        if self.output is not None:
            self.output.write_text(json.dumps(self.results, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    use_wheels(options.peft_wheel, options.wheels)
    sys.path.insert(0, str(ROOT / "src"))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # micro-batches come close to the limit
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print(json.dumps({"error": "there is no GPU here; --rehearse runs the script on the CPU"}))
        return 1
    _meet_older_torch()
    if options.rehearse:
        torch.set_num_threads(1)
    bench = Bench(
        device="cpu" if options.rehearse else "cuda",
        dtype="float32" if options.rehearse else "bfloat16",
        load=SMALL_LOAD if options.rehearse else FULL_LOAD,
        deadline=time.monotonic() + options.seconds,
        output=options.output,
    )
    bench.phase("machine", 0, lambda: machine(bench.device))
    bench.phase("attention", 10, lambda: attention_equality(bench.device, bench.load))
    with process_group(bench.device), tempfile.TemporaryDirectory() as folder:
        _measure(bench, Path(folder), SMALL if options.rehearse else QWEN3_VL_8B)
    print(json.dumps(bench.results), flush=True)
    return 1 if any("error" in found for found in bench.results.values()) else 0


def _measure(bench: Bench, folder: Path, config: dict[str, Any]) -> None:
    """Everything that needs the model."""
    made: list[Any] = []

    def build() -> dict[str, Any]:
        made.append(RandomPolicy.make(folder, config, device=bench.device, dtype=bench.dtype))
        return _memory(bench.device) | {"parameters": made[0].shape.parameters}

    bench.phase("build", 60 if bench.device == "cuda" else 0, build)
    if not made:
        return
    timed = [
        ("shared", {}),
        ("shared_checkpointed", {"checkpointing": True}),
        ("packed", {"shared": False}),
        ("padded", {"shared": False, "padded": True}),
    ]
    for name, choices in timed:
        bench.phase(name, 20 if bench.device == "cuda" else 0, lambda c=choices: train(bench, made[0], **c))
        if "error" in bench.results[name]:
            made[0].rebuild()
    bench.phase("sameness", 20 if bench.device == "cuda" else 0, lambda: sameness(bench, made[0]))
    bench.phase("handing_over", 20 if bench.device == "cuda" else 0, lambda: hand_over(made[0]))
    bench.phase("ratios", 0, lambda: _ratios(bench.results))
    made.pop().policy.close()


# ---- the model


class RandomPolicy:
    """A Policy with random weights, made where it computes: no file of weights is read or written."""

    def __init__(self, settings: Any) -> None:
        from argusrl.config.model_shape import ModelShape

        self.shape = ModelShape.read(Path(settings.model))
        self._settings = settings
        self.policy = self._make()

    @classmethod
    def make(cls, folder: Path, config: dict[str, Any], *, device: str, dtype: str) -> RandomPolicy:
        """`folder` takes config.json and the files of an image processor."""
        from argusrl.policy.settings import PolicySettings

        write_folder(folder, config)
        return cls(
            PolicySettings(
                model=str(folder),
                device=device,
                dtype=dtype,
                rank=LORA_RANK,
                alpha=2.0 * LORA_RANK,
                min_pixels=32 * 32,
                max_pixels=1 << 20,
                gradient_checkpointing=True,
            )
        )

    def _make(self) -> Any:
        from argusrl.policy.policy import Policy

        return Policy(self._settings, build=lambda settings, _rank, _world: random_model(settings))

    def rebuild(self) -> None:
        """After an error in the middle of a forward or backward: FSDP would go on from there."""
        self.policy.close()
        self.policy = self._make()

    @property
    def scorer(self) -> Any:
        return self.policy._scorer


def random_model(settings: Any) -> tuple[Any, Any]:
    """(Scorer, GradientWatch) as a Policy builds them, sharded over the group, with random weights."""
    import torch

    from argusrl.policy import sharding
    from argusrl.policy.lora import add_lora
    from argusrl.policy.model import load_model, torch_dtype
    from argusrl.policy.scorer import Scorer

    base = load_model(settings, reader=False)
    if "mm_encoder_outputs" not in inspect.signature(base.model.forward).parameters:
        raise RuntimeError("transformers before 5.19 drops encoded images: bring a newer one (--wheels)")
    scorer = Scorer(add_lora(base, settings), base).train(settings.gradient_checkpointing)
    mesh = sharding.make_mesh(settings.device)
    watch = sharding.shard(scorer, base, mesh, torch_dtype(settings.dtype))
    scorer.to_empty(device=settings.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in scorer.named_parameters():
            values = sharding.local(parameter)
            if parameter.ndim == 1:
                values.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                values.normal_(std=0.002 if "lora_B" in name else 0.02)
        _restore_buffers(base, settings.device)
    return scorer, watch


def _restore_buffers(base: Any, device: str) -> None:
    """Rotary frequencies are in no state dict: take them from a model that differs in depth and vocabulary only."""
    import torch

    config = copy.deepcopy(base.config)
    config.text_config.num_hidden_layers, config.text_config.vocab_size = 1, 8
    config.text_config.pad_token_id = None
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 1, [0]
    with torch.random.fork_rng(devices=[]):
        small = dict(type(base)(config).named_buffers())
    for name, buffer in base.named_buffers():
        buffer.copy_(small[name].to(device))


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    from transformers import Qwen3VLConfig

    from argusrl.policy.selftest import make_random_model

    make_random_model(folder)  # for its image processor
    (folder / "model.safetensors").unlink()
    Qwen3VLConfig(**copy.deepcopy(config), architectures=["Qwen3VLForConditionalGeneration"]).save_pretrained(folder)


# ---- rows


def make_groups(inputs: Any, config: Any, load: Load, *, shared: bool) -> list[list[Any]]:
    """Rows of each prompt, for an InputBuilder. Where not `shared`, prompts of a group differ in their first token."""
    from argusrl.policy.rows import Row, RowTurn

    groups, tokens, words = [], 0, min(config.get_text_config().vocab_size, config.image_token_id) - 200
    for number in range(load.prompts):
        image = _image(load.image_side, number)
        tokens = tokens or inputs.image_tokens(image)
        marks = (config.vision_start_token_id, *(config.image_token_id,) * tokens, config.vision_end_token_id)
        text = tuple(100 + (number * 31 + i * 17) % words for i in range(load.text_tokens))
        rows = []
        for sample in range(load.group_size):
            first = 100 + (0 if shared else sample)
            reply = tuple(100 + (number * 13 + sample * 101 + i * 29) % words for i in range(load.response_tokens))
            turn = RowTurn(prompt_ids=(first, *marks, *text), response_ids=reply, logprobs=(-1.0,) * len(reply))
            rows.append(Row(turns=(turn,), advantage=1.0 if sample % 2 else -1.0, images=(image,)))
        groups.append(rows)
    return groups


def _image(side: int, number: int) -> bytes:
    from PIL import Image

    picture = Image.new("RGB", (side, side), ((number * 37) % 256, (number * 91) % 256, 128))
    picture.paste(((number * 53) % 256, 20, 200), (side // 4, side // 4, side // 2, side // 2))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# ---- phases


def machine(device: str) -> dict[str, Any]:
    """Versions, the GPU, and what a large matrix product reaches on it."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    with contextlib.suppress(ImportError):
        import peft

        found["peft"] = peft.__version__
    if device == "cuda":
        found["free_bytes"], found["total_bytes"] = torch.cuda.mem_get_info()
        found["product_flops"] = _product_flops()
    return found


def _product_flops(size: int = 8192, times: int = 10) -> float:
    import torch

    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ left
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        left @ left
    torch.cuda.synchronize()
    return 2 * size**3 * times / (time.perf_counter() - began)


def attention_equality(device: str, load: Load) -> dict[str, Any]:
    """Largest differences of every strategy from plain attention over a mask, relative to its largest value."""
    import torch

    small = device == "cpu"
    heads, kv_heads, width = (8, 2, 16) if small else (32, 8, 128)
    prefix = load.text_tokens + (load.image_side // 32) ** 2 + 3
    return {
        name: attention_errors(
            device,
            dtype,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            prefix=prefix,
            replies=[load.response_tokens, load.response_tokens // 2, load.response_tokens // 3, 1],
        )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }


def attention_errors(
    device: str, dtype: Any, *, heads: int, kv_heads: int, width: int, prefix: int, replies: Sequence[int]
) -> dict[str, Any]:
    """Of each strategy: {output, gradient} error against plain float32 attention, or why it cannot run here."""
    import torch

    from argusrl.policy.attention import Segment, make_layout

    segments, end = [Segment(0, prefix)], prefix
    for length in replies:
        segments.append(Segment(end, length, parent=0))
        end += length
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, end, width) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    upstream = torch.randn(1, end, heads, width, generator=generator).to(device)
    expected = _plain_attention([one.detach().float().requires_grad_() for one in inputs], segments, upstream)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    found: dict[str, Any] = {}
    for strategy in ("mask", "gathered", "varlen"):
        try:
            output = make_layout(segments, strategy).to(device).attend(module, *inputs, width**-0.5)
            gradients = torch.autograd.grad((output.float() * upstream).sum(), inputs)
        except (RuntimeError, ImportError, TypeError, ValueError) as error:
            found[strategy] = {"cannot_run": str(error).splitlines()[0][:200]}
            continue
        found[strategy] = {
            "output": _relative(output, expected[0]),
            "gradient": max(_relative(*pair) for pair in zip(gradients, expected[1], strict=True)),
        }
    return found


def _plain_attention(inputs: Sequence[Any], segments: Sequence[Any], upstream: Any) -> tuple[Any, Any]:
    """([1, T, heads, D], gradients) by scores over the whole row."""
    import torch

    query, key, value = inputs
    total, groups = query.shape[2], query.shape[1] // key.shape[1]
    visible = torch.zeros(total, total, dtype=torch.bool, device=query.device)
    for segment in segments:
        own = slice(segment.start, segment.start + segment.length)
        visible[own, own] = torch.ones(segment.length, segment.length, dtype=torch.bool, device=query.device).tril()
        if segment.parent is not None:  # the prefix, which has no parent itself
            prefix = segments[segment.parent]
            visible[own, prefix.start : prefix.start + prefix.length] = True
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ keys.transpose(2, 3)) * query.shape[-1] ** -0.5
    output = (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values).transpose(1, 2)
    return output.detach(), torch.autograd.grad((output * upstream).sum(), inputs)


def _relative(found: Any, expected: Any) -> float:
    return float((found.detach().float() - expected).abs().max() / expected.abs().max())


def train(
    bench: Bench, made: RandomPolicy, *, shared: bool = True, padded: bool = False, checkpointing: bool = False
) -> dict[str, Any]:
    """One optimizer step over as many of the prompts as time allows, in micro-batches as large as memory allows."""
    import torch

    groups = make_groups(made.policy._inputs, made.scorer.base.config, bench.load, shared=shared)
    sequences = groups if shared else [[row] for rows in groups for row in rows]
    kind = {"shared": shared, "padded": padded, "checkpointing": checkpointing}
    prompt = len(groups[0][0].turns[0].prompt_ids)
    for size in range(fitting(bench, made, prompt, **kind), 0, -1):
        made.scorer.train(checkpointing)
        starts = range(0, len(sequences), size)
        batches = [list(itertools.chain(*sequences[start : start + size])) for start in starts]
        with padded_batches(made) if padded else contextlib.nullcontext(), contextlib.suppress(torch.OutOfMemoryError):
            found = _step(bench, made, batches) | _memory(bench.device)
            expected = expected_bytes(bench, made, size, prompt, **kind)
            ratio = expected / found["peak_bytes"] if found["peak_bytes"] else None
            return found | {"per_micro_batch": size, "expected_bytes": expected, "expected_over_peak": ratio}
        made.rebuild()
    raise torch.OutOfMemoryError("not even the smallest micro-batch fits")


def _step(bench: Bench, made: RandomPolicy, batches: Sequence[Any]) -> dict[str, Any]:
    """Two micro-batches to warm up, the second of which says how many of them there is time for; then a step."""
    policy, tokens = made.policy, bench.load.response_tokens
    one = 1.0
    for _ in range(2):
        began = time.perf_counter()
        policy.forward_backward([batches[0]], denominator_tokens=tokens)
        policy.discard_gradients()
        one = time.perf_counter() - began
    _reset_peak(bench.device)
    chosen = batches[: max(1, int(min(bench.seconds_left / 4, 60.0) / one))]
    packing: list[float] = []
    began = time.perf_counter()
    with _timed_calls(policy._inputs, "pack", packing):
        policy.forward_backward(chosen, denominator_tokens=tokens)
    update = policy.optimizer_step(1e-6)
    _synchronize(bench.device)
    seconds = time.perf_counter() - began
    rows = [row for batch in chosen for row in batch]
    groups = len(rows) / bench.load.group_size
    unique = groups * (len(rows[0].turns[0].prompt_ids) + bench.load.group_size * tokens)
    flops = made.shape.training_flops(round(unique), len(rows) * tokens)
    return {
        "prompts": round(groups, 2),
        "micro_batches": len(chosen),
        "step_seconds": seconds,
        "packing_seconds": sum(packing),  # on the CPU, images included
        "unique_tokens_per_second": unique / seconds,
        "reply_tokens_per_second": len(rows) * tokens / seconds,
        "utilisation": flops / seconds / H200_BF16_FLOPS,
        "update": update.skipped or "applied",
    }


@contextlib.contextmanager
def _timed_calls(holder: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Note how long each call of a method takes."""
    method = getattr(holder, name)

    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(holder, name, call)
    try:
        yield
    finally:
        delattr(holder, name)


def fitting(bench: Bench, made: RandomPolicy, prompt: int, **kind: bool) -> int:
    """Groups (sequences, where nothing is shared) of a micro-batch that fits by the estimate."""
    import torch

    if bench.device == "cpu":
        return 2
    room = MEMORY_SHARE * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    size = 1
    while size < bench.load.prompts and expected_bytes(bench, made, size + 1, prompt, **kind) <= room:
        size += 1
    return size


def expected_bytes(
    bench: Bench, made: RandomPolicy, size: int, prompt: int, *, shared: bool, padded: bool, checkpointing: bool
) -> int:
    """What config/estimate.py says of a micro-batch of `size` groups or sequences."""
    from argusrl.config.estimate import MicroBatch, training_memory

    load = bench.load
    images = size if shared or padded else min(size, -(-size // load.group_size) + 1)  # a group may be cut in two
    batch = MicroBatch.of_groups(
        size,
        prompt_tokens=prompt,
        response_tokens=load.response_tokens,
        group_size=load.group_size if shared else 1,
        patches=-(-((load.image_side // 16) ** 2) * images // size),
    )
    return training_memory(
        made.shape,
        batch,
        element_bytes=2 if bench.dtype == "bfloat16" else 4,
        rank=LORA_RANK,
        gradient_checkpointing=checkpointing,
        attention="varlen" if bench.device == "cuda" else "gathered",
    ).total


@contextlib.contextmanager
def padded_batches(made: RandomPolicy) -> Iterator[None]:
    """Let the scorer compute a plain batch: a line per sequence, each with its own image, as transformers does it."""
    from argusrl.policy.model import text_config

    scorer, text = made.scorer, text_config(made.scorer.base)
    before = text._attn_implementation
    text._attn_implementation = "sdpa"
    scorer.hidden_states = lambda batch, *_: _padded_states(scorer.base, batch)
    try:
        yield
    finally:
        del scorer.hidden_states
        text._attn_implementation = before


def _padded_states(base: Any, batch: Any) -> Any:
    """[T, H] in the order of the packed row, computed from [sequences, longest] ids."""
    import torch

    starts = (batch.position_ids[0, 0] == 0).nonzero()[:, 0].tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], batch.input_ids.shape[1]], strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(list(batch.input_ids[0].split(lengths)), batch_first=True)
    real = pad([torch.ones(n, dtype=torch.bool, device=ids.device) for n in lengths], batch_first=True)
    places = [pad(list(axis.split(lengths)), batch_first=True) for axis in batch.position_ids[1:, 0]]
    images = batch.image_inputs
    grids = images["image_grid_thw"]
    pieces = images["pixel_values"].split(grids.prod(-1).tolist())
    order = list(batch.image_order)
    output = base.model(
        input_ids=ids,
        attention_mask=real.long(),
        position_ids=torch.stack(places),
        pixel_values=torch.cat([pieces[number] for number in order]),
        image_grid_thw=grids[order],
        use_cache=False,
    )
    return output.last_hidden_state[real]


def sameness(bench: Bench, made: RandomPolicy) -> dict[str, Any]:
    """Largest differences of log-probabilities: a group behind one prompt, and a plain batch, from rows one by one."""
    made.scorer.train(False)
    found, rows_of = {}, {}
    for shared in (True, False):
        one_group = replace(bench.load, prompts=1)
        rows_of[shared] = make_groups(made.policy._inputs, made.scorer.base.config, one_group, shared=shared)[0]
    alone = {shared: logprobs(made, [[row] for row in rows]) for shared, rows in rows_of.items()}
    found["shared"] = float((logprobs(made, [rows_of[True]]) - alone[True]).abs().max())
    found["packed"] = float((logprobs(made, [rows_of[False]]) - alone[False]).abs().max())
    with padded_batches(made):
        found["padded"] = float((logprobs(made, [rows_of[False]]) - alone[False]).abs().max())
    return found


def logprobs(made: RandomPolicy, batches: Sequence[Any]) -> Any:
    """[N] of all rows' replies, without gradient."""
    import torch

    with torch.no_grad():
        packed = [made.policy._inputs.pack(rows).to(made.policy.settings.device) for rows in batches]
        return torch.cat([made.scorer(batch, 1.0, batch.targets[:0])[0] for batch in packed])


def hand_over(made: RandomPolicy) -> dict[str, Any]:
    """Give the GPU to an engine and take it back: seconds, and whether every bit came back."""
    policy = made.policy
    before = policy.state_digest()
    began = time.perf_counter()
    policy.offload()
    middle = time.perf_counter()
    left = _memory(policy.settings.device)["allocated_bytes"]
    policy.onload()
    _synchronize(policy.settings.device)
    return {
        "offload_seconds": middle - began,
        "onload_seconds": time.perf_counter() - middle,
        "left_bytes": left,
        "equal": policy.state_digest() == before,
    }


def _ratios(results: dict[str, Any]) -> dict[str, Any]:
    speed = {name: found.get("unique_tokens_per_second") for name, found in results.items()}
    shared = speed.get("shared")
    return {f"shared_vs_{name}": shared / speed[name] for name in ("packed", "padded") if shared and speed.get(name)}


# ---- the device


def _memory(device: str) -> dict[str, Any]:
    import torch

    if device != "cuda":
        return {"peak_bytes": None, "allocated_bytes": None}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "allocated_bytes": torch.cuda.memory_allocated()}


def _reset_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """A group of this process alone, over the loopback interface."""
    from argusrl.policy import group

    _meet_older_torch()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store = group.host_store()
    group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="benchmark", device=device)
    try:
        yield
    finally:
        group.disconnect()


def _meet_older_torch() -> None:
    """Before torch 2.13 two collectives had other names, and the flash call took heads in groups without being told."""
    import torch.distributed as dist
    from torch.nn.attention import varlen

    names = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
    for new, old in names.items():
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))
    call = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(call).parameters:
        return

    def untold(*inputs: Any, **options: Any) -> Any:
        options.pop("enable_gqa", None)
        return call(*inputs, **options)

    varlen.varlen_attn = untold


def use_wheels(peft: Path | None, folder: Path | None) -> None:
    """Unpack wheels where Python finds them first."""
    wheels = ([peft] if peft else []) + (sorted(folder.glob("*.whl")) if folder else [])
    if wheels:
        site = tempfile.mkdtemp(prefix="wheels-")
        for wheel in wheels:
            zipfile.ZipFile(wheel).extractall(site)
        sys.path.insert(0, site)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peft-wheel", type=Path, help="use peft from this wheel")
    parser.add_argument("--wheels", type=Path, help="use all wheels of this folder")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop starting phases after this long")
    parser.add_argument("--output", type=Path, help="also write the results here after every phase")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model and few rows")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
