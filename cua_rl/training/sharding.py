# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A frozen base model spread over the trainer processes: each keeps its share of every layer (PyTorch's FSDP2).

A layer's weights are gathered while it computes and let go after. Adapters stay whole everywhere, so gradients,
optimizer and checkpoints are those of an unsharded model. As gathering takes all processes, each passes through the
model equally often: one that has less to do passes `empty_micro_batch` and blank images.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cua_rl.training.batching import MicroBatch


def shard_frozen_weights(base: Any, device: torch.device, num_ranks: int) -> None:
    """Leave this process its share of decoder layers, vision blocks and mergers, on `device`.

    Embeddings and head stay whole: they are read outside their modules, and often are one tensor.
    """
    mesh = init_device_mesh(device.type, (num_ranks,))
    vision, language = base.model.visual, base.model.language_model
    for tower, layers in (
        (vision, [*vision.blocks, vision.merger, *vision.deepstack_merger_list]),
        (language, list(language.layers)),
    ):
        trained = {parameter for parameter in tower.parameters() if parameter.requires_grad}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=trained)
        # the tower itself holds nothing: as their root it has the next layer gathered while one computes
        fully_shard(
            tower, mesh=mesh, ignored_params={one for one in tower.parameters() if not isinstance(one, DTensor)}
        )


def held_bytes(model: nn.Module) -> int:
    """Memory of the parameters that this process holds."""
    return sum(
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes
        for parameter in model.parameters()
    )


def empty_micro_batch() -> MicroBatch:
    """One token of which nothing is learned."""
    nothing = torch.zeros(0)
    return MicroBatch(
        datum_indices=(),
        lengths=(1,),
        input_ids=torch.zeros(1, 1, dtype=torch.long),
        position_ids=torch.zeros(3, 1, 1, dtype=torch.long),
        is_image=torch.zeros(1, 1, dtype=torch.bool),
        image_hashes=(),
        targets=nothing.long(),
        target_positions=nothing.long(),
        sampling_logprobs=nothing,
        advantages=nothing,
    )
