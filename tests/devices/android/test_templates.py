"""The demo tasks on a real phone: which goals it can be prepared for and checked on, and which are the simulator's."""

import pytest

from cua_rl.devices.android.preparation import make_goal_false
from cua_rl.devices.android.queries import ANDROID_QUERIES, read_android_query
from cua_rl.tasks.demo.template import Goal
from cua_rl.tasks.demo.templates import TEMPLATES
from tests.devices.android.phone_double import VERSIONS, PhoneDouble, Version

SIMULATOR_ONLY = {
    # what is on the screen inside an app: Android tells the activity, not its page
    "current_screen",
    # how icons lie: launchers keep that to themselves
    "home_page",
    # what an app holds or shows, readable only with root or not at all
    "note_texts",
}
_SEEDS = range(3)


def demo_goals() -> dict[tuple[str, str, str], Goal]:
    goals = [template.instance(seed).goal for template in TEMPLATES.values() for seed in _SEEDS]
    return {(goal.query, goal.expected, goal.how): goal for goal in goals}


def base_of(goal: Goal) -> str:
    return goal.query.partition(":")[0]


def test_every_goal_is_readable_on_a_real_phone_or_known_to_be_the_simulators() -> None:
    unreadable = {base_of(goal) for goal in demo_goals().values()} - ANDROID_QUERIES.keys()

    assert unreadable == SIMULATOR_ONLY


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_real_phone_is_prepared_for_every_readable_goal(version: Version) -> None:
    for goal in demo_goals().values():
        if base_of(goal) in SIMULATOR_ONLY or is_refused(goal):
            continue
        phone = make_phone(version, goal)

        await make_goal_false(phone, goal.query, goal.expected, goal.how, timeout_s=0.05, poll_s=0.0)

        assert goal.how == "told" or not goal.is_met(await read_android_query(phone, goal.query), None), goal


def is_refused(goal: Goal) -> bool:
    """Goals that no preparation over adb can serve."""
    return False


def make_phone(version: Version, goal: Goal) -> PhoneDouble:
    """A phone with the app that a task takes away or changes."""
    phone = PhoneDouble(version)
    package = goal.query.partition(":")[2].partition("/")[0]
    if base_of(goal) == "app_installed" and goal.expected == "false":
        phone.packages.add(package)
    return phone
