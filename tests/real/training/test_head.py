# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The language-model head in chunks against the plain computation."""

import math

import pytest
import torch

from cua_rl.training import head
from tests.rounding import assert_equal_but_for_rounding

NUM_ROUNDINGS = 8 + 50 + 50 + 11
"""Products of 8 terms, a softmax over 50, gradients that add up 50 rows or 11 tokens."""


@pytest.mark.parametrize("trained", [False, True])
def test_chunked_logprobs_and_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    monkeypatch.setattr(head, "_MAX_LOGITS", 3 * 50)  # 3 rows at a time, the last chunk shorter
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=trained)
    targets, factors = torch.randint(50, (11,)), torch.randn(11)
    inputs = (hidden, weight) if trained else (hidden,)

    logprobs, entropies = head.token_scores(hidden, weight, targets, 0.7)
    found = torch.autograd.grad((logprobs * factors).sum(), inputs)

    distributions = (hidden @ weight.T / 0.7).log_softmax(1)
    plain = distributions[torch.arange(11), targets]
    assert_equal_but_for_rounding(logprobs.detach(), plain.detach(), NUM_ROUNDINGS)
    assert_equal_but_for_rounding(entropies, -(distributions.exp() * distributions).sum(1).detach(), NUM_ROUNDINGS)
    assert not entropies.requires_grad
    for one, other in zip(found, torch.autograd.grad((plain * factors).sum(), inputs), strict=True):
        assert_equal_but_for_rounding(one, other, NUM_ROUNDINGS)


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.98, 0.99, 0.999, 0.9999])
def test_a_nearly_certain_token_keeps_its_gradient_in_bfloat16(probability: float) -> None:
    """bfloat16 is exact to 1/256: the difference of two rounded rows is noise where it is smaller than that."""
    torch.manual_seed(0)
    matrix, targets = torch.randn(1_000, 64).bfloat16(), torch.arange(20)
    others = torch.randn(20, 1_000).scatter(1, targets[:, None], -torch.inf).softmax(1)
    probabilities = (others * (1 - probability)).scatter(1, targets[:, None], probability)

    expected = (torch.eye(1_000, dtype=torch.float64)[targets] - probabilities.double()) @ matrix.double()
    found = head.gradient_directions(probabilities, matrix, targets).double()

    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 0.01, errors


@pytest.mark.parametrize("probability", [0.5, 0.98, 0.9999])
def test_the_gradient_of_a_bfloat16_head_is_that_of_the_plain_one_in_float64(probability: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 64), torch.randn(1_000, 64) / 8
    rest = (hidden @ weight[1:].T).logsumexp(1)
    weight[0] = hidden[0] * (rest + math.log(probability / (1 - probability))) / hidden.norm() ** 2
    hidden, weight = hidden.bfloat16().to(device).requires_grad_(), weight.bfloat16().to(device)
    exact = hidden.detach().double().requires_grad_()
    target = torch.zeros(1, dtype=torch.long, device=device)

    (found,) = torch.autograd.grad(head.token_scores(hidden, weight, target, 1.0).logprobs.sum(), hidden)
    (expected,) = torch.autograd.grad((exact @ weight.double().T).log_softmax(1)[0, 0], exact)

    assert (found.double() - expected).norm() < 0.01 * expected.norm()
