from cua_rl.tasks.adb_client import AdbClient


def dim(adb: AdbClient) -> None:
    adb.shell("settings put system screen_brightness_mode 0; settings put system screen_brightness 60")
