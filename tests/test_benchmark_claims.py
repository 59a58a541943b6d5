"""No benchmark prints a figure of what did not happen: its check accepts what should be and names what is not."""

import struct
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import httpx
import pytest

from benchmarks import (
    async_against_sync,
    credit,
    curriculum,
    given_rollouts,
    monitor_api,
    monitor_memory,
    random_agent,
    trust_regions,
)
from benchmarks.browser import require_clicks
from benchmarks.claims import require
from benchmarks.controller_load import Turns, require_turns
from benchmarks.desktop import SIZE_PX, require_letters
from benchmarks.far_phones import Screenshots, chunk
from benchmarks.planned_against_measured import require_run
from benchmarks.replica_routing import require_spread
from benchmarks.sampling_throughput import require_answers
from benchmarks.trainer_against_trl import Cell, require_equal_work
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.planning.calibration import Interval, RecordedRollout, RecordedRun, RecordedStep
from cua_rl.planning.fleet import Placement
from cua_rl.planning.virtual_time import run_in_virtual_time
from cua_rl.renderers.images import image_size
from cua_rl.run.training_config import CLIConfig
from tests.builders import encoded_image, image, model_turn, prompt, text
from tests.planning.scenarios import PLACEMENT

WORK = given_rollouts.Workload(turns=3, vocabulary=1024)  # two groups of four rollouts: 2 + 8 * 2 screenshots
STEP = {"trainer/trained_tokens": 8.0 * 3 * 30, "trainer/encoded_images": 18.0}
ARM = {"rollout/num_rollouts": 128.0, "replay/num_rollouts": 0.0, "curriculum/num_sampled_groups": 16.0}
SCREENS = [encoded_image(bytes([number]), *SIZE_PX) for number in range(3)]
PAGES = Counter({("a", 320, 420): 3, ("b", 320, 420): 1})
TURNS = Turns(
    num_turns=20,
    clicks=20,
    screens_before=20,
    screens_after=20,
    most_screens=10,
    screen_kb=300.02,
    screen_tokens=60,
    prompt_tokens=1e3,
)
ROW = random_agent.Row(
    template=next(iter(TEMPLATES.values())),
    untouched=False,
    expert_turns=3,
    num_lucky=0,
    num_actions=10,
    num_rejected=1,
)
MEMORY = {"run_nodes": 500, "live_nodes": 500, "rollout_nodes": 500}
FIRST = model_turn(prompt(text(1), image(b"a")))
ANSWERS = [(FIRST, model_turn(prompt(text(1), image(b"a"), text(2), image(b"b")))), (model_turn(prompt(image(b"c"))),)]
TRAINED = RecordedStep(step=1, ended_at=datetime(2026, 1, 1, tzinfo=UTC), metrics={"time/train_s": 1.0})
REQUEST = Interval(start_s=0.0, end_s=1.0)
RUN = RecordedRun(
    rollouts=(RecordedRollout(step=1, run=REQUEST, requests=(REQUEST,)),) * 4,
    steps=(TRAINED, TRAINED),
    group_size=2,
    placement=Placement(**PLACEMENT),
    screen_kb=7.5,
)
CONFIG = CLIConfig(group_size=2, groups_per_batch=1, max_steps=2)
OURS, THEIRS = {"first_grad_norm": 0.5}, {"first_grad_norm": 0.5001, "tokens": 8 * WORK.final_length}
ROUTING = Namespace(rollouts=4, turns=3)


def arm(name: str, *steps: Mapping[str, float]) -> Callable[[], None]:
    return partial(curriculum.require_arm, name, 2, [{**ARM, **step} for step in steps])


def credit_arm(name: str, step: Mapping[str, float], compared: float = 0.0) -> Callable[[], None]:
    return partial(credit.require_arm, name, 1, [dict(step)], compared)


def trust_region(*ratios: float) -> Callable[[], None]:
    steps = [{"policy/ratio_p99": ratio} if ratio else {} for ratio in ratios]  # without: all groups were constant
    return partial(trust_regions.require_arm, "ppo", 2, steps)


def answer(route: str, body: object) -> Callable[[], None]:
    return partial(monitor_api.require_content, route, httpx.Response(200, json=body))


