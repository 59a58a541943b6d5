"""Training data of each history policy: agent, gateway, renderer and datums are real, only the model server is not."""

import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from cua_rl.agent.agent import AgentTask
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.history import HistoryPolicy, make_history
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.environments.device import DeviceKind
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl, load_qwen3_vl_thinking
from cua_rl.rl.datums import ForkReason, build_datums, count_retokenised, datum_metrics
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import Datum, ImageChunk, ModelTurn, SamplingParams
from tests.builders import rollout
from tests.renderers.generated import encode_image
from tests.renderers.model_folders import build_small_folder
from tests.sampling.fake_vllm import FakeVllm

NUM_TURNS = 6
TAP = (
    "<think>\nIt is step {}.\n</think>\n\n<tool_call>\n"
    '{{"name": "mobile_use", "arguments": {{"action": "click", "coordinate": [{}, 500]}}}}\n</tool_call>'
)


class Screens:
    """A device on which every screenshot is another."""

    device_id = "screens"
    kind: DeviceKind = "android"

    def __init__(self) -> None:
        self._rng = random.Random(0)

    async def observe(self) -> EncodedImage:
        image = Image.new("RGB", (64, 96), tuple(self._rng.randrange(256) for _ in range(3)))
        return EncodedImage(data=encode_image(image), format="png", width_px=64, height_px=96)

    async def execute(self, action: Action) -> None: ...

    async def query(self, name: str) -> str:
        return ""

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    return load_qwen3_vl(build_small_folder(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def open_gateway(renderer: Qwen3VLRenderer, answers: Iterable[str]) -> AsyncGenerator[Gateway]:
    """A gateway to a model server that gives these answers."""
    fake = FakeVllm(renderer, max_model_len=4096)
    fake.answers.extend(answers)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url, ExternalServer(url) as server:
        async with SamplingClient(server) as client:
            yield Gateway(client, renderer, SamplingParams(max_tokens=256, temperature=1.0))


@pytest_asyncio.fixture
async def gateway(renderer: Qwen3VLRenderer) -> AsyncGenerator[Gateway]:
    async with open_gateway(renderer, [TAP.format(turn, 100 * turn) for turn in range(NUM_TURNS)]) as opened:
        yield opened


async def play(gateway: Gateway, policy: HistoryPolicy, max_images: int) -> tuple[ModelTurn, ...]:
    """One rollout; what the gateway recorded of it."""

    async def ignore(_: object) -> None: ...

    agent = GBoxAgent(history=make_history(policy, max_images=max_images))
    gateway.open_rollout("r")
    task = AgentTask(rollout_id="r", instruction="Tap.", max_turns=NUM_TURNS)
    await agent.run(task, Screens(), gateway, clock=RolloutClock(), on_turn=ignore)
    turns = gateway.close_rollout("r")
    assert len(turns) == NUM_TURNS
    assert gateway.prompt_mismatches == 0
    return turns


def assert_trained_in_context(datums: Sequence[Datum], turns: Sequence[ModelTurn], image_token_id: int) -> None:
    """Every turn's tokens stand in some datum after exactly what the model saw when it sampled them."""
    where = {index: datum for datum in datums for index in datum.turn_indices}
    assert sorted(where) == list(range(len(turns)))
    assert sum(datum.num_trained_tokens for datum in datums) == sum(len(turn.sampled_tokens) for turn in turns)
    for index, turn in enumerate(turns):
        ids, start = where[index].model_input.token_ids(image_token_id), turn.prompt.length
        end = start + len(turn.sampled_tokens)
        assert ids[:start] == turn.prompt.token_ids(image_token_id)
        assert tuple(ids[start:end]) == turn.sampled_tokens
        assert all(where[index].loss_mask[start:end])
        assert not where[index].loss_mask[start - 1]
        seen = [image.sha256 for image in turn.prompt.images]
        assert [image.sha256 for image in where[index].model_input.images][: len(seen)] == seen


@pytest.mark.parametrize(
    ("policy", "max_images", "images_seen", "turns_per_datum"),
    [
        ("full", 0, [1, 2, 3, 4, 5, 6], [6]),
        # the fifth screenshot drops two; the sixth extends that prompt
        ("block_drop", 4, [1, 2, 3, 4, 3, 4], [4, 2]),
        # from the third on, every screenshot drops one: nothing extends anything
        ("last_n", 2, [1, 2, 2, 2, 2, 2], [2, 1, 1, 1, 1]),
    ],
)
async def test_datums_hold_what_the_model_saw(
    gateway: Gateway,
    renderer: Qwen3VLRenderer,
    policy: HistoryPolicy,
    max_images: int,
    images_seen: list[int],
    turns_per_datum: list[int],
) -> None:
    turns = await play(gateway, policy, max_images)
    played = rollout(*turns)

    datums = build_datums(played, 1.0, renderer.image_token_id).datums

    assert [len(turn.prompt.images) for turn in turns] == images_seen
    assert [len(datum.turn_indices) for datum in datums] == turns_per_datum
    assert_trained_in_context(datums, turns, renderer.image_token_id)
    assert count_retokenised(datums, [played], renderer.image_token_id) == 0
    # a datum is as long as its last turn's prompt and answer: merged turns cost nothing of their own
    ends = [turns[datum.turn_indices[-1]] for datum in datums]
    assert [datum.model_input.length for datum in datums] == [
        turn.prompt.length + len(turn.sampled_tokens) for turn in ends
    ]


async def test_full_history_trains_on_no_more_tokens_than_the_final_sequence_has(
    gateway: Gateway, renderer: Qwen3VLRenderer
) -> None:
    turns = await play(gateway, "full", 0)

    (datum,) = build_datums(rollout(*turns), 1.0, renderer.image_token_id).datums

    assert datum.model_input.length == turns[-1].prompt.length + len(turns[-1].sampled_tokens)
    assert sum(isinstance(chunk, ImageChunk) for chunk in datum.model_input.chunks) == NUM_TURNS


@pytest.mark.parametrize(
    ("failures", "turns_per_datum", "merged"),
    [
        ((), [6], 5 / 6),
        # The third answer calls no tool, so the user says so; behind that, the first three thoughts are gone.
        ((2,), [3, 3], 4 / 6),
        ((1, 3), [2, 2, 2], 3 / 6),
        ((0, 1, 2, 3, 4), [1, 1, 1, 1, 1, 1], 0.0),
    ],
)
async def test_a_thinking_model_s_turns_merge_until_an_answer_without_a_tool_call(
    tmp_path: Path, failures: Sequence[int], turns_per_datum: list[int], merged: float
) -> None:
    renderer = load_qwen3_vl_thinking(build_small_folder(tmp_path / "model"))
    taps = [TAP.format(turn, 100 * turn).removeprefix("<think>\n") for turn in range(NUM_TURNS)]
    answers = ["I am lost.\n</think>\n\nWhere?" if turn in failures else tap for turn, tap in enumerate(taps)]

    async with open_gateway(renderer, answers) as gateway:
        turns = await play(gateway, "full", 0)
    built = build_datums(rollout(*turns), 1.0, renderer.image_token_id)

    assert [len(datum.turn_indices) for datum in built.datums] == turns_per_datum
    assert_trained_in_context(built.datums, turns, renderer.image_token_id)
    assert built.forks == ({ForkReason.HISTORY_CHANGED: len(failures)} if failures else {})
    assert datum_metrics(built.datums, built.forks, 0)["rollout/merged_turn_frac"] == pytest.approx(merged)


async def test_an_instruct_model_s_turns_merge_whatever_they_call(renderer: Qwen3VLRenderer) -> None:
    lost = "<think>\nI am lost.\n</think>\n\nWhere?"
    answers = [lost if turn in (1, 3) else TAP.format(turn, 100 * turn) for turn in range(NUM_TURNS)]

    async with open_gateway(renderer, answers) as gateway:
        turns = await play(gateway, "full", 0)

    assert len(build_datums(rollout(*turns), 1.0, renderer.image_token_id).datums) == 1
