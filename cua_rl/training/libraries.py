# pyright: reportUnknownMemberType=false
"""Optional requirements of a trainer: Unsloth, which loads the model, and a compiler.

Does not import torch; Unsloth is imported where it is used.
"""

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from cua_rl.training.config import Kernels, Loader
from cua_rl.types.errors import ConfigError

_UNSLOTH_REMEDY = (
    "install it where the trainer runs (pip install unsloth; while it needs an older Transformers than this package, "
    "in a separate environment for the nodes of trainer.num_nodes), or set trainer.loader=hf"
)
_COMPILERS = {True: ("CC", "gcc", "clang"), False: ("CXX", "g++", "clang++")}
"""By whether there is a GPU: a variable that names the compiler, and those that Triton and PyTorch look for."""


def require_libraries(loader: Loader, kernels: Kernels, *, has_gpu: bool) -> None:
    """Raises `ConfigError` if what the settings ask for is not installed here, or has no GPU to compute on."""
    variable, *names = _COMPILERS[has_gpu]
    if kernels == "compiled" and not any(map(which, (os.environ.get(variable) or "", *names))):
        raise ConfigError(
            f"trainer.kernels=compiled: expected a compiler where the trainer runs, got none of {' and '.join(names)}; "
            f"install one (apt-get install g++), name it in {variable}, or set trainer.kernels=torch"
        )
    if loader != "unsloth":
        return
    if find_spec("unsloth") is None:  # looked up, not imported: that takes seconds and changes Transformers
        raise ConfigError(f"trainer.loader=unsloth: expected the package unsloth, got none; {_UNSLOTH_REMEDY}")
    if not has_gpu:
        raise ConfigError(
            "trainer.loader=unsloth: expected a GPU, got none; check that nvidia-smi lists one and "
            "CUDA_VISIBLE_DEVICES does not hide it, or set trainer.loader=hf"
        )


def load_with_unsloth(model_path: Path, *, dtype: Any, device: Any, trains_base: bool) -> Any:
    """The base model in 16 or 32 bits, without an adapter.

    Unsloth also rewrites layers. Its attention may not support packed rows, so check that this one does
    (`layers.require_separate_sequences`).
    """
    os.environ["UNSLOTH_COMPILE_DISABLE"] = "1"  # it would recompile every layer for each row length
    unsloth: Any = import_module("unsloth")
    settings = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    model, _ = unsloth.FastVisionModel.from_pretrained(
        model_name=str(model_path),
        max_seq_length=settings.get("text_config", settings)["max_position_embeddings"],
        dtype=dtype,
        load_in_4bit=False,
        full_finetuning=trains_base,
        device_map={"": str(device)},
        use_gradient_checkpointing=False,  # the trainer switches it on, with Transformers' own
        use_exact_model_name=True,  # never another checkpoint of the same name
        local_files_only=True,
    )
    return model
