# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Peak memory of one training step of our trainer at the real shapes of models, without holding any of it.

    .venv/bin/python -m benchmarks.trainer_peaks MODEL_FOLDER... [--tokens 4096 16384]
    .venv/bin/python -m benchmarks.trainer_peaks MODEL_FOLDER... --recomputed --sharding full --processes 2

What it prints for the folders of tests/machine/model_configs is tests/machine/trainer_peaks.jsonl. With --sharding, a
process is one of several that hold the layers together (full), or main memory holds them (offload). Peaks are then
measured with 4, 8 and 12 layers, which lie on a line, and the whole model's follows from it.
The trainer's own model code runs on fake tensors, which have shapes and no data, and a dispatch mode adds up the
storages that are alive. One row of text and screenshots, forward, backward, and the optimizer's moments; one JSON line
each. What differs on a GPU: its allocator rounds up and fragments, and libraries take work space.
"""

import argparse
import json
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.claims import require
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.training.batching import MicroBatch
from cua_rl.training.config import Sharding, TrainerConfig
from cua_rl.training.layers import PACKED_ATTENTION, StreamedLinear, stream_frozen_weights
from cua_rl.training.model import PolicyModel
from cua_rl.training.prefixes import PackedSequence
from cua_rl.training.ranks import Place, shard_weights

aten = torch.ops.aten
FEW_LAYERS = (4, 8, 12)
SCREEN_TOKENS, ANSWER_TOKENS = 2040, 100  # a 1080x1920 screenshot and the answer to it


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still referenced, now and at most.

    Of a fake GPU there are none: it stands for main memory, as the CPU stands for the GPU.
    """

    def __init__(self, ignored_shape: tuple[int, ...], num_image_tokens: int) -> None:
        super().__init__()
        self._num_image_tokens = num_image_tokens
        self.now = self.peak = 0
        self._sizes = weakref.WeakKeyDictionary[Any, list[int]]()
        self._ignored_shape = ignored_shape
        self._resize: Any = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # as FSDP frees a layer
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.index.Tensor, aten.index_put_.default):  # a mask without data selects an unknown number
            args = (args[0], self._as_positions(args[1]), *args[2:])
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        if storage in self._sizes or tensor.device.type == "cuda":
            return
        # CPUs compute the head in a float32 copy of its weights, GPUs do not
        is_cpu_only = tensor.dtype == torch.float32 and tuple(tensor.shape) == self._ignored_shape
        size = self._sizes[storage] = [0]
        weakref.finalize(storage, self._grow, size, 0)
        self._grow(size, 0 if is_cpu_only else storage.nbytes())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count what shares this tensor's storage."""
        self._sizes[tensor.untyped_storage()] = [0]

    def _as_positions(self, indices: list[Any]) -> list[Any]:
        """The index with positions in place of the mask of image tokens [1, seq]."""
        if indices[0] is None or indices[0].dtype != torch.bool:
            return indices
        return [torch.zeros(self._num_image_tokens, dtype=torch.long) for _ in range(2)] + indices[1:]

    def _resized(self, storage: Any, num_bytes: int) -> Any:
        if storage in self._sizes:
            self._grow(self._sizes[storage], num_bytes)
        return self._resize(storage, num_bytes)

    def _grow(self, size: list[int], num_bytes: int) -> None:
        self.now += num_bytes - size[0]
        size[0] = num_bytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(MicroBatch):
    """A packed row whose tokens are counted instead of looked up, because fake tensors have no values."""

    def predictors(self, start: int = 0, end: int | None = None) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(len(self.targets), dtype=torch.long),)

    def num_image_tokens(self, end: int) -> int:
        return SCREEN_TOKENS * len(self.image_hashes) if end else 0

    def num_predicted(self, end: int) -> int:
        return len(self.targets) if end else 0


class ShapesOnly(PolicyModel):
    """The trained model made from its configuration, with no weights to load."""

    def __init__(self, config: TrainerConfig, num_layers: int | None) -> None:
        self._num_layers = num_layers
        super().__init__(config)

    def _load_base(self) -> Any:
        config = AutoConfig.from_pretrained(self._config.model_path, local_files_only=True)
        if self._num_layers is not None:
            text = config.text_config
            text.num_hidden_layers = self._num_layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[: self._num_layers]
        is_mixture = config.model_type.endswith("_moe")
        options: dict[str, Any] = {"experts_implementation": "grouped_mm"} if is_mixture else {}
        attention = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
        with torch.device("meta"):
            base: Any = AutoModelForImageTextToText.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention, **options
            )
        base.to = lambda *_, **__: base  # there is nothing to move
        return base

    def use_fake_weights(self) -> None:
        """Replace what is on the meta device; to be called in a fake mode."""
        fakes = dict[Any, Any]()
        for module in self.base.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor not in fakes:  # embedding and head may be one
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        fakes[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    held[name] = None if tensor is None else fakes[tensor]

    @property
    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Those that have taken the place of the adapter's."""
        return [parameter for parameter in self.base.parameters() if parameter.requires_grad]

    def share_out(self, sharding: Sharding, place: Place) -> None:
        """As the trainer does when it loads weights."""
        if sharding == "full":
            shard_weights(self.base, self.device, place, is_hybrid=False, computes_in=torch.bfloat16)
        elif sharding == "offload":
            stream_frozen_weights(self.base)
            for module in self.base.modules():
                if isinstance(module, StreamedLinear):
                    held = torch.empty_like(module.weight, device="cuda")
                    module.weight = torch.nn.Parameter(held, requires_grad=False)


@contextmanager
def fake_processes(number: int) -> Generator[Place]:
    """The place of the first of several processes that say nothing to each other, which shapes do not need."""
    if number == 1:
        yield Place()
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)

    def make_mesh(*sizes: Any, **names: Any) -> Any:
        with unset_fake_temporarily():  # it consists of numbers
            return init_device_mesh(*sizes, **names)

    with patch("cua_rl.training.ranks.init_device_mesh", make_mesh):
        yield Place(rank=0, size=number, local_rank=0, local_size=number)
    torch.distributed.destroy_process_group()


