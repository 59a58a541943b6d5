"""The tiny models that ship with the package."""

from pathlib import Path

TINY_QWEN3_VL = Path(__file__).parent / "tiny_qwen3_vl"
"""A trained Qwen3-VL model folder of two million parameters, made with `scripts.tiny_models.make_tiny_model`."""

LADDER_QWEN3_VL = Path(__file__).parent / "ladder_qwen3_vl"
"""One that has imitated an expert on all demo tasks, made with `scripts.tiny_models.make_ladder_model`."""
