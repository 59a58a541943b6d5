import asyncio

import pytest

from cua_rl.environments.phone.demo.expert import DemoExperts
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rl.datums import datums_sha256
from cua_rl.supervised.datasets import Example, ExpertExamples, FixedExamples, split_examples
from cua_rl.task_loader import load_tasks
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum, EncodedTextChunk, ModelInput

RENDERER = make_renderer(TINY_QWEN3_VL)


def example(index: int) -> Example:
    datum = Datum(
        rollout_id=str(index),
        model_input=ModelInput(chunks=(EncodedTextChunk(tokens=(1, index)),)),
        loss_mask=(False, True),
        advantages=(0.0, 0.0),
        sampling_logprobs=(0.0, 0.0),
        policy_versions=(),
    )
    return (datum,)


def fixed(num_examples: int, seed: int = 0) -> FixedExamples:
    return FixedExamples(load=example, train=range(num_examples), held_out_indices=(90, 91), seed=seed)


async def names(dataset: FixedExamples, step: int, size: int) -> list[str]:
    return [datum.rollout_id for datum in await dataset.batch(step, size)]


def experts(error_rate: float = 0.0, task_ids: tuple[str, ...] = ("train_02_enable_wifi",)) -> ExpertExamples:
    source = {"source_type": "ids", "task_ids": list(task_ids)}
    return ExpertExamples(
        tasks=load_tasks(source, seed=3, split="train"),
        held_out_tasks=load_tasks(source, seed=3, split="eval").held_out(4),
        devices=SimulatedPhones(),
        experts=DemoExperts(),
        renderer=RENDERER,
        error_rate=error_rate,
        max_turns=20,
        seed=3,
    )


async def test_every_pass_shows_every_conversation_once_in_an_order_of_its_own() -> None:
    dataset = fixed(6)
    # 6 conversations in batches of 2: steps 0-2 are the first pass, steps 3-5 the second
    passes = [[name for step in steps for name in await names(dataset, step, 2)] for steps in ((0, 1, 2), (3, 4, 5))]
    assert [sorted(one) for one in passes] == [list("012345")] * 2
    assert passes[0] != passes[1]


async def test_a_batch_reaches_into_the_next_pass_and_may_be_larger_than_the_data() -> None:
    drawn = await names(fixed(3), 0, 7)
    assert [sorted(drawn[:3]), sorted(drawn[3:6]), len(drawn)] == [list("012"), list("012"), 7]


async def test_a_batch_depends_on_seed_and_step_alone() -> None:
    forwards = [await names(fixed(20), step, 4) for step in range(5)]
    backwards = [await names(fixed(20), step, 4) for step in reversed(range(5))]
    assert forwards == backwards[::-1]
    assert forwards != [await names(fixed(20, seed=1), step, 4) for step in range(5)]


async def test_held_out_conversations_are_all_there() -> None:
    assert [datum.rollout_id for datum in await fixed(3).held_out()] == ["90", "91"]


def test_conversations_with_the_same_key_stay_on_one_side() -> None:
    keys = ["a", "b", "a", "c", "b", "d"]
    train, held_out = split_examples(keys, 2, seed=0)
    assert sorted([*train, *held_out]) == [0, 1, 2, 3, 4, 5]
    assert len(held_out) >= 2
    assert {keys[index] for index in train}.isdisjoint(keys[index] for index in held_out)


def test_nothing_is_held_out_if_nothing_was_asked_for() -> None:
    assert split_examples(["a", "b"], 0, seed=0) == ([0, 1], [])


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected conversations left to train on, got 2 held out of 2; lower"):
        split_examples(["a", "b"], 2, seed=0)


async def test_demonstrations_of_a_step_are_the_same_whenever_they_are_drawn() -> None:
    one, other = experts(error_rate=0.5), experts(error_rate=0.5)
    await other.batch(0, 2)
    assert datums_sha256(await one.batch(1, 2)) == datums_sha256(await other.batch(1, 2))
    assert datums_sha256(await one.batch(1, 2)) != datums_sha256(await one.batch(2, 2))


async def test_held_out_demonstrations_are_on_other_phones() -> None:
    dataset = experts()
    trained, held_out = await asyncio.gather(dataset.batch(0, 8), dataset.held_out())
    seen = {image.sha256 for datum in trained for image in datum.model_input.images}
    assert seen.isdisjoint(image.sha256 for datum in held_out for image in datum.model_input.images)


async def test_a_perfect_expert_shows_the_whole_way_within_the_turns_of_a_rollout() -> None:
    (datum,) = await experts().batch(0, 1)
    ids = datum.model_input.token_ids(RENDERER.image_token_id)
    trained = RENDERER.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])
    # open Settings, tap the switch: two answers, two ends of turn
    assert trained.count("<|im_end|>") == 2
    assert "Settings" in trained


async def test_an_erring_expert_shows_other_answers_than_a_perfect_one() -> None:
    assert datums_sha256(await experts(1.0).batch(0, 8)) != datums_sha256(await experts(0.0).batch(0, 8))
