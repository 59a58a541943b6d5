"""The table of demo tasks. The embedded demo runs those tagged "demo"."""

from itertools import count

from cua_rl.devices.simulator.catalog import APPS, MAX_BRIGHTNESS, MAX_VOLUME, MIN_BRIGHTNESS, Toggle
from cua_rl.tasks.demo.app_templates import APP_EVAL, APP_TRAINING, GRADED_EVAL, GRADED_TRAINING
from cua_rl.tasks.demo.families import (
    check_battery,
    go_home,
    go_to_home_page,
    open_app,
    open_app_on_page_two,
    open_recents,
    open_settings_page,
    send_message,
    set_screen_timeout,
    set_slider,
    switch_to_app,
    toggle_auto_time,
    toggle_hidden_setting,
    toggle_setting,
    write_note,
)
from cua_rl.tasks.demo.system_templates import SYSTEM_EVAL, SYSTEM_TRAINING
from cua_rl.tasks.demo.template import TaskTemplate

_OPEN_APP_IDS = {
    "settings": "01_open_settings",
    "chrome": "04_open_chrome",
    "phone": "22_open_dialer",
    "messages": "23_open_messages",
    "camera": "24_open_camera",
    "gallery": "25_open_gallery",
    "contacts": "53_open_contacts",
    "mail": "81_open_mail",
    "notes": "82_open_notes",
    "clock": "83_open_clock",
    "calendar": "84_open_calendar",
    "maps": "85_open_maps",
    "music": "86_open_music",
    "files": "87_open_files",
    "calculator": "88_open_calculator",
    "weather": "89_open_weather",
}
_TOGGLE_IDS = {
    (Toggle.WIFI, True): ("train_02_enable_wifi", "eval_37_enable_wifi"),
    (Toggle.WIFI, False): ("train_09_disable_wifi", "eval_38_disable_wifi"),
    (Toggle.BLUETOOTH, True): ("train_08_enable_bluetooth", "eval_39_enable_bluetooth"),
    (Toggle.BLUETOOTH, False): ("train_10_disable_bluetooth", "eval_40_disable_bluetooth"),
    (Toggle.AIRPLANE_MODE, True): ("train_05_airplane_mode", "eval_41_airplane_mode"),
    (Toggle.AIRPLANE_MODE, False): ("train_90_disable_airplane_mode", "eval_42_disable_airplane_mode"),
    (Toggle.DARK_THEME, True): ("train_61_enable_dark_theme", "eval_05_enable_dark_theme"),
    (Toggle.DARK_THEME, False): ("train_62_disable_dark_theme", "eval_06_disable_dark_theme"),
    (Toggle.BATTERY_SAVER, True): ("train_42_enable_battery_saver", "eval_07_enable_battery_saver"),
    (Toggle.BATTERY_SAVER, False): ("train_43_disable_battery_saver", "eval_08_disable_battery_saver"),
    (Toggle.LOCATION, True): ("train_56_enable_location", "eval_43_enable_location"),
    (Toggle.LOCATION, False): ("train_57_disable_location", "eval_44_disable_location"),
    (Toggle.DO_NOT_DISTURB, True): ("train_91_dnd_mode_enable", "eval_02_dnd_mode_enable"),
    (Toggle.DO_NOT_DISTURB, False): ("train_92_dnd_mode_disable", "eval_03_dnd_mode_disable"),
    (Toggle.AUTO_ROTATE, True): ("train_18_enable_auto_rotate", "eval_20_enable_auto_rotate"),
    (Toggle.AUTO_ROTATE, False): ("train_19_disable_auto_rotate", "eval_45_disable_auto_rotate"),
}


def _training() -> list[TaskTemplate]:
    opening = [open_app(f"train_{name}", app) for app, name in _OPEN_APP_IDS.items()]
    toggling = [toggle_setting(ids[0], toggle, turn_on=on) for (toggle, on), ids in _TOGGLE_IDS.items()]
    return opening + toggling


