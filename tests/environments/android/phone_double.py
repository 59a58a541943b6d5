"""A scripted `adb shell`: answers every command as Android 13, 14 or 15 prints, and changes as the commands say."""

import re
import shlex
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Literal

from cua_rl.types.errors import DeviceError

Version = Literal[13, 14, 15]
VERSIONS: tuple[Version, ...] = (13, 14, 15)
HOME = "com.example.launcher/.Home"
SETTINGS = "com.android.settings/.Settings"
CAMERA = "com.example.camera"
CONTACTS = "content query --uri content://com.android.contacts/data/phones"
SENT = "content query --uri content://sms "
CALLS = "content query --uri content://call_log/calls"
PICTURES = "content query --uri content://media/external/images/media"

_OUTPUTS = Path(__file__).parent / "outputs"


def output(name: str, version: Version, **places: str) -> str:
    """One of the files, its places filled in."""
    text = _read(f"{name}.{version}.txt")
    for place, value in places.items():
        text = text.replace(f"«{place}»", value)
    assert "«" not in text, f"unfilled place in {name}: {text}"
    return text


@cache
def _read(file_name: str) -> str:
    return (_OUTPUTS / file_name).read_text()


class PhoneDouble:
    """A phone in front of which nobody stands: `foreground` is an activity, `settings` are "namespace key" -> value."""

    def __init__(self, version: Version = 14) -> None:
        self.version: Version = version
        self.foreground = SETTINGS
        self.window: str | None = None
        """The focused window, where it is not the activity's."""
        self.settings = {
            "global wifi_on": "1",
            "global airplane_mode_on": "0",
            "global auto_time": "1",
            "global adb_enabled": "1",
            "secure location_mode": "3",
            "system accelerometer_rotation": "1",
            "system screen_brightness": "102",
            "system screen_off_timeout": "30000",
        }
        self.properties = {
            "persist.sys.locale": "en-GB",
            "ro.product.locale": "en-US",
            "persist.sys.timezone": "America/New_York",
        }
        self.running = {"system_server", f"{CAMERA}:background"}
        self.bluetooth = True
        self.night = "no"
        self.shown_night = False
        self.wakefulness = "Awake"
        self.volume, self.max_volume = 5, 15
        self.notifications = ""
        self.packages = {"android", "com.android.settings", CAMERA}
        self.granted = {"camera": False, "notifications": True}
        self.files = {"/sdcard/Download"}
        self.networks: list[str] = []
        self.alarms = ["09:30", "07:00"]
        self.contacts: dict[int, tuple[str, str]] = {}
        """Raw contact id -> name and number."""
        self.calls: list[str] = []
        self.rows: dict[str, str] = {}
        """The beginning of a `content query` -> what it prints; without an entry, nothing is found."""
        self.is_charging = True
        self.is_stuck = False
        """Changes are accepted and not done."""
        self.is_gone = False
        self.commands: list[str] = []

    async def run(self, command: str) -> str:
        """Run a line of shell: commands between semicolons."""
        if self.is_gone:
            raise DeviceError("the phone is gone")
        self.commands.append(command)
        if not command:
            return ""
        if command.startswith("if [ -d "):
            return self._remove(shlex.split(command)[3])
        return "".join(self._answer(part.strip()) for part in re.split(r";|&&", command))

    def _answer(self, command: str) -> str:
        for pattern, answer in self._readings().items():
            if command == pattern:
                return answer
        if found := re.fullmatch(r"ls -d (\S+) 2>&1", command):
            return self._list(shlex.split(found.group(1))[0])
        if command.startswith(CONTACTS):
            rows = ((raw_id, *contact) for raw_id, contact in self.contacts.items())
            return _rows(f"raw_contact_id={i}, data1={number}, display_name={name}" for i, name, number in rows)
        if command.startswith(CALLS):
            return _rows(f"number={number}" for number in self.calls)
        for prefix, rows in ((prefix, self.rows.get(prefix)) for prefix in (SENT, PICTURES)):
            if command.startswith(prefix):
                return rows or "No result found.\n"
        return self._change(command)

    def _list(self, path: str) -> str:
        return f"{path}\n" if path in self.files else f"ls: {path}: No such file or directory\n"

    def _readings(self) -> dict[str, str]:
        dark = self.shown_night if self.night not in ("yes", "no") else self.night == "yes"
        window = self.window or f"Window{{5c4591 u0 {_in_full(self.foreground)}}}"
        return {
            **{f"settings get {key}": f"{self.settings.get(key, 'null')}\n" for key in self._setting_keys()},
            **{f"getprop {key}": f"{value}\n" for key, value in self.properties.items()},
            "dumpsys window displays": self._output("window_displays", window=window, activity=self._activity_record()),
            "dumpsys notification": self._output("notification", notifications=self.notifications),
            "dumpsys bluetooth_manager": self._output(
                "bluetooth", enabled=str(self.bluetooth).lower(), state="ON" if self.bluetooth else "OFF"
            ),
            "cmd uimode night": self._output("uimode_night", mode=self.night),
            "dumpsys uimode": self._output(
                "uimode", number="0", mode=self.night, computed=str(dark).lower(), current="21" if dark else "11"
            ),
            "ps -A -o NAME": "NAME\n" + "".join(f"{name}\n" for name in sorted(self.running)),
            "dumpsys battery": self._output("battery"),
            "dumpsys power": self._output("power", wakefulness=self.wakefulness),
            "dumpsys alarm": self._output(
                "alarm", alarms="".join(self._output("alarm_record", time=at) for at in self.alarms)
            ),
            "dumpsys activity recents": self._output("recents"),
            "date +%H:%M": "09:05\n",
            "pm list packages --user 0": "".join(f"package:{name}\n" for name in sorted(self.packages)),
            **{f"dumpsys package {name}": self._package(name) for name in self.packages},
            "cmd wifi list-networks": self._networks(),
            "cmd wifi status": self._output(
                "wifi_status" if self.settings["global wifi_on"] == "1" else "wifi_status_off"
            ),
            "content query --uri content://com.android.contacts/raw_contacts --projection _id --sort '_id DESC'": _rows(
                f"_id={raw_id}" for raw_id in sorted(self.contacts, reverse=True)
            ),
            "cmd media_session volume --stream 3 --get": self._output(
                "volume", level=str(self.volume), maximum=str(self.max_volume)
            ),
            "cmd package resolve-activity --brief -a android.intent.action.MAIN -c android.intent.category.HOME": (
                self._output("home_activity", home=HOME)
            ),
        }

    def _setting_keys(self) -> set[str]:
        unset = {"global low_power", "global zen_mode", "global development_settings_enabled", "system system_locales"}
        vibration = {"system vibrate_on", "system ring_vibration_intensity", "system vibrate_when_ringing"}
        return self.settings.keys() | unset | vibration

    def _output(self, name: str, **places: str) -> str:
        return output(name, self.version, **places)

    def _activity_record(self) -> str:
        brace = "}" if self.version == 15 else ""  # 15 closes the brace before the task, and again
        return f"ActivityRecord{{b3a1ec9 u0 {self.foreground}{brace} t82}}"

    def _package(self, name: str) -> str:
        places = {place: str(granted).lower() for place, granted in self.granted.items()}
        return self._output("package", **places).replace(CAMERA, name)

    def _networks(self) -> str:
        if not self.networks:
            return "No networks\n"
        rows = "".join(f"{i:<12} {name:<32} {'open^':<4}\n" for i, name in enumerate(self.networks))
        return self._output("wifi_networks", networks=rows)

    def _change(self, command: str) -> str:
        for pattern, change in self._changes().items():
            if found := re.fullmatch(pattern, command):
                if not self.is_stuck:
                    change(*found.groups())
                return ""
        raise AssertionError(f"Android has no command {command!r}, or the double does not know it")

    def _changes(self) -> dict[str, Callable[..., None]]:
        return {
            r"input keyevent KEYCODE_HOME": lambda: self._show(HOME),
            r"input keyevent KEYCODE_WAKEUP|wm dismiss-keyguard|cmd statusbar collapse": lambda: None,
            r"am start -a android\.settings\.SETTINGS": lambda: self._show(SETTINGS),
            r"cmd battery (reset|unplug)": lambda how: self._set("is_charging", how == "reset"),
            r"settings put (\w+ \w+) (\d+)": lambda key, value: self.settings.update({key: value}),
            r"svc wifi (enable|disable)": lambda how: self._put("global wifi_on", how == "enable"),
            r"svc bluetooth (enable|disable)": lambda how: self._set("bluetooth", how == "enable"),
            r"cmd connectivity airplane-mode (enable|disable)": lambda how: self._put(
                "global airplane_mode_on", how == "enable"
            ),
            r"cmd uimode night (yes|no)": lambda how: self._set("night", how),
            r"cmd power set-mode ([01])": lambda how: self._put(
                "global low_power", how == "1" and not self.is_charging
            ),
            r"cmd location set-location-enabled (true|false) --user 0": lambda how: self.settings.update(
                {"secure location_mode": "3" if how == "true" else "0"}
            ),
            r"cmd notification set_dnd (on|off)": lambda how: self._put("global zen_mode", how == "on"),
            r"cmd notification post -t Reminder cua_rl_\$\(date \+%s%N\) '[\w ]+'": lambda: self._set(
                "notifications", self.notifications + self._output("notification_record")
            ),
            r"cmd media_session volume --stream 3 --set (\d+)": lambda level: self._set("volume", int(level)),
            r"pm (grant|revoke) --user 0 \S+ android\.permission\.(\w+)": lambda how, name: self.granted.update(
                {"camera" if name == "CAMERA" else "notifications": how == "grant"}
            ),
            r"am start -a android\.intent\.action\.SET_ALARM --ei \S+\.HOUR (\d+) --ei \S+\.MINUTES (\d+) .*": (
                lambda hour, minute: self.alarms.append(f"{int(hour):02d}:{int(minute):02d}")
            ),
            r"am start -a android\.intent\.action\.DISMISS_ALARM .*HOUR (\d+) .*MINUTES (\d+)": (
                lambda hour, minute: self.alarms.remove(f"{int(hour):02d}:{int(minute):02d}")
            ),
            r"content insert --uri content://com\.android\.contacts/raw_contacts .*": lambda: self.contacts.update(
                {len(self.contacts) + 1: ("", "")}
            ),
            r"content insert --uri content://com\.android\.contacts/data --bind raw_contact_id:i:(\d+) "
            r"--bind mimetype:s:vnd\.android\.cursor\.item/(\w+) --bind data1:s:(.+)": self._fill_contact,
            r"content delete --uri content://com\.android\.contacts/raw_contacts --where _id=(\d+)": (
                lambda raw_id: self.contacts.pop(int(raw_id))
            ),
            r"content delete --uri content://call_log/calls --where (.+)": lambda where: self._set(
                "calls", [number for number in self.calls if f"type=2 and number='{number}'" != shlex.split(where)[0]]
            ),
            r"cmd alarm set-timezone (\S+)": lambda zone: self.properties.update({"persist.sys.timezone": zone}),
            r"am force-stop (\S+)": lambda package: self.running.difference_update({package, f"{package}:background"}),
            r"monkey -p (\S+) -c android\.intent\.category\.LAUNCHER 1": lambda package: self._launch(package),
            r"mkdir -p (\S+)": lambda path: self.files.add(path.rstrip("/")),
            r"touch (\S+)": self.files.add,
            r"cmd wifi add-network (.+) open": lambda name: self.networks.append(shlex.split(name)[0]),
        }

    def _show(self, activity: str) -> None:
        self.foreground, self.window = activity, None

    def _launch(self, package: str) -> None:
        self.running.add(package)
        self._show(f"{package}/.Main")

    def _fill_contact(self, raw_id: str, kind: str, value: str) -> None:
        name, number = self.contacts[int(raw_id)]
        text = shlex.split(value)[0]
        self.contacts[int(raw_id)] = (text, number) if kind == "name" else (name, text)

    def _put(self, key: str, is_on: bool) -> None:
        self.settings[key] = "1" if is_on else "0"

    def _set(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def _remove(self, path: str) -> str:
        if any(other.startswith(f"{path}/") for other in self.files):
            return f"rmdir: '{path}': Directory not empty\n"
        self.files.discard(path.rstrip("/"))
        return ""


def _rows(rows: Iterable[str]) -> str:
    return "".join(f"Row: {i} {row}\n" for i, row in enumerate(rows)) or "No result found.\n"


def _in_full(activity: str) -> str:
    package, _, name = activity.partition("/")
    return f"{package}/{package}{name}" if name.startswith(".") else activity
