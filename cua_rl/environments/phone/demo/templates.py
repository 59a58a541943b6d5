"""The table of demo tasks: evaluation asks for words, names and levels that training has not.

The embedded demo runs those tagged "demo".
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from cua_rl.environments.phone.demo.families import apps, basic, content, graded, launcher, settings, system
from cua_rl.environments.phone.demo.template import NUM_INSTANCES, TaskTemplate
from cua_rl.environments.phone.simulator import catalog
from cua_rl.tasks.goal import Goal

_TRAINING = apps.Pool(
    people=("Ada", "Ben", "Emma", "Farid", "Grace", "Hugo", "Ines"),
    strangers=("Otto", "Paula", "Quinn", "Rosa", "Selma"),
    texts=("Running late", "On my way", "Call me later", "Happy birthday", "See you at noon"),
    notes=("Pay the rent", "Fix the bike", "Order coffee", "Plan the trip", "Clean the desk"),
    folders=("abc", "letters", "taxes", "garden", "old"),
    searches=("lentil soup", "tomatoes", "train delays", "summer stories"),
    addresses=("recipes.example", "trains.example", "garden.example", "cinema.example"),
    tracks=("Blue Hour", "Paper Boats", "Northern Line", "Slow River"),
    minutes=(5, 20, 35, 50),
)
_EVALUATION = apps.Pool(
    people=("Chloe", "David", "Jonas", "Kira", "Liam", "Mina", "Noah"),
    strangers=("Tara", "Uma", "Viktor", "Wanda"),
    texts=("Thanks a lot", "Where are you?", "Dinner at seven", "Good luck today"),
    notes=("Renew the pass", "Buy stamps", "Sell the sofa", "Ask about keys"),
    folders=("xyz", "photos", "school", "recipes"),
    searches=("apple cake", "museum sunday", "new books"),
    addresses=("news.example", "library.example", "museum.example", "weather.example"),
    tracks=("Glass Garden", "Late Train", "Saffron", "Low Tide"),
    minutes=(10, 25, 40, 55),
)
_TRAINING_APPS = ("mail", "notes", "calendar", "maps", "calculator")
_EVAL_APPS = ("music", "weather", "clock", "contacts")
STORE_TRAINING = ("instagram", "podcasts", "fitness", "scanner")
STORE_EVAL = ("facebook", "recipes", "trains", "radio")

APP_TRAINING: tuple[TaskTemplate, ...] = (
    launcher.find_settings_in_drawer("train_26_find_settings_in_drawer"),
    launcher.search_app("train_27_search_app_in_launcher", _TRAINING_APPS),
    content.open_website("train_49_open_website_chrome", _TRAINING),
    content.search_web("train_50_search_in_chrome", _TRAINING),
    apps.add_contact_from_phone("train_52_add_contact_from_phone", _TRAINING),
    apps.search_contact("train_54_search_contact", _TRAINING),
    launcher.take_screenshot("train_63_take_screenshot", _TRAINING_APPS),
    launcher.open_last_screenshot("train_64_open_last_screenshot", _TRAINING_APPS),
    launcher.uninstall_app("train_65_uninstall_app_home", STORE_TRAINING, _TRAINING_APPS),
    launcher.pin_app("train_66_pin_app_to_home", _TRAINING_APPS),
    launcher.move_icon("train_67_move_icon_between_pages", _TRAINING_APPS),
    launcher.create_app_folder("train_68_create_app_folder", _TRAINING_APPS, ("Daily", "Work", "Tools")),
    launcher.rename_folder("train_69_rename_folder", _TRAINING_APPS, ("Daily", "Work", "Tools", "Stuff")),
    launcher.change_wallpaper("train_71_change_wallpaper_home", (0, 1, 2, 3)),
    content.create_folder("train_150_create_downloads_folder", _TRAINING.folders),
    content.download_file("train_151_download_logo", ("brand.example",), what="logo"),
    apps.set_alarm("train_152_set_alarm", _TRAINING),
    apps.switch_alarm("train_153_switch_off_alarm", _TRAINING, turn_on=False),
    apps.start_timer("train_154_start_timer", _TRAINING),
    apps.call_number("train_155_call_number"),
    apps.call_contact("train_156_call_contact", _TRAINING),
    apps.reply_to("train_157_send_message", _TRAINING),
    apps.message_contact("train_158_message_contact", _TRAINING),
    apps.write_drawn_note("train_159_write_drawn_note", _TRAINING),
    apps.delete_note("train_160_delete_note", _TRAINING),
    content.take_photo("train_161_take_photo"),
    content.open_photo("train_162_open_photo"),
    content.count_photos("train_163_count_photos"),
    content.calculate("train_164_calculate_sum", "+"),
    content.play_track("train_165_play_track", _TRAINING),
    apps.tell_contact_number("train_166_tell_contact_number", _TRAINING),
    apps.add_contact("train_167_add_contact", _TRAINING),
    apps.delete_contact("train_168_delete_contact", _TRAINING),
    content.delete_folder("train_169_delete_folder", _TRAINING.folders),
    content.follow_link("train_170_follow_link", ("news.example", "recipes.example")),
    launcher.unpin_app("train_171_unpin_app", _TRAINING_APPS),
)
APP_EVAL: tuple[TaskTemplate, ...] = (
    content.create_folder("eval_16_create_downloads_folder_xyz", ("xyz",)),
    launcher.take_and_open_screenshot("eval_17_take_and_open_screenshot", _EVAL_APPS),
    apps.draft_reply("eval_18_compose_sms_draft", _EVALUATION),
    content.download_file("eval_60_download_logo", ("studio.example",), what="logo"),
    content.download_file(
        "eval_61_download_document", ("map.example", "books.example", "museum.example"), what="document"
    ),
    launcher.search_app("eval_62_search_app_in_launcher", _EVAL_APPS),
    content.open_website("eval_63_open_website_chrome", _EVALUATION),
    content.search_web("eval_64_search_in_chrome", _EVALUATION),
    apps.add_contact_from_phone("eval_65_add_contact_from_phone", _EVALUATION),
    apps.search_contact("eval_66_search_contact", _EVALUATION),
    launcher.uninstall_app("eval_67_uninstall_app_home", STORE_EVAL, _EVAL_APPS),
    launcher.pin_app("eval_68_pin_app_to_home", _EVAL_APPS),
    launcher.move_icon("eval_69_move_icon_between_pages", _EVAL_APPS),
    launcher.change_wallpaper("eval_70_change_wallpaper_home", (4, 5)),
    apps.set_alarm("eval_71_set_alarm", _EVALUATION),
    apps.switch_alarm("eval_72_switch_on_alarm", _EVALUATION, turn_on=True),
    apps.start_timer("eval_73_start_timer", _EVALUATION),
    apps.call_contact("eval_74_call_contact", _EVALUATION),
    apps.message_contact("eval_75_message_contact", _EVALUATION),
    apps.write_drawn_note("eval_76_write_drawn_note", _EVALUATION),
    apps.delete_note("eval_77_delete_note", _EVALUATION),
    content.calculate("eval_78_calculate_product", "*"),
    content.play_track("eval_79_play_track", _EVALUATION),
    apps.tell_contact_number("eval_80_tell_contact_number", _EVALUATION),
    content.create_folder("eval_81_create_folder", _EVALUATION.folders),
    content.follow_link("eval_82_follow_link", ("trains.example", "library.example")),
    launcher.create_app_folder("eval_84_create_app_folder", _EVAL_APPS, ("Mix", "Extras", "Fun")),
    launcher.rename_folder("eval_85_rename_folder", _EVAL_APPS, ("Mix", "Extras", "Fun", "More")),
    apps.delete_contact("eval_83_delete_contact", _EVALUATION),
)

GRADED_TRAINING: tuple[TaskTemplate, ...] = (
    graded.open_notifications_over_app("train_172_open_notifications_over_app", _TRAINING_APPS),
    graded.open_quick_settings_over_app("train_173_open_quick_settings_over_app", _TRAINING_APPS),
    graded.count_notifications("train_174_count_notifications"),
    graded.screenshot_from_drawer("train_175_screenshot_from_drawer", _TRAINING_APPS),
    graded.take_two_screenshots("train_176_take_two_screenshots", _TRAINING_APPS),
    graded.uninstall_from_drawer("train_177_uninstall_app_drawer", STORE_TRAINING),
    graded.move_icon_back("train_178_move_icon_to_first_page", _TRAINING_APPS),
    graded.through_drawer("train_179_play_track_through_drawer", "music", content.play_track("", _TRAINING)),
    graded.through_drawer(
        "train_180_switch_off_alarm_through_drawer", "clock", apps.switch_alarm("", _TRAINING, turn_on=False)
    ),
    graded.through_drawer("train_181_delete_note_through_drawer", "notes", apps.delete_note("", _TRAINING)),
    graded.through_drawer("train_182_call_contact_through_drawer", "contacts", apps.call_contact("", _TRAINING)),
    graded.through_drawer("train_183_open_photo_through_drawer", "gallery", content.open_photo("")),
    graded.in_open_app("train_184_search_in_open_contacts", "contacts", apps.search_contact("", _TRAINING)),
    graded.in_open_app("train_185_open_website_in_open_chrome", "chrome", content.open_website("", _TRAINING)),
    graded.in_open_app("train_186_search_in_open_chrome", "chrome", content.search_web("", _TRAINING)),
    graded.in_open_app("train_187_start_timer_in_open_clock", "clock", apps.start_timer("", _TRAINING)),
    graded.type_number("train_188_type_number"),
    replace(apps.call_number("train_189_call_long_number", 9), max_turns=15),
    replace(content.calculate("train_190_calculate_long_sum", "+", 3), max_turns=15),
)
GRADED_EVAL: tuple[TaskTemplate, ...] = (
    graded.open_notifications_over_app("eval_86_open_notifications_over_app", _EVAL_APPS),
    graded.open_quick_settings_over_app("eval_87_open_quick_settings_over_app", _EVAL_APPS),
    launcher.take_screenshot("eval_88_take_screenshot", _EVAL_APPS),
    graded.screenshot_from_drawer("eval_89_screenshot_from_drawer", _EVAL_APPS),
    graded.take_two_screenshots("eval_90_take_two_screenshots", _EVAL_APPS),
    graded.uninstall_from_drawer("eval_91_uninstall_app_drawer", STORE_EVAL),
    graded.move_icon_back("eval_92_move_icon_to_first_page", _EVAL_APPS),
    graded.through_drawer("eval_93_play_track_through_drawer", "music", content.play_track("", _EVALUATION)),
    graded.through_drawer(
        "eval_94_switch_on_alarm_through_drawer", "clock", apps.switch_alarm("", _EVALUATION, turn_on=True)
    ),
    graded.through_drawer("eval_95_delete_note_through_drawer", "notes", apps.delete_note("", _EVALUATION)),
    graded.through_drawer("eval_96_call_contact_through_drawer", "contacts", apps.call_contact("", _EVALUATION)),
    graded.in_open_app("eval_97_search_in_open_contacts", "contacts", apps.search_contact("", _EVALUATION)),
    graded.in_open_app("eval_98_open_website_in_open_chrome", "chrome", content.open_website("", _EVALUATION)),
    graded.in_open_app("eval_99_search_in_open_chrome", "chrome", content.search_web("", _EVALUATION)),
    graded.in_open_app("eval_100_start_timer_in_open_clock", "clock", apps.start_timer("", _EVALUATION)),
    graded.through_drawer("eval_101_call_number_drawer", "phone", replace(apps.call_number("", 8), max_turns=12)),
    replace(content.calculate("eval_102_calculate_long_product", "*", 4), max_turns=15),
)
"""Both add tasks to combinations of category and difficulty that would otherwise have few."""

_TRAINING_NETWORKS, _EVAL_NETWORKS = catalog.NETWORKS[:9], catalog.NETWORKS[9:]
_TRAINING_LANGUAGES, _EVAL_LANGUAGES = tuple(catalog.LANGUAGES)[1:8], tuple(catalog.LANGUAGES)[8:]
_TRAINING_WALLPAPERS, _EVAL_WALLPAPERS = catalog.WALLPAPER_NAMES[:4], catalog.WALLPAPER_NAMES[4:]
_SYSTEM_TRAINING_APPS, _SYSTEM_EVAL_APPS = (
    ("calendar", "chrome", "mail", "maps", "messages", "music"),
    ("clock", "files", "weather"),
)
_TRAINING_LEVELS, _EVAL_LEVELS = (20, 30, 40, 60, 70), (25, 35, 65, 75)

SYSTEM_TRAINING: tuple[TaskTemplate, ...] = (
    settings.open_system_page("train_12_open_wifi_settings", "Open the Wi-Fi settings.", "wifi", "wifi_page"),
    settings.open_system_page(
        "train_13_open_bluetooth_settings", "Open the Bluetooth settings.", "bluetooth", "bluetooth_page"
    ),
    system.open_quick_settings("train_28_open_quick_settings"),
    system.switch_quick_tile("train_29_toggle_wifi_quick_settings", catalog.Toggle.WIFI),
    system.switch_quick_tile("train_30_toggle_bluetooth_quick_settings", catalog.Toggle.BLUETOOTH),
    system.switch_quick_tile("train_31_enable_dnd_quick_settings", catalog.Toggle.DO_NOT_DISTURB, turn_on=True),
    system.switch_quick_tile("train_32_disable_dnd_quick_settings", catalog.Toggle.DO_NOT_DISTURB, turn_on=False),
    system.open_notifications("train_33_open_notifications"),
    system.clear_notifications("train_34_clear_notifications"),
    settings.open_system_page(
        "train_38_open_language_input", "Open the language and input settings.", "language", "language"
    ),
    settings.open_system_page("train_44_open_storage_settings", "Open the storage settings.", "storage", "storage"),
    system.open_app_info("train_45_open_chrome_app_info", "chrome"),
    system.force_stop("train_46_force_stop_chrome", "chrome"),
    system.clear_cache("train_47_clear_chrome_cache", "chrome"),
    settings.open_system_page(
        "train_55_open_screen_lock_settings",
        "Open the screen lock settings.",
        "screen_lock",
        "security",
        settings.tap_on("security", "Lock"),
    ),
    settings.connect_known_wifi("train_58_connect_known_wifi", _TRAINING_NETWORKS),
    settings.forget_wifi("train_59_forget_wifi_network", _TRAINING_NETWORKS),
    settings.change_language("train_60_change_system_language", _TRAINING_LANGUAGES),
    settings.change_wallpaper("train_70_change_wallpaper_settings", _TRAINING_WALLPAPERS),
    system.switch_quick_tile("train_72_enable_airplane_quick", catalog.Toggle.AIRPLANE_MODE, turn_on=True),
    system.switch_quick_tile("train_73_disable_airplane_quick", catalog.Toggle.AIRPLANE_MODE, turn_on=False),
    settings.open_system_page(
        "train_74_open_developer_options", "Open the developer options.", "developer", "developer"
    ),
    settings.switch_usb_debugging("train_75_enable_usb_debugging", turn_on=True),
    settings.switch_usb_debugging("train_76_disable_usb_debugging", turn_on=False),
    system.switch_app_notifications("train_77_enable_app_notifications", _SYSTEM_TRAINING_APPS, turn_on=True),
    system.switch_app_notifications("train_78_disable_app_notifications", _SYSTEM_TRAINING_APPS, turn_on=False),
    settings.switch_call_vibration("train_79_enable_call_vibration", turn_on=True),
    settings.switch_call_vibration("train_80_disable_call_vibration", turn_on=False),
    system.uninstall_app("train_121_uninstall_app", STORE_TRAINING),
    system.check_app_storage("train_122_check_app_storage", _SYSTEM_TRAINING_APPS),
    settings.set_brightness("train_123_set_brightness", _TRAINING_LEVELS),
    settings.join_wifi("train_124_join_wifi", _TRAINING_NETWORKS),
    settings.set_media_volume("train_125_change_media_volume", _TRAINING_LEVELS),
    graded.through_drawer("train_126_join_wifi_drawer", "settings", settings.join_wifi("", _TRAINING_NETWORKS)),
)

SYSTEM_EVAL: tuple[TaskTemplate, ...] = (
    settings.change_language("eval_04_change_language", _EVAL_LANGUAGES),
    settings.connect_known_wifi("eval_09_connect_known_wifi", _EVAL_NETWORKS),
    settings.forget_wifi("eval_10_forget_wifi", _EVAL_NETWORKS),
    settings.change_wallpaper("eval_11_change_wallpaper", _EVAL_WALLPAPERS),
    settings.open_system_page(
        "eval_12_open_developer_options", "Open the developer options.", "developer", "developer"
    ),
    settings.switch_usb_debugging("eval_13_enable_usb_debugging", turn_on=True),
    settings.switch_usb_debugging("eval_14_disable_usb_debugging", turn_on=False),
    system.switch_app_notifications("eval_15_enable_app_notifications", _SYSTEM_EVAL_APPS, turn_on=True),
    system.switch_app_notifications("eval_16_disable_app_notifications", _SYSTEM_EVAL_APPS, turn_on=False),
    settings.set_media_volume("eval_19_change_media_volume", _EVAL_LEVELS),
    system.uninstall_app("eval_121_uninstall_app", STORE_EVAL),
    system.check_app_storage("eval_122_check_app_storage", _SYSTEM_EVAL_APPS),
    settings.set_brightness("eval_123_set_brightness", _EVAL_LEVELS),
    settings.join_wifi("eval_124_join_wifi", _EVAL_NETWORKS),
    system.switch_quick_tile("eval_125_enable_auto_rotate_quick", catalog.Toggle.AUTO_ROTATE, turn_on=True),
    system.switch_quick_tile("eval_126_disable_auto_rotate_quick", catalog.Toggle.AUTO_ROTATE, turn_on=False),
    system.switch_quick_tile("eval_127_enable_battery_saver_quick", catalog.Toggle.BATTERY_SAVER, turn_on=True),
    system.switch_quick_tile("eval_128_disable_battery_saver_quick", catalog.Toggle.BATTERY_SAVER, turn_on=False),
    settings.open_system_page("eval_129_open_app_list", "Open the list of all apps in Settings.", "apps", "apps"),
    settings.open_system_page(
        "eval_130_open_wallpaper_settings", "Open the wallpaper settings.", "wallpaper", "wallpaper"
    ),
    settings.open_system_page("eval_131_open_security_settings", "Open the security settings.", "security", "security"),
    graded.through_drawer("eval_132_uninstall_app_drawer", "settings", system.uninstall_app("", STORE_EVAL)),
    graded.through_drawer("eval_133_join_wifi_drawer", "settings", settings.join_wifi("", _EVAL_NETWORKS)),
)

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
    (catalog.Toggle.WIFI, True): ("train_02_enable_wifi", "eval_37_enable_wifi"),
    (catalog.Toggle.WIFI, False): ("train_09_disable_wifi", "eval_38_disable_wifi"),
    (catalog.Toggle.BLUETOOTH, True): ("train_08_enable_bluetooth", "eval_39_enable_bluetooth"),
    (catalog.Toggle.BLUETOOTH, False): ("train_10_disable_bluetooth", "eval_40_disable_bluetooth"),
    (catalog.Toggle.AIRPLANE_MODE, True): ("train_05_airplane_mode", "eval_41_airplane_mode"),
    (catalog.Toggle.AIRPLANE_MODE, False): ("train_90_disable_airplane_mode", "eval_42_disable_airplane_mode"),
    (catalog.Toggle.DARK_THEME, True): ("train_61_enable_dark_theme", "eval_05_enable_dark_theme"),
    (catalog.Toggle.DARK_THEME, False): ("train_62_disable_dark_theme", "eval_06_disable_dark_theme"),
    (catalog.Toggle.BATTERY_SAVER, True): ("train_42_enable_battery_saver", "eval_07_enable_battery_saver"),
    (catalog.Toggle.BATTERY_SAVER, False): ("train_43_disable_battery_saver", "eval_08_disable_battery_saver"),
    (catalog.Toggle.LOCATION, True): ("train_56_enable_location", "eval_43_enable_location"),
    (catalog.Toggle.LOCATION, False): ("train_57_disable_location", "eval_44_disable_location"),
    (catalog.Toggle.DO_NOT_DISTURB, True): ("train_91_dnd_mode_enable", "eval_02_dnd_mode_enable"),
    (catalog.Toggle.DO_NOT_DISTURB, False): ("train_92_dnd_mode_disable", "eval_03_dnd_mode_disable"),
    (catalog.Toggle.AUTO_ROTATE, True): ("train_18_enable_auto_rotate", "eval_20_enable_auto_rotate"),
    (catalog.Toggle.AUTO_ROTATE, False): ("train_19_disable_auto_rotate", "eval_45_disable_auto_rotate"),
}


BASIC: tuple[TaskTemplate, ...] = (
    *(basic.open_app(f"train_{name}", app) for app, name in _OPEN_APP_IDS.items()),
    *(basic.toggle_setting(ids[0], toggle, turn_on=on) for (toggle, on), ids in _TOGGLE_IDS.items()),
    *(basic.open_app(f"eval_{i}_{name[3:]}", app) for i, (app, name) in enumerate(_OPEN_APP_IDS.items(), start=21)),
    *(basic.toggle_setting(ids[1], toggle, turn_on=on) for (toggle, on), ids in _TOGGLE_IDS.items()),
    *(
        basic.set_slider(
            task_id, instruction, "display", "Brightness", query="brightness_level", value=value, share=share
        )
        for task_id, instruction, value, share in (
            ("train_03_max_brightness", "Set the brightness to maximum.", catalog.MAX_BRIGHTNESS, 1.0),
            ("train_11_min_brightness", "Set the brightness to minimum.", catalog.MIN_BRIGHTNESS, 0.0),
        )
    ),
    *(
        basic.set_slider(task_id, instruction, "sound", "Volume", query="media_volume", value=value, share=share)
        for task_id, instruction, value, share in (
            ("train_16_max_media_volume", "Set the media volume to maximum.", catalog.MAX_VOLUME, 1.0),
            ("train_17_mute_media_volume", "Mute the media volume.", 0, 0.0),
        )
    ),
    basic.check_battery("train_06_check_battery"),
    basic.go_home("train_07_go_home"),
    basic.open_settings_page("train_14_open_display_settings", "display"),
    basic.open_settings_page("train_15_open_sound_settings", "sound"),
    basic.open_recents("train_20_open_recents"),
    basic.switch_to_app("train_21_switch_to_settings", "settings"),
    basic.set_screen_timeout("train_35_timeout_30s", 30_000),
    basic.set_screen_timeout("train_36_timeout_1min", 60_000),
    basic.set_screen_timeout("train_37_timeout_2min", 120_000),
    basic.set_screen_timeout("eval_01_display_timeout_5min", 300_000),
    basic.set_screen_timeout("eval_46_display_timeout_15s", 15_000),
    basic.set_screen_timeout("eval_47_display_timeout_10min", 600_000),
    basic.open_settings_page("eval_48_open_about_phone", "about"),
    basic.go_to_home_page("eval_49_go_to_second_home_page", 1),
    basic.switch_to_app("eval_50_switch_to_clock", "clock"),
    basic.switch_to_app("eval_51_switch_to_weather", "weather"),
    basic.open_settings_page("train_39_open_date_time", "date"),
    basic.toggle_auto_time("train_40_enable_auto_time", turn_on=True),
    basic.toggle_auto_time("train_41_disable_auto_time", turn_on=False),
    basic.go_to_home_page("train_48_go_to_primary_home_page", 0),
    basic.send_message("train_51_compose_sms", "Emma", "Running late"),
    basic.write_note("train_93_write_note", "Buy bread"),
    basic.toggle_hidden_setting("train_94_enable_wifi_below", catalog.Toggle.WIFI, turn_on=True),
    basic.toggle_hidden_setting("train_95_enable_dark_theme_below", catalog.Toggle.DARK_THEME, turn_on=True),
    *(
        basic.open_app_on_page_two(f"train_{i}_open_{app}_page_two", app)
        for i, app in enumerate(list(catalog.APPS)[1:], start=101)
    ),
)


NEEDED_TURNS_PATH = Path(__file__).parent / "needed_turns.txt"
"""The turns of each task's expert, written by `scripts/needed_turns.py`; 0 until it knows a new task."""
_NEEDED_TURNS = dict(line.split() for line in NEEDED_TURNS_PATH.read_text(encoding="utf-8").splitlines())