def _evaluation() -> list[TaskTemplate]:
    names = (f"eval_{number}_{name[3:]}" for number, name in zip(count(21), _OPEN_APP_IDS.values(), strict=False))
    opening = [open_app(name, app) for name, app in zip(names, _OPEN_APP_IDS, strict=True)]
    toggling = [toggle_setting(ids[1], toggle, turn_on=on) for (toggle, on), ids in _TOGGLE_IDS.items()]
    return opening + toggling


def _more() -> list[TaskTemplate]:
    second_page = [app for app in APPS if app != "settings"]
    return [
        set_slider("train_03_max_brightness", "Set the brightness to maximum.", "display", "Brightness",
                   query="brightness_level", value=MAX_BRIGHTNESS, share=1.0),
        set_slider("train_11_min_brightness", "Set the brightness to minimum.", "display", "Brightness",
                   query="brightness_level", value=MIN_BRIGHTNESS, share=0.0),
        set_slider("train_16_max_media_volume", "Set the media volume to maximum.", "sound", "Volume",
                   query="media_volume", value=MAX_VOLUME, share=1.0),
        set_slider("train_17_mute_media_volume", "Mute the media volume.", "sound", "Volume",
                   query="media_volume", value=0, share=0.0),
        check_battery("train_06_check_battery"),
        go_home("train_07_go_home"),
        open_settings_page("train_14_open_display_settings", "display"),
        open_settings_page("train_15_open_sound_settings", "sound"),
        open_recents("train_20_open_recents"),
        switch_to_app("train_21_switch_to_settings", "settings"),
        set_screen_timeout("train_35_timeout_30s", 30_000),
        set_screen_timeout("train_36_timeout_1min", 60_000),
        set_screen_timeout("train_37_timeout_2min", 120_000),
        set_screen_timeout("eval_01_display_timeout_5min", 300_000),
        set_screen_timeout("eval_46_display_timeout_15s", 15_000),
        set_screen_timeout("eval_47_display_timeout_10min", 600_000),
        open_settings_page("eval_48_open_about_phone", "about"),
        go_to_home_page("eval_49_go_to_second_home_page", 1),
        switch_to_app("eval_50_switch_to_clock", "clock"),
        switch_to_app("eval_51_switch_to_weather", "weather"),
        open_settings_page("train_39_open_date_time", "date"),
        toggle_auto_time("train_40_enable_auto_time", turn_on=True),
        toggle_auto_time("train_41_disable_auto_time", turn_on=False),
        go_to_home_page("train_48_go_to_primary_home_page", 0),
        send_message("train_51_compose_sms", "Emma", "Running late"),
        write_note("train_93_write_note", "Buy bread"),
        toggle_hidden_setting("train_94_enable_wifi_below", Toggle.WIFI, turn_on=True),
        toggle_hidden_setting("train_95_enable_dark_theme_below", Toggle.DARK_THEME, turn_on=True),
        *(open_app_on_page_two(f"train_{i}_open_{app}_page_two", app) for i, app in enumerate(second_page, start=101)),
    ]  # fmt: skip


TEMPLATES: dict[str, TaskTemplate] = {
    template.task_id: template
    for template in (
        *_training(),
        *_evaluation(),
        *_more(),
        *APP_TRAINING,
        *APP_EVAL,
        *SYSTEM_TRAINING,
        *SYSTEM_EVAL,
        *GRADED_TRAINING,
        *GRADED_EVAL,
    )
}
DEMO_TRAINING: tuple[TaskTemplate, ...] = tuple(t for t in TEMPLATES.values() if t.task_id.startswith("train_"))
DEMO_EVAL: tuple[TaskTemplate, ...] = tuple(t for t in TEMPLATES.values() if t.task_id.startswith("eval_"))
EMBEDDED_TRAINING: tuple[TaskTemplate, ...] = tuple(t for t in DEMO_TRAINING if "demo" in t.tags)
EMBEDDED_EVAL: tuple[TaskTemplate, ...] = tuple(t for t in DEMO_EVAL if "demo" in t.tags)
"""What the tiny model was made for: apps on the first page, and settings that show without scrolling."""
