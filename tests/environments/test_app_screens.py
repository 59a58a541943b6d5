"""The phone's apps and launcher: what their screens do, drawn in light and dark, always tapped where they show."""

import json
from dataclasses import replace

import pytest

from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.apps.browser import WEB_PAGES, find_pages, read_address
from cua_rl.environments.phone.simulator.catalog import APPS, Toggle
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.elements import Element
from cua_rl.environments.phone.simulator.painter import draw_phone
from cua_rl.environments.phone.simulator.queries import LOOKUPS, QUERIES, read_query
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import AppStart, Start, SystemStart, make_phone_state
from cua_rl.environments.phone.simulator.state import Contact, PhoneState
from cua_rl.types.actions import Button, LongPress, OpenApp, PressKey

EMMA = Contact(name="Emma", number="555 1234")
START = Start(
    first_page=("settings", "mail"),
    second_page=("maps",),
    system=SystemStart(store_app="podcasts"),
    apps=AppStart(
        contacts=(EMMA,), without_contacts=("Zoe",), folders=("Downloads/old/",), off_home=("maps",), note="Pay rent"
    ),
)


def element(state: PhoneState, label: str) -> Element:
    screen = build_screen(state)
    return next(item for item in (*screen.fixed, *screen.visible_content()) if item.label == label and item.is_tappable)


def tap_on(state: PhoneState, *labels: str) -> PhoneState:
    for label in labels:
        state = reducer.tap(state, *element(state, label).rect.centre)
    return state


def hold(state: PhoneState, label: str) -> PhoneState:
    return reducer.hold(state, *element(state, label).rect.centre)


def home() -> PhoneState:
    return make_phone_state(3, START)


def opened(app: str, *labels: str) -> PhoneState:
    return tap_on(reducer.launch(home(), app), *labels)


def drawer() -> PhoneState:
    return reducer.drag(home(), 96, 260, 96, 80)


def searched(words: str) -> PhoneState:
    return reducer.type_text(tap_on(drawer(), "Search"), words)


def typed(state: PhoneState, **values: str) -> PhoneState:
    """Type into the fields of a form, whose labels are capitalised."""
    for label, value in values.items():
        state = reducer.type_text(tap_on(state, label), value)
    return state


def browse(text: str) -> PhoneState:
    return tap_on(reducer.type_text(opened("chrome", "Search"), text), "Enter")


def foldered() -> PhoneState:
    """The home screen with Settings and Mail in a folder."""
    return tap_on(reducer.type_text(tap_on(hold(home(), "Mail"), "Group", "Settings"), "Work"), "Create")


def query(state: PhoneState, name: str) -> str:
    return read_query(state, name)


def every_screen() -> list[PhoneState]:
    shot = tap_on(reducer.press(opened("maps"), Button.RECENTS), "Screenshot")
    return [
        opened("phone", "5", "5"),
        opened("phone", "5", "Call"),
        opened("phone", "5", "Add"),
        opened("contacts", "New"),
        opened("contacts", "Emma"),
        reducer.type_text(opened("contacts", "Search"), "e"),
        opened("messages", "New"),
        opened("messages", "New", "Emma"),
        opened("notes", home().notes[0]),
        opened("clock", "New"),
        opened("clock", "Timer"),
        reducer.enter_key(reducer.type_text(opened("clock", "Timer"), "9")),
        opened("files", "Downloads"),
        opened("files", "Downloads", "old"),
        opened("files", "New"),
        opened("gallery", "Photo 1"),
        reducer.launch(shot, "gallery"),
        tap_on(reducer.launch(shot, "gallery"), "Screenshot 1"),
        *(browse(address) for address in WEB_PAGES),
        browse("soup"),
        browse("nowhere.example"),
        drawer(),
        searched("ma"),
        searched("zzz"),
        hold(searched("podcasts"), "Podcasts"),
        tap_on(hold(searched("podcasts"), "Podcasts"), "Uninstall"),
        hold(home(), "Mail"),
        reducer.hold(home(), 96, 285),
        tap_on(reducer.hold(home(), 96, 285), "Wallpapers"),
        tap_on(reducer.hold(home(), 96, 285), "Wallpapers", "Teal"),
        tap_on(searched("podcasts"), "Podcasts"),
        tap_on(hold(home(), "Mail"), "Group"),
        tap_on(hold(home(), "Mail"), "Group", "Settings"),
        foldered(),
        tap_on(foldered(), "Work"),
        tap_on(foldered(), "Work", "Rename"),
    ]