@pytest.mark.parametrize(
    "check",
    [
        partial(require, "a claim", one=(1, 1)),
        partial(require_turns, TURNS, num_screens=10, screen_kb=300),
        partial(require_clicks, 3, PAGES, Counter({False: 3, True: 1})),
        partial(require_letters, 3, [SCREENS, SCREENS[::-1]]),
        partial(given_rollouts.require_steps, WORK, 2, [0.1, 0.2], [STEP, STEP]),
        partial(require_equal_work, Cell.parse("tiny:3:merged"), OURS, THEIRS),
        partial(require_answers, [ANSWERS[0]], 2, 0),
        partial(require_spread, [6.0, 6.0], ROUTING),
        partial(require_spread, [7.0, 5.0], ROUTING),
        partial(require_run, RUN, CONFIG),
        partial(monitor_memory.require_growth, [{**MEMORY, "num_steps": 3}, {**MEMORY, "num_steps": 5}]),
        partial(random_agent.require_actions, [ROW]),
        arm("plain", {}, {}),
        arm("refill", {}, {"curriculum/num_sampled_groups": 20.0}),
        arm("replay", {}, {"replay/num_rollouts": 3.0}),
        credit_arm("rollout", {}),
        credit_arm("state_groups", {}, 0.4),
        credit_arm("turn_returns", {"reward/parts/milestones": 0.1}),
        credit_arm("branches", {"rollout/shared_turns": 7.0}),
        trust_region(1.2, 0.0),
        answer("runs", [1]),
        answer("rollouts", {"items": [1]}),
        answer("set, summary", {"num_rollouts": 1, "tasks": []}),
        answer("rollouts by a search without hits", {"items": []}),
    ],
)
def test_what_happened_as_it_should_may_be_measured(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "complaint"),
    [
        (partial(require, "a claim", one=(1, 2)), "one: expected 1, got 2"),
        # no action in any turn, one screenshot in every prompt: what the benchmark once measured
        (
            partial(require_turns, replace(TURNS, clicks=0, most_screens=1), num_screens=10, screen_kb=300),
            "clicks: expected 20, got 0; screenshots of the longest prompt: expected 10, got 1",
        ),
        (partial(require_turns, replace(TURNS, num_turns=0), num_screens=10, screen_kb=300), "has turns"),
        (partial(require_turns, replace(TURNS, screens_before=19), num_screens=10, screen_kb=300), "before"),
        (partial(require_turns, replace(TURNS, screens_after=4), num_screens=10, screen_kb=300), "different"),
        (partial(require_turns, TURNS, num_screens=10, screen_kb=10), "kb of a screenshot: expected 10, got 300"),
        (partial(require_clicks, 3, PAGES, Counter({False: 4})), "clicks end some tasks"),
        (partial(require_clicks, 9, PAGES, Counter({True: 4})), "instances look different"),
        (partial(require_clicks, 1, Counter({("a", 640, 840): 1}), Counter({True: 1})), "sizes"),
        (partial(require_letters, 3, [SCREENS, [SCREENS[0]] * 3]), r"expected \[3, 3\], got \[3, 1\]"),
        (partial(given_rollouts.require_steps, WORK, 2, [0.1, 0.0], [STEP, STEP]), "change weights: expected 2, got 1"),
        (partial(given_rollouts.require_steps, WORK, 2, [0.1], [STEP]), "steps: expected 2, got 1"),
        (
            partial(given_rollouts.require_steps, WORK, 1, [0.1], [STEP | {"trainer/encoded_images": 2.0}]),
            "encoded screenshots",
        ),
        (
            partial(require_equal_work, Cell.parse("tiny:3:merged"), OURS, THEIRS | {"first_grad_norm": 0.51}),
            "gradients",
        ),
        (partial(require_equal_work, Cell.parse("tiny:3:merged"), OURS, THEIRS | {"tokens": 1}), "tokens"),
        (partial(require_answers, ANSWERS, 2, 0), "screenshots by turn"),
        (partial(require_answers, [ANSWERS[0]], 2, 1), "policy versions"),
        (partial(require_answers, [(FIRST,), (FIRST,)], 1, 0), "different screenshots: expected 2, got 1"),
        (
            partial(require_answers, [(replace(FIRST, sampled_tokens=(), sampling_logprobs=()),)], 1, 0),
            "without tokens",
        ),
        (partial(require_spread, [12.0, 0.0], ROUTING), "are spread"),
        (partial(require_spread, [5.0, 5.0], ROUTING), "answers: expected 12, got 10"),
        (partial(require_run, replace(RUN, steps=(TRAINED,)), CONFIG), "steps: expected 2, got 1"),
        (partial(require_run, replace(RUN, rollouts=()), CONFIG), "rollouts that ended well"),
        (partial(require_run, replace(RUN, screen_kb=0.0), CONFIG), "shows screenshots"),
        (
            partial(require_run, replace(RUN, steps=(replace(TRAINED, metrics={}),) * 2), CONFIG),
            "trains in most steps",
        ),
        (
            partial(monitor_memory.require_growth, [{**MEMORY, "num_steps": 3}, {**MEMORY, "num_steps": 3}]),
            "more steps",
        ),
        (
            partial(monitor_memory.require_growth, [{"num_steps": 3}, {**MEMORY, "live_nodes": 3, "num_steps": 4}]),
            r"got \('run', 'rollout'\)",
        ),
        (partial(random_agent.require_actions, [replace(ROW, num_actions=0)]), "acts at every task"),
        (partial(random_agent.require_actions, [replace(ROW, num_rejected=9)]), "carried out"),
        (arm("plain", {}), "steps: expected 2, got 1"),
        (arm("plain", {}, {"replay/num_rollouts": 3.0}), "replays: expected False, got True"),
        (arm("replay", {}, {}), "replays: expected True, got False"),
        (arm("refill", {}, {}), "refills: expected True, got False"),
        (credit_arm("rollout", {"rollout/shared_turns": 7.0}), "branches: expected False, got True"),
        (credit_arm("branches", {}), "branches: expected True, got False"),
        (credit_arm("state_groups", {}), "compares states"),
        (credit_arm("turn_returns", {}), "milestones: expected True, got False"),
        (trust_region(1.0, 1.0), "off policy: expected True, got False"),
        (trust_region(1.2), "steps: expected 2, got 1"),
        (answer("runs", []), "has content"),
        (answer("rollouts", {"items": []}), "has content"),
    ],
)
def test_what_did_not_happen_is_named_and_gives_no_figure(check: Callable[[], None], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        check()


def test_the_loops_of_the_benchmark_take_their_steps() -> None:
    figures = {lag: run_in_virtual_time(async_against_sync.measure(lag, 2, 64)) for lag in (0, 1)}

    assert figures[1]["rollouts_per_hour"] > figures[0]["rollouts_per_hour"]


async def test_an_agent_at_random_acts_on_the_phone() -> None:
    row = await random_agent.measure(next(iter(TEMPLATES.values())), 2)

    assert 0 <= row.num_rejected < row.num_actions
    random_agent.require_actions([row])


@pytest.mark.parametrize("kb", [10, 300])
def test_screenshots_of_far_phones_are_whole_pngs_of_their_size_and_unlike_each_other(kb: int) -> None:
    screenshots = Screenshots(1024 * kb)
    one, other = screenshots.draw(), screenshots.draw()

    assert (one.width_px, one.height_px) == image_size(one.data)
    assert round(len(one.data) / 1024, 1) == kb
    assert one.sha256 != other.sha256
    kinds, at = list[bytes](), 8
    while at < len(one.data):  # length, kind, content and checksum of each chunk
        (length,) = struct.unpack(">I", one.data[at : at + 4])
        kinds.append(one.data[at + 4 : at + 8])
        content = one.data[at + 4 : at + 8 + length]
        assert struct.unpack(">I", one.data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(content)
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    assert chunk(b"").endswith(zlib.crc32(b"noIs").to_bytes(4))


def test_success_is_read_at_equal_turns_of_devices_and_turns_shared_with_a_parent_count_once() -> None:
    plain = {"rollout/num_turns/mean": 5.0, "rollout/num_rollouts": 8.0, "curriculum/num_sampled_groups": 1.0}
    steps = [plain | {"reward/success_rate": rate, "rollout/shared_turns": 10.0} for rate in (0.0, 0.5, 1.0)]

    assert credit.num_turns(plain) == 40
    assert credit.num_turns(steps[0]) == 30
    # the third step would exceed the budget
    assert credit.success_within(steps, credit.num_turns, 89) == 0.25
    assert credit.success_within(steps, credit.num_turns, 90) == 0.5


def test_arms_are_compared_seed_by_seed() -> None:
    # differences 0.1, 0.2 and 0.3: mean 0.2, standard error 0.1 / sqrt(3), Student's 4.303
    figure = credit.against_first("b", "rate", {"a": [0.1, 0.4, 0.7], "b": [0.2, 0.6, 1.0]})

    assert figure == {
        "rate": 0.6,
        "rate_interval": [-0.394, 1.594],
        "rate_difference": 0.2,
        "rate_difference_interval": [-0.048, 0.448],
    }
