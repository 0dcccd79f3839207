"""The tiny Qwen3-VL before any training: tokenizer, chat template, processor and randomly initialised weights."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

PATCH = 16  # pixels
MERGE = 2  # patches a side that become one token
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2
IMAGE_PAD = "<|image_pad|>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_PAD,
    "<|video_pad|>",
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<action>", "</action>")
VOCABULARY = 448  # 256 bytes, the tokens above, merges learnt from CORPUS, and room up to a multiple of 64

# One message after the other, so that a conversation is the concatenation of its messages.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
CORPUS = (
    *(f"how many {colour} shapes are there? where is the {colour} shape?" for colour in _COLOURS),
    *(f"row {row} column {column}" for row in range(10) for column in range(10)),
    "Which digit is this? what is shown in the picture? which one is larger?",
    "circle square triangle circles squares triangles colour shape digit number",
    *("reach the goal. move up down left right", "up", "down", "left", "right", "north south east west"),
    *("user\n", "assistant\n", "system\n", "you are a helpful assistant. answer the question about the image."),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text round-trips, Qwen's special tokens and the tags are one id each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=2048,
    )
    fast.add_tokens(list(TAGS))  # not special, as in Qwen3: they stay when a reply is decoded
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_processor(image_mean: tuple[float, float, float], image_std: tuple[float, float, float]) -> Qwen3VLProcessor:
    """Tokenizer and image processor: images become at most 64 tokens, one per 32 x 32 pixels."""
    image_processor = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=list(image_mean),
        image_std=list(image_std),
        size={"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": 64 * PIXELS_PER_TOKEN},
    )
    return Qwen3VLProcessor(
        image_processor=image_processor,
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """Random float32 weights of a 0.83 M parameter Qwen3-VL: 3 text layers, 2 vision layers, DeepStack from both.

    The deviation of the initial weights is 0.1 and the learned position embedding is eight times that: with the usual
    0.02 a model this small spends hundreds of steps before it finds out that the image matters.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 96,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.1,
        },
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        model.model.visual.pos_embed.weight.mul_(8.0)
    return model
