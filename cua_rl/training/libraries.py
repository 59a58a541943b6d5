# pyright: reportUnknownMemberType=false
"""Optional libraries of the trainer: Unsloth loads the model, liger-kernel computes norms and MLPs.

Does not import torch; the libraries are imported where they are used.
"""

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

from cua_rl.errors import ConfigError
from cua_rl.training.config import Kernels, Loader

_UNSLOTH_REMEDY = (
    "install it where the trainer runs (pip install unsloth; while it needs an older Transformers than this package, "
    "in an environment of its own for recipes.trainer_node, with trainer.address), or set trainer.loader=hf"
)
_LIGER_REMEDY = "install it where the trainer runs (pip install liger-kernel), or set trainer.kernels=torch"


def require_libraries(loader: Loader, kernels: Kernels, *, has_gpu: bool) -> None:
    """Raises `ConfigError` if the chosen libraries are not installed here, or have no GPU to compute on."""
    for setting, package, is_wanted, remedy in (
        ("trainer.loader=unsloth", "unsloth", loader == "unsloth", _UNSLOTH_REMEDY),
        ("trainer.kernels=liger", "liger_kernel", kernels == "liger", _LIGER_REMEDY),
    ):
        if not is_wanted:
            continue
        if find_spec(package) is None:  # looked up, not imported: that takes seconds and changes Transformers
            raise ConfigError(f"{setting}: expected the package {package}, got none; {remedy}")
        if not has_gpu:
            raise ConfigError(
                f"{setting}: expected a GPU, got none; see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES does "
                f"not hide it, or {remedy.rpartition(', or ')[2]}"
            )


def load_with_unsloth(model_path: Path, *, dtype: Any, device: Any, trains_base: bool) -> Any:
    """The base model in 16 or 32 bits, without an adapter.

    Unsloth also rewrites layers. Its attention may not know packed rows, so see that this one does
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


def use_liger_kernels(language_model: Any) -> None:
    """Let liger-kernel compute every RMSNorm and SwiGLU; parameters keep their names.

    Raises:
        ConfigError: the model's norms or MLPs are of another kind.
    """
    liger: Any = import_module("liger_kernel.transformers")
    num_norms = 0
    for module in list(language_model.modules()):
        children = dict(module.named_children())
        if hasattr(module, "variance_epsilon") and not children:
            # in half precision, round before the weight is applied, as Qwen's own norm does; backward not in place,
            # because the residual stream reads the same gradient
            module.offset, module.casting_mode, module.in_place, module.row_mode = 0.0, "llama", False, None
            module.forward = MethodType(liger.LigerRMSNorm.forward, module)
            num_norms += 1
        elif {"gate_proj", "up_proj", "down_proj"} <= children.keys():
            module.forward = MethodType(liger.LigerSwiGLUMLP.forward, module)
    activation = language_model.config.hidden_act
    if activation != "silu" or not num_norms or language_model.config.model_type.startswith("qwen3_5"):
        raise ConfigError(
            f"trainer.kernels: expected a model with RMSNorm and SwiGLU as Qwen3-VL has them, got "
            f"{language_model.config.model_type} with {activation}; set trainer.kernels=torch"
        )
