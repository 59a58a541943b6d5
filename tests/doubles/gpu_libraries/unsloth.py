# pyright: reportUnknownMemberType=false
"""Loads with Transformers what Unsloth would load; answers in the same form, with attention of its own choice."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForImageTextToText


class FastVisionModel:
    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: torch.dtype | None = None,
        load_in_4bit: bool = True,
        full_finetuning: bool = False,
        device_map: Mapping[str, str] | str = "sequential",
        use_gradient_checkpointing: bool | str = "unsloth",
        use_exact_model_name: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, object]:
        assert os.environ["UNSLOTH_COMPILE_DISABLE"] == "1"
        assert not load_in_4bit
        assert not use_gradient_checkpointing
        assert use_exact_model_name
        assert max_seq_length == 4096, "the positions of the tiny model"
        model = AutoModelForImageTextToText.from_pretrained(
            model_name, dtype=dtype, device_map=device_map, attn_implementation="sdpa", **kwargs
        )
        return model, object()
