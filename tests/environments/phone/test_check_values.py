"""Checks that no device can pass are refused; whatever a device can show is accepted."""

import json
import logging
from random import Random
from typing import Any

import pytest

from cua_rl.environments.adb.device import ANDROID_ABILITIES
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.phone.custom import require_possible
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.query_values import CHOICES, SIMULATOR_QUERIES, listed_part
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import Start, SystemStart, make_phone_state
from cua_rl.task_loader import SIMULATOR, load_tasks
from cua_rl.tasks.goal import parse_expected
from cua_rl.types.errors import ConfigError


def load(check: Any, device: DeviceAbilities = SIMULATOR, **more: Any) -> None:
    described = {"instruction": "Do it.", "check": check, **more}
    load_tasks({"source_type": "custom", "custom_tasks": [described]}, seed=0, split="train", device=device)


NEVER: list[tuple[dict[str, Any], str]] = [
    ({"query": "current_app", "expected": "clock"}, "did you mean 'com.android.deskclock'"),
    ({"query": "current_app", "expected": "com.android.deskclok"}, "did you mean 'com.android.deskclock'"),
    ({"query": "current_app", "expected": "com.instagram.android"}, r"possible on \d+ of 24 .* set start"),
    ({"query": "current_app", "expected": True}, "expected an app's package from current_app"),
    ({"query": "current_activity", "expected": "com.android.settings"}, "expected PACKAGE/ACTIVITY"),
    ({"query": "current_screen", "expected": "settings/dispaly"}, "did you mean 'settings/display'"),
    ({"query": "current_screen", "expected": "Clock"}, "did you mean 'clock'"),
    ({"query": "brightness_level", "expected": "max"}, "did you mean '255'"),
    ({"query": "brightness_level", "expected": 0}, "choose one of '1'"),
    ({"query": "brightness_level", "expected": 256}, "'255'"),
    ({"query": "brightness_level", "expected": "0128"}, "expected a whole number"),
    ({"query": "brightness_level", "expected": 12.5}, "expected a whole number"),
    ({"query": "media_volume", "expected": 16}, "'15'"),
    ({"query": "screen_timeout", "expected": "5 minutes"}, "did you mean '300000'"),
    ({"query": "screen_timeout", "expected": 45000}, "'15000'"),
    ({"query": "battery_level", "expected": 100}, "possible on .* of 24"),
    ({"query": "timer_s", "expected": 90}, "possible on 0 of 24"),
    ({"query": "clock", "expected": "6:45"}, "expected a time of day"),
    ({"query": "alarms_on", "expected": "7:00", "how": "includes"}, "expected a time of day"),
    ({"query": "is_alarm_on:7:00", "expected": True}, "expected a time of day after is_alarm_on:"),
    ({"query": "system_language", "expected": "German"}, "did you mean 'Deutsch'"),
    ({"query": "time_zone", "expected": "Europe/Berlin"}, "did you mean 'Berlin'"),
    ({"query": "screen_lock", "expected": "pin"}, "did you mean 'PIN'"),
    ({"query": "wallpaper", "expected": "teal"}, "did you mean 'Teal'"),
    ({"query": "connected_wifi", "expected": "Home"}, "possible on 0 of 24"),
    ({"query": "playing_title", "expected": "Bohemian Rhapsody"}, "possible on 0 of 24"),
    ({"query": "wifi_enabled", "expected": "on"}, "did you mean 'true'"),
    ({"query": "wifi_enabled", "expected": 1}, "did you mean 'true'"),
    ({"query": "wifi_enabled", "expected": "True"}, "did you mean 'true'"),
    ({"query": "wifi_enabled:wifi", "expected": True}, "expected nothing after wifi_enabled"),
    ({"query": "app_installed", "expected": False}, "expected an app's package after app_installed:"),
    ({"query": "app_installed:clock", "expected": False}, "expected an app's package after app_installed:"),
    ({"query": "app_running:com.android.clock", "expected": True}, "did you mean 'com.android.deskclock'"),
    ({"query": "quick_tile:wi-fi", "expected": True}, "did you mean 'wifi'"),
    ({"query": "brightness_is_about:half", "expected": True}, "expected percent from 0 to 100"),
    ({"query": "file_exists:Download/a", "expected": True}, "expected a path below /sdcard"),
    ({"query": "sent_messages", "expected": {"contact": "Emma"}, "how": "includes"}, "expected a message"),
    ({"query": "sent_messages", "expected": "On my way", "how": "includes"}, "expected a message"),
    ({"query": "note_texts", "expected": "Buy bread"}, "write how='includes'"),
    ({"query": "note_texts", "expected": 3, "how": "includes"}, "expected text from note_texts"),
    ({"query": "called_numbers", "expected": "555 2040", "how": "includes"}, "keys that dial"),
    ({"query": "installed_apps", "expected": "Notes", "how": "includes"}, "expected an app's package"),
    ({"query": "note_texts", "how": "told"}, "a single value for 'told'"),
    ({"query": "current_search", "expected": "Apple Cake"}, "words in lower case"),
    ({"query": "shade", "expected": "quick settings"}, "did you mean 'quick_settings'"),
]


