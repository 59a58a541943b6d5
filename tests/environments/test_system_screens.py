"""System pages and the shade: gestures, dialogs, networks, apps, and that nothing is drawn that cannot be read."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.catalog import ALL_EXTRA_ROWS, HEIGHT, WIDTH, Toggle
from cua_rl.environments.phone.simulator.device import perform
from cua_rl.environments.phone.simulator.elements import Element
from cua_rl.environments.phone.simulator.painter import draw_png
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import Start, SystemStart, make_phone_state
from cua_rl.environments.phone.simulator.state import IconPlace, Network, PhoneState
from cua_rl.types.actions import Button, Drag
from cua_rl.types.errors import TaskError

LOCKED = Network(name="Orchard", password="sesame42")


def home(seed: int = 3) -> PhoneState:
    demand = SystemStart(
        extra_rows=ALL_EXTRA_ROWS,
        connected_network="Alder",
        saved_network="Birch",
        locked_network=LOCKED,
        store_app="radio",
        running_app="chrome",
        notifying_app="mail",
    )
    start = Start(on=(Toggle.WIFI, Toggle.BLUETOOTH), off=(Toggle.AIRPLANE_MODE,), system=demand)
    return make_phone_state(seed, start)


def find(state: PhoneState, label: str) -> Element:
    screen = build_screen(state)
    return next(item for item in (*screen.fixed, *screen.content) if item.label == label and item.is_tappable)


def tap_on(state: PhoneState, *labels: str) -> PhoneState:
    for label in labels:
        hidden = find(state, label).rect.centre[1] - build_screen(state).viewport.bottom
        state = reducer.scroll_by(state, hidden + 20) if hidden >= 0 else state
        state = reducer.tap(state, *find(state, label).rect.centre)
    return state


def open_page(*labels: str) -> PhoneState:
    return tap_on(reducer.launch(home(), "settings"), *labels)


def pull(state: PhoneState, times: int = 1) -> PhoneState:
    for _ in range(times):
        state = reducer.drag(state, 96, 6, 96, 200)
    return state


PAGES = {
    "settings": (),
    "wifi": ("Wi-Fi",),
    "saved network": ("Wi-Fi", "Birch"),
    "unknown network": ("Wi-Fi", "Orchard"),
    "password": ("Wi-Fi", "Orchard", "Password"),
    "forget": ("Wi-Fi", "Alder", "Forget"),
    "bluetooth": ("Bluetooth",),
    "apps": ("Apps",),
    "app": ("Apps", "Chrome"),
    "store app": ("Apps", "Radio"),
    "uninstall": ("Apps", "Radio", "Uninstall"),
    "force stop": ("Apps", "Chrome", "Force stop"),
    "app storage": ("Apps", "Chrome", "Storage"),
    "storage": ("Storage",),
    "security": ("Security",),
    "screen lock": ("Security", "Lock"),
    "wallpaper": ("Wallpaper",),
    "wallpaper preview": ("Wallpaper", "Rose"),
    "language": ("Language",),
    "languages": ("Language", "Languages"),
    "language question": ("Language", "Languages", "Polski"),
    "developer": ("Developer",),
    "time zone": ("Date", "Zone"),
    "sound": ("Sound",),
}


@pytest.mark.parametrize("labels", PAGES.values(), ids=PAGES)
def test_every_page_can_be_read_and_tapped_and_left_again(labels: tuple[str, ...]) -> None:
    state = open_page(*labels)
    screen = build_screen(state)
    elements = (*screen.content, *screen.fixed)

    assert len({item.element_id for item in elements}) == len(elements)
    assert all(item.rect.x >= 0 and item.rect.right <= WIDTH for item in elements)
    assert all(text.isascii() for item in elements for text in (item.text, item.detail))
    assert draw_png(state, 1) != draw_png(home(), 1)
    for _ in range(len(labels) + 2):
        state = reducer.press(state, Button.BACK)
    assert state.screen == "home"


@pytest.mark.parametrize("labels", PAGES.values(), ids=PAGES)
def test_buttons_of_a_page_do_not_overlap(labels: tuple[str, ...]) -> None:
    boxes = [item.rect for item in build_screen(open_page(*labels)).content if item.kind in ("button", "pill", "row")]

    assert all(one.bottom <= other.y or one.right <= other.x for one, other in pairwise(boxes))


def test_pulling_from_the_status_bar_opens_notifications_then_quick_settings_and_pushing_up_closes_them() -> None:
    one, two = pull(home()), pull(home(), 2)

    assert (one.screen, two.screen) == ("notifications", "quick_settings")
    assert reducer.drag(two, 96, 280, 96, 100) == home()
    assert reducer.press(two, Button.BACK) == home()
    assert reducer.press(one, Button.HOME).screen == "home"


def test_the_shade_opens_over_any_screen_and_gives_it_back_as_it_was() -> None:
    list_below = reducer.scroll_by(open_page("Storage"), 120)

    assert pull(list_below).screen == "notifications"
    assert reducer.press(pull(list_below), Button.BACK) == list_below


@pytest.mark.parametrize(("y", "to_y"), [(40, 240), (6, 40), (6, 0)])
def test_other_drags_do_not_open_the_shade(y: int, to_y: int) -> None:
    assert reducer.drag(home(), 96, y, 96, to_y).shade is None


def test_the_shade_opens_by_pixels_of_any_scale() -> None:
    assert perform(home(), Drag(x=300, y=20, to_x=300, to_y=700), 3).screen == "notifications"


def test_a_notification_opens_its_app_goes_when_pushed_aside_and_all_go_at_once() -> None:
    state = pull(home())
    first = state.system.shown_notifications()[0]
    card = find(state, first.title).rect
    aside = reducer.drag(state, *card.centre, card.centre[0] + 80, card.centre[1])

    assert reducer.tap(state, *card.centre).screen == first.app
    assert first not in aside.system.shown_notifications()
    assert int(read_query(aside, "notification_count")) == len(state.system.shown_notifications()) - 1
    assert read_query(tap_on(state, "Clear all"), "notification_count") == "0"


def test_silencing_an_app_hides_what_it_reported() -> None:
    state = home()
    app = state.system.shown_notifications()[0].app
    entry = state.system.find_app(app)
    assert entry is not None
    silenced = replace(state, system=state.system.with_app(replace(entry, may_notify=False)))

    assert app not in {notification.app for notification in silenced.system.shown_notifications()}


def test_tiles_flip_toggles_and_airplane_mode_takes_the_radios_with_it() -> None:
    state = tap_on(pull(home(), 2), "Airplane")

    assert state.is_on(Toggle.AIRPLANE_MODE)
    assert not state.is_on(Toggle.WIFI)
    assert read_query(state, "quick_tile:airplane_mode") == "true"
    assert read_query(state, "quick_tile:wifi") == "untouched"
    assert read_query(tap_on(state, "Airplane"), "quick_tile:airplane_mode") == "false"


def test_nothing_beneath_a_dialog_can_be_tapped() -> None:
    state = open_page("Apps", "Radio", "Uninstall")
    tappable = [item.label for item in (*build_screen(state).content, *build_screen(state).fixed) if item.is_tappable]

    assert tappable == ["Back", "Home", "Recents", "Cancel", "OK"]
    assert reducer.tap(state, 40, 90) == state


def test_cancelling_a_dialog_changes_nothing() -> None:
    before = open_page("Apps", "Radio")

    assert tap_on(before, "Uninstall", "Cancel") == before


def test_an_uninstalled_app_is_gone_everywhere() -> None:
    state = home()
    page = (*state.home_pages[1][:-1], IconPlace(app="radio", x=30, y=50))
    state = reducer.launch(replace(state, home_pages=(state.home_pages[0], page)), "settings")
    state = tap_on(state, "Apps", "Radio", "Uninstall", "OK")

    assert state.screen == "settings/apps"
    assert read_query(state, "app_installed:com.example.radio") == "false"
    assert "Radio" not in {item.label for item in build_screen(state).content}
    assert "radio" not in {place.app for page in state.home_pages for place in page}


def test_apps_of_the_system_cannot_be_uninstalled() -> None:
    screen = build_screen(open_page("Apps", "Chrome"))

    assert not next(item for item in screen.content if item.label == "Uninstall").is_tappable


def test_a_stopped_app_stays_stopped_until_it_is_opened() -> None:
    state = open_page("Apps", "Chrome")
    stopped = tap_on(state, "Force stop", "OK")

    assert read_query(state, "app_running:com.android.chrome") == "true"
    assert read_query(stopped, "app_running:com.android.chrome") == "false"
    assert not next(item for item in build_screen(stopped).content if item.label == "Force stop").is_tappable
    assert read_query(tap_on(stopped, "Open"), "app_running:com.android.chrome") == "true"


def test_clearing_the_cache_lowers_what_the_app_takes_up() -> None:
    state = open_page("Storage", "Chrome")
    entry = state.system.find_app("chrome")
    assert entry is not None
    cleared = tap_on(state, "Clear cache")

    assert read_query(state, "app_storage_mb:com.android.chrome") == str(entry.size_mb + entry.cache_mb)
    assert read_query(cleared, "app_storage_mb:com.android.chrome") == str(entry.size_mb)
    assert read_query(cleared, "chrome_cache_cleared") == "true"


def test_networks_are_connected_disconnected_and_forgotten() -> None:
    connected = open_page("Wi-Fi", "Birch", "Connect")
    forgotten = tap_on(connected, "Forget", "Forget")

    assert read_query(home(), "connected_wifi") == "Alder"
    assert read_query(connected, "connected_wifi") == "Birch"
    assert read_query(tap_on(connected, "Disconnect"), "connected_wifi") == ""
    assert read_query(forgotten, "connected_wifi") == ""
    assert read_query(forgotten, "wifi_saved:Birch") == "false"
    assert read_query(connected.with_toggle(Toggle.WIFI, False), "connected_wifi") == ""


def test_an_unknown_network_takes_its_password_and_no_other() -> None:
    asking = open_page("Wi-Fi", "Orchard", "Password")
    wrong = tap_on(reducer.type_text(asking, "sesame"), "Connect")
    right = tap_on(reducer.type_text(asking, "sesame42"), "Connect")

    assert wrong.screen == "settings/ask:wrong_password:Orchard"
    assert read_query(tap_on(wrong, "OK"), "connected_wifi") == "Alder"
    assert read_query(right, "connected_wifi") == "Orchard"
    assert reducer.enter_key(reducer.type_text(asking, "sesame42")) == right
    assert reducer.enter_key(asking) == asking


def test_pages_of_radios_that_are_off_list_nothing() -> None:
    for label in ("Wi-Fi", "Bluetooth"):
        on = open_page(label)

        assert len(build_screen(on).content) > 3
        assert len(build_screen(tap_on(on, "Use")).content) == 2


def test_language_wallpaper_lock_and_zone_are_what_was_chosen() -> None:
    assert read_query(open_page("Language", "Languages", "Polski", "Change"), "system_language") == "Polski"
    assert read_query(open_page("Wallpaper", "Rose", "Set"), "wallpaper") == "Rose"
    assert read_query(open_page("Security", "Lock", "PIN"), "screen_lock") == "PIN"
    assert read_query(open_page("Date", "Zone", "Tokyo"), "time_zone") == "Tokyo"


def test_another_time_zone_moves_the_clock_by_its_hours() -> None:
    berlin = open_page("Date", "Zone", "Berlin")
    tokyo = tap_on(berlin, "Tokyo")

    assert (tokyo.minute_of_day - berlin.minute_of_day) % (24 * 60) == 8 * 60


def test_usb_debugging_asks_before_it_goes_on_and_not_before_it_goes_off() -> None:
    state = open_page("Developer")
    off = replace(state, system=state.system.with_switch("usb_debugging", False))
    on = tap_on(off, "USB debugging", "Allow")

    assert read_query(tap_on(off, "USB debugging"), "usb_debugging") == "false"
    assert read_query(on, "usb_debugging") == "true"
    assert read_query(tap_on(on, "USB debugging"), "usb_debugging") == "false"


def test_levels_are_about_right_within_five_points_or_one_step() -> None:
    state = replace(home(), brightness_level=115, media_volume=5)  # 45.1 %, 5 of 15 against 6

    assert read_query(state, "brightness_is_about:50") == "true"
    assert read_query(state, "brightness_is_about:40") == "false"
    assert read_query(state, "media_volume_is_about:40") == "true"
    assert read_query(state, "media_volume_is_about:60") == "false"


def test_the_same_seed_gives_the_same_system_and_other_seeds_others() -> None:
    assert home(7) == home(7)
    assert len({home(seed).system for seed in range(30)}) == 30


def test_a_query_with_an_unknown_name_before_the_colon_is_refused() -> None:
    with pytest.raises(TaskError, match="app_instaled"):
        read_query(home(), "app_instaled:com.android.chrome")


def test_every_page_lies_inside_the_screen() -> None:
    for state in (pull(home()), pull(home(), 2)):
        assert all(item.rect.bottom <= HEIGHT for item in build_screen(state).content)
