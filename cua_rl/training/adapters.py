# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""The LoRA adapters of the trained models: several in the layers of one frozen base model, of which one is in use."""

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cua_rl.renderers.families import Family
from cua_rl.training import wire
from cua_rl.training.config import LoraSpec
from cua_rl.training.folders import ADAPTER_WEIGHTS
from cua_rl.training.layers import FusedLoraLinear
from cua_rl.training.model_files import ADAPTER_CONFIG_FILE
from cua_rl.types.errors import TrainingError

_FIRST = "default"
"""peft's name for the adapter that is there from the beginning."""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    key: str
    """peft's name for it."""
    spec: LoraSpec
    parameters: list[nn.Parameter]
    reference: list[Tensor] | None = None
    """Frozen weights that KL terms pull towards; None: the base model."""


class Adapters:
    """The adapters by the name of their model; a model begins with the name "". Switching copies nothing."""

    def __init__(self, base: Any, family: Family, spec: LoraSpec) -> None:
        self._base = base
        self._family = family
        with torch.random.fork_rng():
            torch.manual_seed(spec.seed)
            adapted = get_peft_model(base, self._settings(spec), adapter_name=_FIRST)
        assert isinstance(adapted, PeftModel)
        self._peft = adapted
        self._layers: list[Any] = []
        self._in_use = self._found(_FIRST, spec)
        self._by_name = {"": self._in_use}
        self._num_added = 0

    @property
    def spec(self) -> LoraSpec:
        """Of the adapter in use."""
        return self._in_use.spec

    @property
    def has_reference(self) -> bool:
        """Whether the reference model is an adapter instead of the base model."""
        return self._in_use.reference is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the adapter in use, in a fixed order."""
        return self._in_use.parameters

    def count_parameters(self, spec: LoraSpec) -> int:
        """Weights of such an adapter."""
        targets = re.compile(self._targets(spec))
        layers = [layer for name, layer in self._base.named_modules() if targets.fullmatch(name)]
        return sum(spec.rank * (layer.in_features + layer.out_features) for layer in layers)

    def add(self, name: str, spec: LoraSpec) -> None:
        """Add an adapter with fresh weights, as if it were the only one, and use it."""
        self._num_added += 1
        key = f"added_{self._num_added}"
        with torch.random.fork_rng():
            torch.manual_seed(spec.seed)
            self._peft.add_adapter(key, self._settings(spec))
        self._by_name[name] = self._found(key, spec)
        self.use(name)

    def _found(self, key: str, spec: LoraSpec) -> _Adapter:
        """What peft has just made."""
        self._layers = [layer for layer in self._base.modules() if isinstance(layer, LoraLayer)]
        named: Sequence[tuple[str, nn.Parameter]] = list(self._base.named_parameters())
        return _Adapter(key=key, spec=spec, parameters=[one for name, one in named if f".{key}." in name])

    def drop(self, name: str) -> None:
        """Free the weights and gradients of an adapter that is not in use."""
        self._peft.delete_adapter(self._by_name.pop(name).key)

    def use(self, name: str) -> None:
        """From now on, the model is this one."""
        adapter = self._by_name[name]
        for parameter in self._in_use.parameters:
            parameter.requires_grad_(False)
        for parameter in adapter.parameters:
            parameter.requires_grad_(True)
        for layer in self._layers:  # peft's own `set_adapter` does this, but visits every module and adapter
            layer._active_adapter = [adapter.key]
        self._in_use = adapter

    @contextmanager
    def switched_off(self) -> Generator[None]:
        """Inside the block this is the base model."""
        with self._peft.disable_adapter():
            yield

    def load_reference(self, folder: Path) -> None:
        """Keep a frozen copy of an adapter that `save` wrote; the trained weights do not change."""
        with self._restored():
            self.load(folder)
            self._in_use.reference = [parameter.detach().clone() for parameter in self.parameters]

    @contextmanager
    def reference_weights(self) -> Generator[None]:
        """Inside the block this is the reference model: with the adapter of `load_reference`, or without any."""
        if self._in_use.reference is None:
            with self.switched_off():
                yield
            return
        with self._restored():
            _copy(self._in_use.reference, self.parameters)
            yield

    @contextmanager
    def probe_weights(self, probe: wire.Probe) -> Generator[None]:
        """Inside the block the adapter is the probe: the same on every rank, as strong in every layer of its part."""
        key = self._in_use.key
        with self._restored(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.spec.seed)
            for name, layer in self._base.named_modules():
                if isinstance(layer, LoraLayer) and key in layer.lora_A:
                    part = "vision" if name.startswith("model.visual.") else "language"
                    _randomise(layer, key, probe.strength if part == probe.part else 0.0)
            yield

    @contextmanager
    def _restored(self) -> Generator[None]:
        """Restore the trained weights after the block; no autograd graph may need them meanwhile."""
        kept = [parameter.detach().clone() for parameter in self.parameters]
        try:
            yield
        finally:
            _copy(kept, self.parameters)

    def save(self, folder: Path) -> None:
        """Write a peft adapter into an existing folder."""
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in self._state().items()}
        save_file(on_cpu, folder / ADAPTER_WEIGHTS)
        settings = self._peft.peft_config[self._in_use.key].to_dict()
        settings |= {"inference_mode": True, "base_model_name_or_path": None}
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))

    def load(self, folder: Path) -> None:
        """Load what `save` wrote into the adapter in use; raises `TrainingError` if it is not such an adapter."""
        saved = load_file(folder / ADAPTER_WEIGHTS)
        expected = {name: tensor.shape for name, tensor in self._state().items()}
        found = {name: tensor.shape for name, tensor in saved.items()}
        if expected != found:
            name = next(name for name in sorted(expected | found) if expected.get(name) != found.get(name))
            raise TrainingError(
                f"expected {name!r} with shape {expected.get(name)} in {str(folder)!r}, got {found.get(name)}: the "
                "adapter was made for another model, with another rank or other lora_modules"
            )
        set_peft_model_state_dict(self._peft, saved, adapter_name=self._in_use.key)

    def _state(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self._peft, adapter_name=self._in_use.key, save_embedding_layers=False)

    def _targets(self, spec: LoraSpec) -> str:
        return "|".join(self._family.lora_targets[module] for module in spec.modules)

    def _settings(self, spec: LoraSpec) -> PeftLoraConfig:
        settings = PeftLoraConfig(
            r=spec.rank, lora_alpha=spec.alpha, lora_dropout=0.0, target_modules=self._targets(spec), bias="none"
        )
        settings._register_custom_module({nn.Linear: FusedLoraLinear})  # pyright: ignore[reportPrivateUsage]
        return settings


@torch.no_grad()
def _randomise(layer: Any, key: str, strength: float) -> None:
    """Replace an adapter's B so that the update, scaling * B A, has `strength` times the weight's Frobenius norm."""
    a, b = layer.lora_A[key].weight, layer.lora_B[key].weight  # [rank, in], [out, rank]
    weight = layer.get_base_layer().weight
    norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
    if isinstance(norm, DTensor):  # of a sharded model: all ranks compute it together
        norm = norm.full_tensor()
    b.copy_(torch.randn(b.shape, dtype=torch.float32))
    # |B A|^2 = trace(A^T B^T B A), through matrices of [rank, rank]
    update = ((b.T @ b) * (a @ a.T)).sum().sqrt() * abs(layer.scaling[key])
    b.mul_(strength * norm / update)


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
