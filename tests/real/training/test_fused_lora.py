"""The fused LoRA layer against the plain formula in float64, and what it keeps for the backward pass."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from cua_rl.training.layers import FusedLoraLinear

RANK, ALPHA = 4, 8
NUM_ROWS, WIDTH_IN, WIDTH_OUT = 48, 64, 96


def make_layer(layer_class: type[PeftLinear]) -> Any:
    """A frozen linear layer in bfloat16 with a random adapter in float32; the same numbers for every class."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"])
    config._register_custom_module({nn.Linear: layer_class})
    layer: Any = get_peft_model(nn.Sequential(nn.Linear(WIDTH_IN, WIDTH_OUT).bfloat16()), config).base_model.model[0]
    assert isinstance(layer, layer_class)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    return layer


def run(layer: Any, x: Tensor, upstream: Tensor) -> tuple[list[Tensor], bool]:
    """Output and gradients of x, A and B under autocast; and whether copies of x are kept for the backward pass."""
    saved: list[Tensor] = []
    x = x.clone().requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    output.backward(upstream)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == a.grad.dtype == torch.float32
    assert x.grad is not None
    copies = [tensor for tensor in saved if tensor.shape == x.shape and tensor.data_ptr() != x.data_ptr()]
    return [output.detach(), x.grad, a.grad, b.grad], bool(copies)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUM_ROWS, WIDTH_IN).bfloat16(), torch.randn(NUM_ROWS, WIDTH_OUT).bfloat16()


def test_in_bfloat16_it_is_at_least_as_exact_as_peft(inputs: tuple[Tensor, Tensor]) -> None:
    x, upstream = inputs
    fused, peft = make_layer(FusedLoraLinear), make_layer(PeftLinear)
    base = fused.get_base_layer()
    a, b = (part["default"].weight.detach().double().requires_grad_() for part in (fused.lora_A, fused.lora_B))
    exact_x = x.double().requires_grad_()
    output = exact_x @ base.weight.double().T + base.bias.double() + exact_x @ a.T @ b.T * (ALPHA / RANK)
    output.backward(upstream.double())
    exact = [output.detach(), *(leaf.grad for leaf in (exact_x, a, b) if leaf.grad is not None)]

    for mine, theirs, right in zip(run(fused, x, upstream)[0], run(peft, x, upstream)[0], exact, strict=True):
        error, of_peft = ((found.double() - right).norm() / right.norm() for found in (mine, theirs))
        assert error < 1.1 * of_peft
        assert error < 2**-8  # the spacing of bfloat16


def test_in_bfloat16_it_keeps_no_copy_of_its_input(inputs: tuple[Tensor, Tensor]) -> None:
    assert not run(make_layer(FusedLoraLinear), *inputs)[1]
    assert run(make_layer(PeftLinear), *inputs)[1]


def test_a_rank_without_rows_has_a_gradient_of_zeros() -> None:
    layer = make_layer(FusedLoraLinear)

    (output, of_x, of_a, of_b), _ = run(layer, torch.zeros(1, 0, WIDTH_IN), torch.zeros(1, 0, WIDTH_OUT))

    assert output.shape == (1, 0, WIDTH_OUT)
    assert of_x.shape == (1, 0, WIDTH_IN)
    assert not of_a.any()
    assert not of_b.any()
