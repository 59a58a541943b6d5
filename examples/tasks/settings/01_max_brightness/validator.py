from cua_rl.tasks.adb_client import AdbClient


class BrightnessValidator:
    def __init__(self, level: int) -> None:
        self.level = level

    def validate(self, adb: AdbClient) -> bool:
        return adb.setting("system", "screen_brightness") == str(self.level)
