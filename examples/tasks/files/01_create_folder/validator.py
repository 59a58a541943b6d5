from cua_rl.tasks.adb_client import AdbClient

FOLDER = "/sdcard/Download/abc"


class FolderValidator:
    def validate(self, adb: AdbClient) -> bool:
        return adb.exists(FOLDER)
