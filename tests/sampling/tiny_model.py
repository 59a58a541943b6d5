"""A tiny random Qwen3-VL on disk, with tokenizer, preprocessor settings and chat template, and adapters for it."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY_SIZE = 1024
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "You operate a phone. Answer with one tool call. The screen is 1000 wide and 1000 high.",
    '{"type": "function", "function": {"name": "click", "description": "Tap at a point", "parameters": '
    '{"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}}}',
    'Open the settings app and switch the wireless network off, then report. {"name": "click", "arguments": ',
]
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def build_model_folder(folder: Path, chat_template: str, *, seed: int = 0) -> Path:
    """Write model, tokenizer, preprocessor settings and chat template to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    _write_settings(folder, chat_template)
    model = _build_model(ids, seed)
    model.save_pretrained(folder)
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def build_adapter(model_folder: Path, folder: Path, *, scale: float, seed: int = 1, rank: int = 8) -> Path:
    """Write a LoRA adapter whose B matrices are random of standard deviation `scale` (0 changes nothing)."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_folder)
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, scale)
    peft_model.save_pretrained(folder)
    return folder


def rename_adapter_keys(source: Path, folder: Path) -> Path:
    """Copy an adapter with module names that the model server does not know: its keys match nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {name.replace("language_model.layers", "text_tower.blocks"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    return folder


def _build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens(MARKS)
    return tokenizer


def _write_settings(folder: Path, chat_template: str) -> None:
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL_TOKENS,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    pixels = {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = pixels | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 1024, "longest_edge": 1048576},
    }
    video = pixels | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
    (folder / "chat_template.jinja").write_text(chat_template)


def _build_model(ids: dict[str, int], seed: int) -> Qwen3VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=True,
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": VOCABULARY_SIZE,
            "max_position_embeddings": 8192,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 3,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 1024,
            "out_hidden_size": 128,
        },
    )
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(config).eval()