@pytest.mark.parametrize(("check", "says"), NEVER)
def test_a_check_that_no_simulated_phone_can_pass_is_refused_with_what_it_can(check: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(check)


@pytest.mark.parametrize(
    ("check", "device", "says"),
    [
        ({"query": "current_app", "expected": "clock"}, ANDROID_ABILITIES, "expected an app's package"),
        ({"query": "brightness_level", "expected": "max"}, ANDROID_ABILITIES, "expected a whole number"),
        ({"query": "screen_timeout", "expected": "5 minutes"}, ANDROID_ABILITIES, "expected milliseconds"),
        ({"query": "app_running:clock", "expected": True}, ANDROID_ABILITIES, "expected an app's package"),
        ({"query": "file_exists:Download/a", "expected": True}, ANDROID_ABILITIES, "a path below /sdcard"),
    ],
)
def test_real_phones_refuse_what_is_true_of_none(check: Any, device: DeviceAbilities, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(check, device)


@pytest.mark.parametrize(
    "check",
    [
        {"query": "current_app", "expected": "org.fdroid.fdroid"},
        {"query": "brightness_level", "expected": 2047},
        {"query": "screen_timeout", "expected": 2147483647},
        {"query": "system_language", "expected": "Klingon"},
        {"query": "app_permission:com.android.camera2/CAMERA", "expected": True},
        {"query": "time_zone", "expected": "Kathmandu"},
        {"query": "sent_messages", "expected": [{"text": "Hi", "to": "+49 30 1"}]},
        {"query": "media_volume", "expected": "25"},
    ],
)
def test_real_phones_accept_values_that_only_the_simulator_lacks(check: Any) -> None:
    load(check, ANDROID_ABILITIES)


def test_pages_refuse_what_no_page_answers() -> None:
    def refused(query: str, expected: object, how: Any, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            parse_expected(query, expected, how, "the check", PAGE_BROWSER)

    refused("url", "/cart", "equals", "expected a whole address")
    refused("count:li", "two", "equals", "expected a whole number")
    refused("checked:#a", "checked", "equals", "'true' or 'false'")
    refused("value", "tea", "equals", "expected a CSS selector after value:")
    refused("text:#a", "tea", "includes", "expected a query that answers with a list")
    assert parse_expected("text", "tea", "equals", "the check", PAGE_BROWSER) == "tea"


def test_every_demo_goal_is_one_that_its_phone_can_reach() -> None:
    for template in TEMPLATES.values():
        for seed in range(8):
            instance = template.instance(seed)
            goal = instance.goal
            expected: object = json.loads(goal.expected) if goal.how == "includes" else goal.expected
            assert parse_expected(goal.query, expected, goal.how, "it", SIMULATOR) == goal.expected
            require_possible(goal, [make_phone_state(seed, instance.start)], template.task_id)


def test_whatever_phones_show_on_random_walks_is_a_value_of_its_query() -> None:
    for seed in range(12):
        random, rows = Random(seed), ("wifi_page", "apps", "security", "language", "developer")
        first = state = make_phone_state(seed, Start(system=SystemStart(extra_rows=rows)))
        for _ in range(150):
            screen = build_screen(state)
            shown = [one for one in (*screen.fixed, *screen.visible_content()) if one.is_tappable]
            if random.random() < 0.1 or not shown:
                state = reducer.launch(state, random.choice([entry.app for entry in state.system.apps]))
            else:
                state = reducer.tap(state, *random.choice(shown).rect.centre)
            if state.focus is not None:
                state = reducer.type_text(state, random.choice(["7", "12", "Zoe", "soup"]))
            for name, query in SIMULATOR_QUERIES.items():
                if query.argument is not None:
                    continue
                answer = read_query(state, name)
                may_be_none = answer == "" and query.values.accepts("")
                assert may_be_none or query.values.parse(answer) == answer, (name, answer, state.screen)
                parts = json.loads(answer) if query.values.items else [answer]
                if name in CHOICES:
                    assert {listed_part(name, part) for part in parts} <= {*CHOICES[name](first)}, (name, answer)


def test_a_list_is_expected_in_any_spacing_and_order_of_keys() -> None:
    text = '[{"text":"Hi","to":"Emma"}]'
    wanted = '[{"to": "Emma", "text": "Hi"}]'
    assert parse_expected("sent_messages", text, "equals", "it", SIMULATOR) == wanted
    assert parse_expected("sent_messages", json.loads(text), "equals", "it", SIMULATOR) == wanted


def test_a_page_of_settings_that_a_check_needs_is_added_or_asked_for() -> None:
    check = {"query": "system_language", "expected": "Deutsch"}
    load(check)
    with pytest.raises(ConfigError, match=r'add "system": {"extra_rows": \["language"\]}'):
        load(check, start={"first_rows": ["about"]})
    load(check, start={"system": {"extra_rows": ["language"]}})


def test_a_question_without_an_answer_at_the_start_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load({"query": "playing_title", "how": "told"})

    assert "on 24 of 24 phones playing_title has no value when the task begins" in caplog.text
