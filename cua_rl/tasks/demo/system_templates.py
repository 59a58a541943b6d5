"""The table of tasks on system pages and in the shade; evaluation asks for names and levels that training has not."""

from cua_rl.devices.simulator.catalog import LANGUAGES, NETWORKS, WALLPAPER_NAMES, Toggle
from cua_rl.tasks.demo.app_templates import STORE_EVAL, STORE_TRAINING
from cua_rl.tasks.demo.settings_families import (
    change_language,
    change_wallpaper,
    connect_known_wifi,
    forget_wifi,
    join_wifi,
    open_system_page,
    set_brightness,
    set_media_volume,
    switch_call_vibration,
    switch_usb_debugging,
    tap_on,
)
from cua_rl.tasks.demo.system_families import (
    check_app_storage,
    clear_cache,
    clear_notifications,
    force_stop,
    open_app_info,
    open_notifications,
    open_quick_settings,
    switch_app_notifications,
    switch_quick_tile,
    toggle_quick_tile,
    uninstall_app,
)
from cua_rl.tasks.demo.template import TaskTemplate

_TRAINING_NETWORKS, _EVAL_NETWORKS = NETWORKS[:9], NETWORKS[9:]
_TRAINING_LANGUAGES, _EVAL_LANGUAGES = tuple(LANGUAGES)[1:8], tuple(LANGUAGES)[8:]
_TRAINING_WALLPAPERS, _EVAL_WALLPAPERS = WALLPAPER_NAMES[:4], WALLPAPER_NAMES[4:]
_TRAINING_APPS, _EVAL_APPS = ("calendar", "chrome", "mail", "maps", "messages", "music"), ("clock", "files", "weather")
_TRAINING_LEVELS, _EVAL_LEVELS = (20, 30, 40, 60, 70), (25, 35, 65, 75)

SYSTEM_TRAINING: tuple[TaskTemplate, ...] = (
    open_system_page("train_12_open_wifi_settings", "Open the Wi-Fi settings.", "wifi", "wifi_page"),
    open_system_page("train_13_open_bluetooth_settings", "Open the Bluetooth settings.", "bluetooth", "bluetooth_page"),
    open_quick_settings("train_28_open_quick_settings"),
    toggle_quick_tile("train_29_toggle_wifi_quick_settings", Toggle.WIFI),
    toggle_quick_tile("train_30_toggle_bluetooth_quick_settings", Toggle.BLUETOOTH),
    switch_quick_tile("train_31_enable_dnd_quick_settings", Toggle.DO_NOT_DISTURB, turn_on=True),
    switch_quick_tile("train_32_disable_dnd_quick_settings", Toggle.DO_NOT_DISTURB, turn_on=False),
    open_notifications("train_33_open_notifications"),
    clear_notifications("train_34_clear_notifications"),
    open_system_page("train_38_open_language_input", "Open the language and input settings.", "language", "language"),
    open_system_page("train_44_open_storage_settings", "Open the storage settings.", "storage", "storage"),
    open_app_info("train_45_open_chrome_app_info", "chrome"),
    force_stop("train_46_force_stop_chrome", "chrome"),
    clear_cache("train_47_clear_chrome_cache", "chrome"),
    open_system_page("train_55_open_screen_lock_settings", "Open the screen lock settings.", "screen_lock", "security",
                     tap_on("security", "Lock")),
    connect_known_wifi("train_58_connect_known_wifi", _TRAINING_NETWORKS),
    forget_wifi("train_59_forget_wifi_network", _TRAINING_NETWORKS),
    change_language("train_60_change_system_language", _TRAINING_LANGUAGES),
    change_wallpaper("train_70_change_wallpaper_settings", _TRAINING_WALLPAPERS),
    switch_quick_tile("train_72_enable_airplane_quick", Toggle.AIRPLANE_MODE, turn_on=True),
    switch_quick_tile("train_73_disable_airplane_quick", Toggle.AIRPLANE_MODE, turn_on=False),
    open_system_page("train_74_open_developer_options", "Open the developer options.", "developer", "developer"),
    switch_usb_debugging("train_75_enable_usb_debugging", turn_on=True),
    switch_usb_debugging("train_76_disable_usb_debugging", turn_on=False),
    switch_app_notifications("train_77_enable_app_notifications", _TRAINING_APPS, turn_on=True),
    switch_app_notifications("train_78_disable_app_notifications", _TRAINING_APPS, turn_on=False),
    switch_call_vibration("train_79_enable_call_vibration", turn_on=True),
    switch_call_vibration("train_80_disable_call_vibration", turn_on=False),
    uninstall_app("train_121_uninstall_app", STORE_TRAINING),
    check_app_storage("train_122_check_app_storage", _TRAINING_APPS),
    set_brightness("train_123_set_brightness", _TRAINING_LEVELS),
    join_wifi("train_124_join_wifi", _TRAINING_NETWORKS),
    set_media_volume("train_125_change_media_volume", _TRAINING_LEVELS),
)  # fmt: skip

SYSTEM_EVAL: tuple[TaskTemplate, ...] = (
    change_language("eval_04_change_language", _EVAL_LANGUAGES),
    connect_known_wifi("eval_09_connect_known_wifi", _EVAL_NETWORKS),
    forget_wifi("eval_10_forget_wifi", _EVAL_NETWORKS),
    change_wallpaper("eval_11_change_wallpaper", _EVAL_WALLPAPERS),
    open_system_page("eval_12_open_developer_options", "Open the developer options.", "developer", "developer"),
    switch_usb_debugging("eval_13_enable_usb_debugging", turn_on=True),
    switch_usb_debugging("eval_14_disable_usb_debugging", turn_on=False),
    switch_app_notifications("eval_15_enable_app_notifications", _EVAL_APPS, turn_on=True),
    switch_app_notifications("eval_16_disable_app_notifications", _EVAL_APPS, turn_on=False),
    set_media_volume("eval_19_change_media_volume", _EVAL_LEVELS),
    uninstall_app("eval_121_uninstall_app", STORE_EVAL),
    check_app_storage("eval_122_check_app_storage", _EVAL_APPS),
    set_brightness("eval_123_set_brightness", _EVAL_LEVELS),
    join_wifi("eval_124_join_wifi", _EVAL_NETWORKS),
    switch_quick_tile("eval_125_enable_auto_rotate_quick", Toggle.AUTO_ROTATE, turn_on=True),
    switch_quick_tile("eval_126_disable_auto_rotate_quick", Toggle.AUTO_ROTATE, turn_on=False),
    switch_quick_tile("eval_127_enable_battery_saver_quick", Toggle.BATTERY_SAVER, turn_on=True),
    switch_quick_tile("eval_128_disable_battery_saver_quick", Toggle.BATTERY_SAVER, turn_on=False),
    open_system_page("eval_129_open_app_list", "Open the list of all apps in Settings.", "apps", "apps"),
    open_system_page("eval_130_open_wallpaper_settings", "Open the wallpaper settings.", "wallpaper", "wallpaper"),
    open_system_page("eval_131_open_security_settings", "Open the security settings.", "security", "security"),
)
