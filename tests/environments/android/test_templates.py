"""The demo tasks on a real phone: which goals it can be prepared for and checked on, and which are the simulator's."""

import pytest

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.queries import ANDROID_QUERIES, read_android_query
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.tasks.goal import Goal
from cua_rl.types.errors import TaskError
from tests.environments.android.phone_double import VERSIONS, PhoneDouble, Version

SIMULATOR_ONLY = {
    # which page or part of the screen shows: Android reports the activity in front
    "current_screen",
    "shade",
    "quick_tile",
    # how icons lie: launchers keep that to themselves
    "home_page",
    "home_page_of",
    "home_folder",
    "num_home_pages",
    "on_home",
    # what an app holds, shows or is being told, readable only with root or not at all
    "calculation",
    "current_search",
    "current_url",
    "dialled_number",
    "draft_text",
    "has_note",
    "message_draft",
    "note_texts",
    "playing_title",
    "shown_note",
    "timer_s",
    "typed",
    # things without the simulator's names on a real phone
    "screenshots",
    "wallpaper",
    "playing_track",
    "callee",
    # sizes that Android shows in Settings only
    "app_storage_mb",
    "cache_cleared",
    "chrome_cache_cleared",
    # a lock set by one task would lock the next one out
    "screen_lock",
}
REFUSED = {
    # the darkest level differs between phones
    ("brightness_level", "1"),
    # without adb nothing can be read
    ("usb_debugging", "true"),
    ("usb_debugging", "false"),
    # counted on the simulated phone
    ("num_photos", None),
    ("num_screenshots", None),
}
_SEEDS = range(3)


def demo_goals() -> list[Goal]:
    goals = [template.instance(seed).goal for template in TEMPLATES.values() for seed in _SEEDS]
    return list({(goal.query, goal.expected, goal.how): goal for goal in goals}.values())


def base_of(goal: Goal) -> str:
    return goal.query.partition(":")[0]


def is_refused(goal: Goal) -> bool:
    return goal.how == "equals" and bool({(base_of(goal), goal.expected), (base_of(goal), None)} & REFUSED)


def readable_goals() -> list[Goal]:
    return [goal for goal in demo_goals() if base_of(goal) in ANDROID_QUERIES]


def test_every_goal_is_readable_on_a_real_phone_or_known_to_be_the_simulators() -> None:
    unknown = {base_of(goal) for goal in demo_goals()} - ANDROID_QUERIES.keys() - SIMULATOR_ONLY

    assert unknown == set(), "teach cua_rl/environments/android/queries.py to read them, or say here why it cannot"
    assert ANDROID_QUERIES.keys() & SIMULATOR_ONLY == set()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_real_phone_is_prepared_for_every_readable_goal(version: Version) -> None:
    for goal in readable_goals():
        if is_refused(goal):
            continue
        phone = make_phone(version, goal)

        await prepare(phone, goal)

        assert goal.how == "told" or not goal.is_met(await read_android_query(phone, goal.query), None), goal


async def test_goals_that_no_real_phone_can_serve_are_refused() -> None:
    for goal in readable_goals():
        if is_refused(goal):
            with pytest.raises(TaskError):
                await prepare(make_phone(14, goal), goal)


async def prepare(phone: PhoneDouble, goal: Goal) -> None:
    await make_goal_false(phone, goal.query, goal.expected, goal.how, timeout_s=0.05, poll_s=0.0)


def make_phone(version: Version, goal: Goal) -> PhoneDouble:
    """A phone with the app that a task opens, changes or takes away, and without alarms."""
    phone = PhoneDouble(version)
    phone.alarms = []
    phone.packages |= {goal.query.partition(":")[2], goal.expected} if "app" in base_of(goal) else set()
    return phone