def test_every_screen_draws_in_light_and_dark_and_the_two_differ() -> None:
    for state in every_screen():
        light = draw_phone(state.with_toggle(Toggle.DARK_THEME, False), 1)
        dark = draw_phone(state.with_toggle(Toggle.DARK_THEME, True), 1)

        assert light.tobytes() != dark.tobytes() or state.screen.startswith("home/wallpaper:"), state.screen


def test_every_tappable_element_is_hit_at_its_centre_and_has_a_unique_id() -> None:
    for state in every_screen():
        screen = build_screen(state)
        shown = [item for item in (*screen.fixed, *screen.visible_content()) if item.is_tappable]

        assert len({item.element_id for item in shown}) == len(shown), state.screen
        for item in shown:
            assert screen.element_at(*item.rect.centre) == item, (state.screen, item.label)


def test_every_query_and_lookup_answers_on_every_screen() -> None:
    for state in every_screen():
        for name in QUERIES:
            assert isinstance(query(state, name), str)
        for name in set(LOOKUPS) - {"quick_tile", "brightness_is_about", "media_volume_is_about"}:
            assert isinstance(query(state, f"{name}:Emma"), str), name


def test_back_leads_from_every_screen_to_the_home_screen() -> None:
    for state in every_screen():
        for _ in range(8):
            state = reducer.press(state, Button.BACK)

        assert (state.screen, state.draft, state.form) == ("home", "", ())


def test_a_contact_is_saved_from_two_fields_typed_in_any_order() -> None:
    form = opened("contacts", "New")
    one_way = typed(form, Name="Zoe", Number="5550")
    other_way = typed(form, Number="5550", Name="Zoe")

    assert query(one_way, "typed") == query(other_way, "typed") == "name=Zoe number=5550"
    assert query(tap_on(one_way, "Save"), "contact_number:Zoe") == "5550"
    assert query(tap_on(other_way, "Save"), "current_screen") == "contacts/person:Zoe"
    assert tap_on(typed(form, Name="Zoe"), "Save").apps == form.apps


def test_what_is_typed_into_a_form_is_gone_after_leaving_it() -> None:
    form = typed(opened("contacts", "New"), Name="Zoe", Number="5550")
    left = reducer.press(reducer.press(form, Button.BACK), Button.BACK)

    assert query(tap_on(left, "New"), "typed") == ""


def test_a_dialled_number_can_be_called_and_saved() -> None:
    called = opened("phone", "5", "0", "Call")
    saved = tap_on(reducer.type_text(opened("phone", "5", "0", "Add"), "Zoe"), "Save")

    assert (called.calls, query(called, "callee")) == (("50",), "50")
    assert query(tap_on(called, "End"), "current_screen") == "phone"
    assert query(saved, "contact_number:Zoe") == "50"
    assert saved.dialled == ""


def test_a_contact_is_called_and_written_to_from_the_entry() -> None:
    person = opened("contacts", "Emma")
    sent = tap_on(reducer.type_text(tap_on(person, "Message", "Message"), "Hi"), "Send")

    assert query(tap_on(person, "Call"), "called_numbers") == '["5551234"]'
    assert {"to": "Emma", "text": "Hi"} in json.loads(query(sent, "sent_messages"))
    assert query(sent, "current_app") == "com.android.messaging"
    assert query(tap_on(person, "Delete"), "contact_number:Emma") == ""


def test_a_message_to_somebody_new_starts_a_conversation_and_an_unsent_one_is_a_draft() -> None:
    draft = reducer.type_text(opened("messages", "New", "Emma", "Message"), "Hi")
    sent = reducer.enter_key(draft)

    assert query(draft, "message_draft:Emma") == "Hi"
    assert query(sent, "message_draft:Emma") == ""
    assert sent.threads[-1].contact == "Emma"
    assert query(reducer.enter_key(reducer.type_text(sent, "Again")), "sent_messages").count('"Emma"') == 2


def test_an_alarm_is_set_and_a_wrong_time_is_not() -> None:
    form = opened("clock", "New")

    assert query(tap_on(typed(form, Hour="7", Minute="05"), "Save"), "is_alarm_on:07:05") == "true"
    for hour, minute in (("24", "00"), ("7", "60"), ("", "5"), ("x", "5")):
        assert tap_on(typed(form, Hour=hour, Minute=minute), "Save").screen == "clock/new"


