import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer

from cua_rl.training.config import TrainerConfig
from cua_rl.training.layers import keep_predictors_only
from cua_rl.training.model import PolicyModel
from cua_rl.types.errors import ConfigError
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS
from tests.rounding import assert_equal_but_for_rounding

LENGTHS = (7, 1, 12)
PREDICTORS = (torch.tensor([2, 5, 6]), torch.tensor([], dtype=torch.long), torch.tensor([0, 11]))
KEPT = torch.tensor([2, 5, 6, 8, 19])


def outputs_and_gradients(model: PolicyModel, outputs: Tensor, inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1.0, 1.0, outputs.numel()).view_as(outputs)
    found = torch.autograd.grad((outputs * weights).sum(), [inputs, *adapter_of_last_layer(model)])
    return [outputs, *found]


def adapter_of_last_layer(model: PolicyModel) -> list[Tensor]:
    layer = model.base.model.language_model.layers[-1]
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def test_the_last_layer_makes_of_predictors_what_transformers_makes_of_all(config: TrainerConfig) -> None:
    model, rng = PolicyModel(config), torch.Generator().manual_seed(0)
    for parameter in adapter_of_last_layer(model):
        parameter.data.normal_(std=0.1, generator=rng)
    language_model = model.base.model.language_model
    layer = language_model.layers[-1]
    hidden = torch.randn(1, sum(LENGTHS), language_model.config.hidden_size, generator=rng).requires_grad_()
    places = torch.cat([torch.arange(length) for length in LENGTHS]).expand(3, 1, -1)
    settings = {"position_embeddings": language_model.rotary_emb(hidden, places), "sequence_lengths": LENGTHS}

    everything = Qwen3VLTextDecoderLayer.forward(layer, hidden, **settings)  # type: ignore[arg-type]
    expected = outputs_and_gradients(model, everything[:, KEPT], hidden)
    found = outputs_and_gradients(model, layer(hidden, predictors=PREDICTORS, **settings), hidden)

    assert len(found) == 2 + 2 * 7  # outputs, gradient to the inputs, A and B of seven maps
    for one, other in zip(found, expected, strict=True):
        assert one.abs().max() > 1e-3
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


def test_a_model_whose_last_layer_gets_visual_features_is_refused(config: TrainerConfig) -> None:
    base = PolicyModel(config).base.model
    del base.language_model.layers[1:]
    base.config.vision_config.deepstack_visual_indexes = [0, 1]
    with pytest.raises(ConfigError, match="expected a model with more decoder layers"):
        keep_predictors_only(base)
