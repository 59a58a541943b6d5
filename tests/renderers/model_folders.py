"""Model folders without weights: what a renderer and Transformers' processor need, and nothing else."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cua_rl.renderers.qwen3_vl import CHAT_TEMPLATE_PATH

THINKING_TEMPLATE = Path(__file__).parent / "published" / "thinking_chat_template.jinja"
QWEN2_5_TEMPLATE = Path(__file__).parent / "published" / "qwen2_5_vl_chat_template.jinja"
QWEN3_5_TEMPLATE = Path(__file__).parent / "published" / "qwen3_5_chat_template.jinja"
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
SMALL_RANGE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
REAL_RANGE = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "You may call one or more functions to assist with the user query. Open the settings app, then type hello world.",
    '{"type": "function", "function": {"name": "click", "parameters": {"type": "object", "properties": {}}}}',
    "<|im_start|>system user assistant\n\n 0 1 2 3 4 5 6 7 8 9 10 100 1000",
]


def build_small_folder(folder: Path) -> Path:
    """A folder with a small BPE vocabulary and Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        )
    )
    write_settings(folder, SMALL_RANGE)
    return folder


def write_settings(folder: Path, size: Mapping[str, int]) -> None:
    """Everything but the tokenizer."""
    pixels = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": dict(size)}
    pixels |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image = {**pixels, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    video = {**pixels, "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE_PATH.read_text(encoding="utf-8"))


def build_qwen3_5_folder(source: Path, folder: Path) -> Path:
    """The folder in `source` as one of Qwen3.5, whose images are prepared as Qwen3-VL's."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    (folder / "chat_template.jinja").write_text(QWEN3_5_TEMPLATE.read_text(encoding="utf-8"))
    return folder


def build_qwen2_5_folder(source: Path, folder: Path) -> Path:
    """The folder in `source` as one of Qwen2.5-VL: patches of 14 pixels, settings as it is published with."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    pixels = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 784, "max_pixels": 65536}
    # without them, vLLM and Transformers have defaults of their own
    pixels |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    image = {**pixels, "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    video = {**pixels, "video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "chat_template.jinja").write_text(QWEN2_5_TEMPLATE.read_text(encoding="utf-8"))
    return folder
