from cua_rl.environments.device import ShellDevice


class TimeoutValidator:
    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms

    async def validate(self, device: ShellDevice) -> bool:
        return (await device.shell("settings get system screen_off_timeout")).strip() == str(self.timeout_ms)
