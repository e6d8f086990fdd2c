"""Tiny vision-language models of many families, with tokenizer and processor: real Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import _byte_level

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<image>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<boi>", "<eoi>", "<soft>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|image|>", "<|video|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
]
VOCABULARY = 320
ID = {token: 256 + number for number, token in enumerate(SPECIAL)}
# family -> what a template writes for an image
WRITES = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "llava": "<image>\n",
    "internvl": "<IMG_CONTEXT>\n",
    "gemma3": "<boi>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
}
# Names under which processors ask their tokenizer for special tokens.
NAMED = {
    "gemma3": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    | {"video_token": "<video>"},
}
FAMILIES = tuple(WRITES)


def template(family: str) -> str:
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '"
        + WRITES[family].replace("\n", "\\n")
        + "' }}{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def tokenizer(family: str) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_str(_byte_level(tuple(SPECIAL)))
    if family == "gemma3":  # vLLM asks its tokenizer for these
        made.add_tokens(["\n" * count for count in range(1, 5)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", extra_special_tokens=NAMED.get(family, {})
    )
    fast.chat_template = template(family)
    return fast


def configuration(family: str, hidden: int = 32, heads: int = 4) -> Any:
    """A model of two layers. Its images are cut into patches of 4 pixels, and 2 x 2 of these make a token."""
    from transformers import AutoConfig

    third = hidden // heads // 6
    sections = [hidden // heads // 2 - 2 * third, third, third]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": hidden // heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False, "eos_token_id": ID["<|im_end|>"], "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    grid: dict[str, Any] = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": hidden,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    ids: dict[str, Any] = {"image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"]}
    ids |= {"vision_start_token_id": ID["<|vision_start|>"], "vision_end_token_id": ID["<|vision_end|>"]}
    mrope = {"rope_parameters": rope, "rope_scaling": rope}
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
        return AutoConfig.for_model(family, text_config=text | mrope, vision_config=vision, **ids)
    if family == "qwen2_5_vl":
        vision = grid | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        return AutoConfig.for_model(family, text_config=text | mrope, vision_config=vision, **ids)
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        vision = grid | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        rope |= {"mrope_interleaved": True}
        text |= mrope
        if family == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            text |= {"norm_topk_prob": True}  # as in files of the hub; vLLM reads it
        return AutoConfig.for_model(family, text_config=text, vision_config=vision, **ids)
    if family == "glm4v":
        text["rope_parameters"] = rope | {"partial_rotary_factor": 1.0}
        text["attention_bias"] = True  # as in files of the hub: its layers have a bias in any case, and vLLM asks here
        ids = {"image_token_id": ID["<|image|>"], "video_token_id": ID["<|video|>"]}
        for kind in ("image", "video"):
            ids |= {
                f"{kind}_{end}_token_id": ID[f"<|{name}_of_{kind}|>"]
                for end, name in (("start", "begin"), ("end", "end"))
            }
        return AutoConfig.for_model(family, text_config=text, vision_config=grid | {"image_size": 32}, **ids)
    if family == "llava":
        return AutoConfig.for_model(
            family, text_config={"model_type": "llama", **text}, image_token_id=ID["<image>"], image_seq_length=16,
            vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **tower}, vision_feature_layer=-1,
        )  # fmt: skip
    if family == "internvl":
        sizes = {"image_size": [16, 16], "patch_size": [4, 4]}
        return AutoConfig.for_model(
            family, text_config={"model_type": "qwen2", **text}, image_token_id=ID["<IMG_CONTEXT>"],
            vision_config={"model_type": "internvl_vision", **tower, **sizes}, downsample_ratio=0.5,
        )  # fmt: skip
    if family == "gemma3":
        return AutoConfig.for_model(
            family, text_config=text | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config={"model_type": "siglip_vision_model", **tower}, mm_tokens_per_image=4,
            image_token_index=ID["<soft>"], boi_token_index=ID["<boi>"], eoi_token_index=ID["<eoi>"],
        )  # fmt: skip
    return AutoConfig.for_model(
        family, text_config={"model_type": "llama", **text}, vision_config=tower, image_token_id=ID["<image>"],
        scale_factor=2,
    )  # fmt: skip


def processor_files(family: str) -> dict[str, dict[str, Any]]:
    """The contents of preprocessor_config.json and processor_config.json."""
    square = {"height": 16, "width": 16}
    if family.startswith(("qwen", "glm")):
        kind = "Glm4vImageProcessor" if family == "glm4v" else "Qwen2VLImageProcessor"
        size = {"shortest_edge": 64, "longest_edge": 4096}
        if family == "glm4v":
            size = {"shortest_edge": 128, "longest_edge": 8192}
        return {"preprocessor_config.json": {"image_processor_type": kind, "patch_size": 4, "merge_size": 2}
                | {"temporal_patch_size": 2, "size": size}}  # fmt: skip
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "llava": (
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": square},
            {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        "internvl": (
            {"image_processor_type": "GotOcr2ImageProcessor", "size": square, "max_patches": 4, "min_patches": 1},
            {"image_seq_length": 4},
        ),
        "gemma3": ({"image_processor_type": "Gemma3ImageProcessor", "size": square}, {"image_seq_length": 4}),
    }
    tiles = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    kinds["idefics3"] = ({"image_processor_type": "Idefics3ImageProcessor", **tiles}, {"image_seq_len": 4})
    kinds["smolvlm"] = ({"image_processor_type": "SmolVLMImageProcessor", **tiles}, {"image_seq_len": 4})
    image, other = kinds[family]
    return {"preprocessor_config.json": image, "processor_config.json": other}


def vision_model_dir(
    path: Path, family: str = "qwen2_5_vl", seed: int = 0, *, weights: bool = True, **shape: int
) -> Path:
    """Write a random model of ``family``, far from uniform, with tokenizer and processor, as on the hub."""
    from transformers import AutoModelForImageTextToText
    from transformers.conversion_mapping import get_model_conversion_mapping

    from coalign.backends.pretrained import _save_model

    path.mkdir(parents=True, exist_ok=True)
    tokenizer(family).save_pretrained(path)
    config = configuration(family, **shape)
    config.save_pretrained(path)
    for name, content in processor_files(family).items():
        (path / name).write_text(json.dumps(content))
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.12)
        # Names with all prefixes, such as `vision_model.`; transformers leaves them out where it has loaded nothing.
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        _save_model(model, path)
    return path


def picture(path: Path, size: tuple[int, int] = (24, 16), seed: int = 0) -> Path:
    """Write an image of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")
    return path


def let_see(config: dict[str, Any], directory: Path) -> None:
    """Change the settings of a run of `tests.runs` to a model that sees and rows of which two thirds have an image.

    Model and rows are made in ``directory``, once.
    """
    model, rows = directory / "seeing", directory / "pictures.jsonl"
    if not model.exists():
        vision_model_dir(model)
        lines = []
        for number in range(12):
            row: dict[str, Any] = {"prompt": f"What is {number}?", "answer": str(number)}
            row |= {"chosen": str(number), "rejected": "no"}
            if number % 3:
                picture(directory / f"{number}.png", (24 + 8 * (number % 3), 16), number)
                row |= {"images": [f"{number}.png"]}
            lines.append(json.dumps(row))
        rows.write_text("\n".join(lines))
    config["data"] = {"train": str(rows), "images": {}}
    for own in config["models"].values():
        own |= {"load": str(model)} if "load" in own else {}
