"""The tiny model that ships with the package."""

from pathlib import Path

TINY_QWEN3_VL = Path(__file__).parent / "tiny_qwen3_vl"
"""A trained Qwen3-VL model folder of two million parameters, made with `scripts.tiny_models.make_tiny_model`."""