def measure(
    folder: Path,
    num_tokens: int,
    *,
    recomputes: bool,
    rank: int,
    keeps_attention: bool = False,
    sharding: Sharding = "replicated",
    num_processes: int = 1,
    num_layers: int | None = None,
) -> dict[str, Any]:
    """One step over one row of `num_tokens`, full of turns."""
    num_turns = num_tokens // (SCREEN_TOKENS + ANSWER_TOKENS)
    config = TrainerConfig(
        model_path=folder,
        dtype="bfloat16",
        lora_rank=rank,
        gradient_checkpointing=recomputes,
        keeps_attention=keeps_attention,
    )
    model = ShapesOnly(config, num_layers)
    with fake_processes(num_processes) as place, FakeTensorMode():
        model.use_fake_weights()
        model.share_out(sharding, place)
        text, vision = model.base.config.text_config, model.base.config.vision_config
        live = LiveBytes((text.vocab_size, text.hidden_size), num_turns * SCREEN_TOKENS)
        for held in [*model.base.parameters(), *model.base.buffers()]:
            live.add(held)
        weights = live.now
        trained = sum(parameter.nbytes for parameter in model.trainable_parameters)
        row = make_row(num_tokens, num_turns)
        levels = 1 + len(vision.to_dict().get("deepstack_visual_indexes", ()))
        features = {
            name: torch.empty(levels, SCREEN_TOKENS, text.hidden_size, dtype=torch.bfloat16)
            for name in row.image_hashes
        }
        for one in features.values():
            live.leave_out(one)  # the trainer has them in main memory
        with live:
            moments = [torch.zeros_like(trained) for trained in model.trainable_parameters for _ in range(2)]
            scores = model.scores(row, features, 1.0)
            saved = live.now
            scores.logprobs.sum().backward()
        parameters = model.trainable_parameters
        require(
            "a step's memory",
            trained_tokens=(num_turns * ANSWER_TOKENS, len(scores.logprobs)),
            parameters_with_a_gradient=(len(parameters), sum(one.grad is not None for one in parameters)),
        )
        del moments
    gib = {"weights": weights - trained, "adapter": trained, "saved": saved, "peak": live.peak}
    settings = {"model": folder.name, "num_tokens": num_tokens, "recomputes": recomputes}
    settings |= {"keeps_attention": keeps_attention, "lora_rank": rank}
    if sharding != "replicated":
        settings |= {"sharding": sharding, "num_processes": num_processes}
    return settings | {f"{name}_gib": round(size / 2**30, 3) for name, size in gib.items()}


def extrapolate(folder: Path, num_tokens: int, **options: Any) -> dict[str, Any]:
    """What `measure` finds with all layers, from the line through fewer.

    Raises:
        ValueError: three points are not on a line.
    """
    few, more, most = (measure(folder, num_tokens, num_layers=number, **options) for number in FEW_LAYERS)
    num_layers = load_model_sizes(folder).num_layers
    for name in ("weights_gib", "adapter_gib", "saved_gib", "peak_gib"):
        of_layer = (more[name] - few[name]) / (FEW_LAYERS[1] - FEW_LAYERS[0])
        if abs(few[name] + (FEW_LAYERS[2] - FEW_LAYERS[0]) * of_layer - most[name]) > 0.005 * most[name] + 0.002:
            raise ValueError(f"expected {name} to grow by as much with every layer, got {few}, {more}, {most}")
        slope = (most[name] - few[name]) / (FEW_LAYERS[2] - FEW_LAYERS[0])
        few[name] = round(few[name] + (num_layers - FEW_LAYERS[0]) * slope, 3)
    return few


def make_row(num_tokens: int, num_turns: int) -> Row:
    """A rollout of screenshots and answers; only shapes matter."""
    num_trained = num_turns * ANSWER_TOKENS
    nothing = torch.zeros(num_trained)
    return Row(
        sequences=(PackedSequence(index=0),),
        lengths=(num_tokens,),
        input_ids=torch.zeros(1, num_tokens, dtype=torch.long),
        position_ids=torch.zeros(3, 1, num_tokens, dtype=torch.long),
        is_image=torch.zeros(1, num_tokens, dtype=torch.bool),
        image_hashes=tuple(str(index) for index in range(num_turns)),
        targets=nothing.long(),
        target_positions=nothing.long(),
        turn_ids=nothing.long(),
        sampling_logprobs=nothing,
        advantages=nothing,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--ranks", nargs="+", type=int, default=[32])
    parser.add_argument("--recomputed", action="store_true", help="do not measure kept activations")
    parser.add_argument(
        "--sharding", choices=["replicated", "full", "offload"], help="of a model whose layers are alike"
    )
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    for folder in arguments.folders:
        for rank in arguments.ranks:
            for num_tokens in arguments.tokens:
                ways = ((False, False), (True, False), (True, True))
                for recomputes, keeps_attention in ways[1:] if arguments.recomputed else ways:
                    options: dict[str, Any] = {"recomputes": recomputes, "keeps_attention": keeps_attention}
                    options["rank"] = rank
                    if arguments.sharding is None:
                        found = measure(folder, num_tokens, **options)
                    else:
                        options |= {"sharding": arguments.sharding, "num_processes": arguments.processes}
                        found = extrapolate(folder, num_tokens, **options)
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
