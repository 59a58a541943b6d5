# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The language-model head in chunks against the plain computation."""

import math

import pytest
import torch

from cua_rl.training import head
from cua_rl.training.grammars import AllowedTokens
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


def restrict(num_tokens: int, vocabulary: int, targets: torch.Tensor) -> tuple[AllowedTokens, torch.Tensor]:
    """Random tokens allowed beside the targets, all for every third one, and for token 1 nothing else; and which."""
    is_allowed = (torch.rand(num_tokens, vocabulary) < 0.3).scatter_(1, targets[:, None], True)
    is_allowed[::3] = True
    is_allowed[1] = torch.arange(vocabulary) == targets[1]
    masks, rows = (
        [torch.full((-(-vocabulary // 32),), -1, dtype=torch.int32)],
        torch.zeros(num_tokens, dtype=torch.long),
    )
    for place in (place for place in range(num_tokens) if place % 3):
        rows[place] = len(masks)
        words = [0] * len(masks[0])
        for token in is_allowed[place].nonzero()[:, 0].tolist():
            words[token // 32] |= 1 << token % 32
        masks.append(torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32))
    return AllowedTokens(rows, torch.stack(masks)), is_allowed


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_softmax_over_allowed_tokens_has_its_closed_form_gradient(
    monkeypatch: pytest.MonkeyPatch, trained: bool, temperature: float
) -> None:
    """d log p(target) / d hidden: (w_target - sum of p w over allowed tokens) / temperature; 0 for a sure token."""
    monkeypatch.setattr(head, "_MAX_LOGITS", 3 * 50)
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=trained)
    targets = torch.randint(50, (11,))
    allowed, is_allowed = restrict(11, 50, targets)

    logprobs, entropies = head.token_scores(hidden, weight, targets, temperature, allowed)
    (found,) = torch.autograd.grad(logprobs.sum(), hidden)

    rows, matrix = hidden.detach().double(), weight.detach().double()
    odds = (rows @ matrix.T / temperature).exp() * is_allowed
    probabilities = odds / odds.sum(1, keepdim=True)
    expected = probabilities.gather(1, targets[:, None])[:, 0].log()
    assert_equal_but_for_rounding(logprobs.detach(), expected.float(), NUM_ROUNDINGS)
    entropy = -torch.special.xlogy(probabilities, probabilities).sum(1)
    assert_equal_but_for_rounding(entropies, entropy.float(), NUM_ROUNDINGS)
    gradient = (matrix[targets] - probabilities @ matrix) / temperature
    assert_equal_but_for_rounding(found, gradient.float(), NUM_ROUNDINGS)
    assert (logprobs[1], entropies[1], found[1].abs().max()) == (0.0, 0.0, 0.0)
    unrestricted = head.token_scores(hidden, weight, targets, temperature).logprobs.detach()
    assert torch.equal(logprobs[::3].detach(), unrestricted[::3])
    assert (logprobs.detach() - unrestricted)[2] > 0.1


def test_the_gradient_of_a_trained_head_leaves_forbidden_tokens_alone() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(1, 8), torch.randn(50, 8, requires_grad=True), torch.tensor([7])
    mask = torch.tensor([[-1, -1], [1 << 7 | 1 << 9, 1 << 3]], dtype=torch.int32)  # tokens 7, 9 and 35

    scores = head.token_scores(hidden, weight, targets, 1.0, AllowedTokens(torch.tensor([1]), mask))
    (found,) = torch.autograd.grad(scores.logprobs.sum(), weight)

    assert found.abs().sum(1).nonzero()[:, 0].tolist() == [7, 9, 35]
    step = 1e-3 * found
    higher = head.token_scores(hidden, (weight + step).detach(), targets, 1.0, AllowedTokens(torch.tensor([1]), mask))
    rise = (higher.logprobs - scores.logprobs).item()
    assert rise == pytest.approx(1e-3 * found.square().sum().item(), rel=0.02)  # a finite difference along it


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