def _with_level(template: TaskTemplate) -> TaskTemplate:
    counted = replace(template, needed_turns=int(_NEEDED_TURNS.get(template.task_id, 0)))
    return replace(counted, tags=(*template.tags, f"level_{counted.level}"))


TEMPLATES: dict[str, TaskTemplate] = {
    template.task_id: _with_level(template)
    for template in (*BASIC, *APP_TRAINING, *APP_EVAL, *SYSTEM_TRAINING, *SYSTEM_EVAL, *GRADED_TRAINING, *GRADED_EVAL)
}
DEMO_TRAINING: tuple[TaskTemplate, ...] = tuple(t for t in TEMPLATES.values() if t.task_id.startswith("train_"))
DEMO_EVAL: tuple[TaskTemplate, ...] = tuple(t for t in TEMPLATES.values() if t.task_id.startswith("eval_"))
EMBEDDED_TRAINING: tuple[TaskTemplate, ...] = tuple(t for t in DEMO_TRAINING if "demo" in t.tags)
EMBEDDED_EVAL: tuple[TaskTemplate, ...] = tuple(t for t in DEMO_EVAL if "demo" in t.tags)
"""What the tiny model was made for: apps on the first page, and settings that show without scrolling."""


@cache
def held_out_templates() -> tuple[TaskTemplate, ...]:
    """The evaluation templates that share no instruction and no goal with a training template.

    Without a seed that makes another device, nothing else separates held-out tasks from trained ones.
    """
    trained = _asked(DEMO_TRAINING)
    return tuple(template for template in DEMO_EVAL if trained.isdisjoint(_asked((template,))))


def _asked(templates: Iterable[TaskTemplate]) -> set[str | Goal]:
    instances = (template.instance(seed) for template in templates for seed in range(NUM_INSTANCES))
    return {asked for instance in instances for asked in (instance.instruction, instance.goal)}