def test_an_alarm_that_is_set_twice_is_one_alarm() -> None:
    once = tap_on(typed(opened("clock", "New"), Hour="7", Minute="05"), "Save")
    twice = tap_on(typed(tap_on(once, "New"), Hour="07", Minute="5"), "Save")

    assert once.apps.alarms == twice.apps.alarms
    assert query(tap_on(twice, "07:05"), "is_alarm_on:07:05") == "false"


def test_the_timer_runs_until_it_is_stopped() -> None:
    running = tap_on(reducer.type_text(opened("clock", "Timer"), "12"), "Start")

    # 12 minutes of 60 seconds.
    assert query(running, "timer_s") == "720"
    assert query(tap_on(running, "Stop"), "timer_s") == "0"


def test_folders_are_made_and_deleted_with_what_they_hold() -> None:
    made = tap_on(reducer.type_text(opened("files", "Downloads", "old", "New"), "abc"), "Create")
    outer = reducer.press(made, Button.BACK)

    assert query(made, "file_exists:/sdcard/Download/old/abc") == "true"
    assert query(made, "file_exists:/storage/emulated/0/Download/old/abc") == "true"
    assert query(made, "file_exists:/sdcard/Download/abc") == "false"
    gone = tap_on(tap_on(outer, "old"), "Delete")
    assert query(gone, "file_exists:/sdcard/Download/old") == "false"
    assert query(gone, "file_exists:/sdcard/Download/old/abc") == "false"


def test_a_file_of_the_seed_can_be_deleted_and_is_counted() -> None:
    state = opened("files")
    folder = next(item for item in build_screen(state).content if item.label == "Documents")
    num_files = int(folder.detail.split()[0])
    state = tap_on(tap_on(state, "Documents"), "Letter 1.pdf", "Delete")

    assert query(state, "file_exists:/sdcard/Documents/Letter 1.pdf") == "false"
    listing = build_screen(reducer.press(state, Button.BACK)).content
    assert next(item for item in listing if item.label == "Documents").detail == f"{num_files - 1} files"


def test_the_address_bar_opens_addresses_and_searches_for_everything_else() -> None:
    assert read_address(" https://www.News.example/ ") == "news.example"
    assert read_address("lentil soup") == "search:lentil soup"
    assert query(browse("news.example"), "current_url") == "news.example"
    assert query(browse("lentil soup"), "current_search") == "lentil soup"
    # "lentil" and "soup" are both on two pages, those of soup and of recipes.
    assert {page.title for page in find_pages("lentil soup")} == {"Soup", "Recipes"}
    assert query(tap_on(browse("lentil soup"), "Soup"), "current_url") == "soup.example"


def test_every_link_and_bookmark_leads_to_a_page() -> None:
    assert all(link in WEB_PAGES for page in WEB_PAGES.values() for link in page.links)


def test_a_download_lies_in_files_and_says_so() -> None:
    state = tap_on(browse("brand.example"), "Download")

    assert query(state, "file_exists:/sdcard/Download/logo.svg") == "true"
    assert "Saved in Downloads" in [item.label for item in build_screen(state).content]
    assert element(tap_on(reducer.launch(state, "files"), "Downloads"), "logo.svg")


def test_a_screenshot_is_taken_from_recent_apps_or_with_two_buttons() -> None:
    recents = tap_on(reducer.press(opened("maps"), Button.RECENTS), "Screenshot")

    assert query(recents, "screenshots") == '["maps"]'
    assert element(reducer.launch(recents, "gallery"), "Screenshot 1")


async def test_power_and_volume_down_together_take_a_screenshot() -> None:
    phone = SimulatedPhone(opened("maps"))
    await phone.execute(PressKey(keys=("power", "volume_down")))

    assert await phone.query("screenshots") == '["maps"]'


def test_the_drawer_has_every_installed_app_and_finds_by_name() -> None:
    labels = [item.label for item in build_screen(drawer()).content]

    assert len(labels) == len(home().system.apps)
    assert {spec.label for spec in APPS.values()} <= set(labels)
    assert [item.label for item in build_screen(searched("ma")).content] == ["Mail", "Maps"]


def test_an_app_from_the_drawer_goes_to_the_free_place_and_comes_off_again() -> None:
    pinned = tap_on(hold(searched("maps"), "Maps"), "Add")
    place = next(place for place in pinned.home_pages[1] if place.app == "maps")

    assert query(home(), "on_home:com.android.maps") == "false"
    assert query(pinned, "home_page_of:com.android.maps") == "1"
    others = [icon for icon in pinned.home_pages[1] if icon != place]
    assert all(abs(icon.x - place.x) > 40 or abs(icon.y - place.y) > 40 for icon in others)
    assert query(tap_on(hold(replace(pinned, home_page=1), "Maps"), "Remove"), "on_home:com.android.maps") == "false"


