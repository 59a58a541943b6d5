"""What the canary tells apart, in nats; the first token of a text has no log-probability."""

from pathlib import Path

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_5, load_qwen3_vl
from cua_rl.sampling.canary import (
    Canary,
    canary_datum,
    canary_request,
    canary_tokens,
    check_canary,
    image_canary,
    parse_canary,
    scored_tokens,
)
from cua_rl.types.errors import AdapterError
from cua_rl.types.rollout import AdapterRef
from tests.renderers.model_folders import build_qwen3_5_folder

ADAPTER = AdapterRef(path=Path("adapter"), policy_version=1)
BASE = (-1.0, -2.0, -3.0, -4.0)
STRONG = (1.0, -0.6, 0.8, -1.2)
"""A probe's effect, 0.9 on average."""
NOISE = (0.03, -0.04, 0.02, -0.03)
"""Of two computations in bfloat16, 0.03 on average."""
HALF = 0.1


def check(*, trained: tuple[float, ...], served: tuple[float, ...], served_base: tuple[float, ...] = BASE) -> None:
    """`trained` and `served` are changes from the two base models."""
    canary = Canary(
        tokens=(1, 2, 3, 4, 5),
        changes_model=True,
        training_logprobs=(0.0, *added(BASE, trained)),
        training_base_logprobs=(0.0, *BASE),
        limit=HALF,
    )
    check_canary(ADAPTER, canary, served=added(served_base, served), base=served_base)


def added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * change for change in STRONG)


def test_a_strong_adapter_that_is_applied_passes_in_spite_of_rounding() -> None:
    check(trained=STRONG, served=added(STRONG, NOISE), served_base=added(BASE, NOISE))


@pytest.mark.parametrize("part", [0.0, 0.5, 0.75, 2.0])
def test_a_strong_adapter_that_is_ignored_or_applied_in_part_is_refused(part: float) -> None:
    # 0.9 * 0.25 = 0.225 are missing where 0.1 + 0.09 may
    with pytest.raises(AdapterError, match="another adapter than the trainer's, only some of its keys"):
        check(trained=STRONG, served=added(scaled(part), NOISE))


def test_the_first_step_of_a_run_is_smaller_than_rounding_so_that_it_proves_nothing() -> None:
    check(trained=(0.02, -0.03, 0.02, -0.02), served=NOISE)


def test_another_base_model_is_told_from_another_adapter() -> None:
    with pytest.raises(AdapterError, match=r"server's base model .* got a mean difference of 0\.900"):
        check(trained=STRONG, served=STRONG, served_base=added(BASE, STRONG))


def test_the_canary_is_a_call_as_the_family_writes_it(small_folder: Path, tmp_path: Path) -> None:
    qwen3_vl, qwen3_5 = (
        load_qwen3_vl(small_folder),
        load_qwen3_5(build_qwen3_5_folder(small_folder, tmp_path / "model")),
    )

    assert '{"name": "click", "arguments": {"x": 500, "y": 125}}' in qwen3_vl.decode(canary_tokens(qwen3_vl))
    assert "<function=click>\n<parameter=x>\n500\n</parameter>" in qwen3_5.decode(canary_tokens(qwen3_5))


def test_the_canary_with_an_image_is_rendered_by_the_server_and_compared_after_the_image(
    renderer: Qwen3VLRenderer,
) -> None:
    prompt = image_canary(renderer)
    tokens = scored_tokens(prompt)
    canary = Canary(tokens=tokens, image=prompt.images[0], changes_model=True)

    def answer(prompt_ids: list[int]) -> dict[str, object]:
        return {"prompt_logprobs": [None, *({str(token): {"logprob": -0.5}} for token in prompt_ids[1:])]}

    path, body = canary_request(canary)
    ids = prompt.token_ids(renderer.image_token_id)
    assert (path, "messages" in body) == ("/v1/chat/completions", True)
    assert parse_canary(answer(ids), canary) == (-0.5,) * (len(tokens) - 1)
    assert sum(canary_datum(prompt).loss_mask) == len(tokens) - 1
    with pytest.raises(AdapterError, match="chat templates differ"):
        parse_canary(answer([*ids[:-1], ids[-1] + 1]), canary)


@pytest.mark.parametrize("broken", ["trained", "served", "served_base"])
def test_what_is_not_a_number_is_refused(broken: str) -> None:
    nothing = {broken: (float("nan"),) * 4}

    with pytest.raises(AdapterError):
        check(**{"trained": STRONG, "served": STRONG, **nothing})
