"""A tiny random Qwen3-VL on disk, with tokenizer, preprocessor settings and chat template, and adapters for it."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.renderers.model_folders import build_small_folder

LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def build_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a model folder that vLLM and transformers can load."""
    build_small_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(_config(tokenizer))
    model.save_pretrained(folder)
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "temperature": 0.3, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))  # its sampling settings must not matter
    return folder


VISION_TARGETS = r".*visual\.(blocks\.\d+\.attn\.(qkv|proj)|merger\.linear_fc[12])"


def build_adapter(
    model_folder: Path, folder: Path, *, scale: float, seed: int = 1, rank: int = 8, targets: str = LORA_TARGETS
) -> Path:
    """Write a LoRA adapter whose B matrices are random of standard deviation `scale` (0 changes nothing)."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_folder)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, scale)
    adapted.save_pretrained(folder)
    return folder


def rename_adapter_keys(source: Path, folder: Path) -> Path:
    """Copy an adapter under module names that the model does not have: its keys match nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {name.replace("language_model.layers", "text_tower.blocks"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    return folder


def adapter_logprobs(model_folder: Path, adapter: Path | None, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Transformers' log-probability of each token of a text after those before it; 0 for the first."""
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    if adapter is not None:
        model.load_adapter(str(adapter))
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return (0.0, *logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())


def _config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return Qwen3VLConfig(
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        tie_word_embeddings=True,
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": tokenizer.get_vocab_size() + 32,  # padded, as the vocabularies of real models are
            "max_position_embeddings": 8192,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
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