def test_an_icon_moves_to_the_page_with_room_and_to_a_new_page_without() -> None:
    moved = tap_on(hold(home(), "Mail"), "Move")
    assert query(moved, "home_page_of:com.android.email") == "1"

    full = replace(make_phone_state(3, replace(START, apps=AppStart())), home_page=0)
    assert query(tap_on(hold(full, "Mail"), "Move"), "home_page_of:com.android.email") == "2"


def test_a_folder_takes_two_icons_opens_them_and_is_renamed() -> None:
    labels = [item.label for item in build_screen(foldered()).content]
    renamed = reducer.enter_key(reducer.type_text(tap_on(foldered(), "Work", "Rename"), "Post"))

    assert "Work" in labels
    assert not {"Mail", "Settings"} & set(labels)
    assert query(foldered(), "home_folder:Work") == "com.android.email com.android.settings"
    assert query(tap_on(foldered(), "Work", "Mail"), "current_app") == "com.android.email"
    assert query(renamed, "home_folder:Work") == ""
    assert query(renamed, "home_folder:Post") == "com.android.email com.android.settings"


def test_a_folder_needs_a_name_of_its_own() -> None:
    names = [item.label for item in build_screen(foldered()).content if item.label != "Work"]
    form = tap_on(hold(foldered(), names[0]), "Group", names[1])

    assert tap_on(form, "Create") == form
    taken = reducer.type_text(form, "Work")
    assert tap_on(taken, "Create") == taken


def test_an_uninstalled_app_leaves_its_folder() -> None:
    pinned = tap_on(hold(searched("podcasts"), "Podcasts"), "Add")
    page = pinned.home_pages[1]
    other = APPS[next(icon.app for icon in page if icon.app != "podcasts")].label
    grouped = tap_on(hold(replace(pinned, home_page=1), "Podcasts"), "Group", other)
    grouped = tap_on(reducer.type_text(grouped, "Mix"), "Create")
    menu = reducer.type_text(tap_on(reducer.drag(grouped, 96, 260, 96, 80), "Search"), "podcasts")
    gone = tap_on(hold(menu, "Podcasts"), "Uninstall", "OK")

    assert len(query(grouped, "home_folder:Mix").split()) == 2
    assert len(query(gone, "home_folder:Mix").split()) == 1


async def test_an_uninstalled_app_is_nowhere_any_more() -> None:
    pinned = tap_on(hold(searched("podcasts"), "Podcasts"), "Add")
    used = reducer.press(reducer.launch(pinned, "podcasts"), Button.HOME)
    menu = hold(reducer.type_text(tap_on(reducer.drag(used, 96, 260, 96, 80), "Search"), "podcasts"), "Podcasts")
    gone = tap_on(menu, "Uninstall", "OK")

    assert query(gone, "app_installed:com.example.podcasts") == "false"
    assert "podcasts" not in gone.recent_apps
    assert query(gone, "on_home:com.example.podcasts") == "false"
    with pytest.raises(ActionRejected, match="Podcasts"):
        await SimulatedPhone(gone).execute(OpenApp(name="Podcasts"))


def test_an_app_of_the_system_cannot_be_uninstalled() -> None:
    labels = [item.label for item in build_screen(hold(home(), "Mail")).fixed]

    assert "Remove" in labels
    assert "Uninstall" not in labels


def test_a_tap_beside_a_menu_closes_it() -> None:
    assert reducer.tap(hold(home(), "Mail"), 96, 60).screen == "home"


async def test_the_wallpaper_is_changed_from_the_free_place_of_the_home_screen() -> None:
    phone = SimulatedPhone(make_phone_state(3, replace(START, system=SystemStart(not_wallpaper=2))))
    await phone.execute(LongPress(x=96, y=285))
    before, after = phone.state, tap_on(phone.state, "Wallpapers", "Teal", "Set")

    assert query(before, "wallpaper") != "Teal"
    assert (query(after, "wallpaper"), after.screen) == ("Teal", "home")


def test_the_keyboard_has_capitals_and_digits() -> None:
    state = tap_on(opened("notes", "New"), "Aa", "H", "aA", "i", "?123", "4", "abc", "x")

    assert state.draft == "Hi4x"


def test_number_fields_open_with_digits() -> None:
    assert query(tap_on(opened("clock", "Timer"), "1", "5", "Enter"), "timer_s") == "900"
