"""Parsers of what Android's commands print.

Output that is not understood is a `DeviceError`, never a "false".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cua_rl.types.errors import DeviceError

BINARY: Mapping[str, str] = {"0": "false", "1": "true"}
BINARY_OFF_IF_UNSET: Mapping[str, str] = {"null": "false", **BINARY}
"""For settings that Android itself reads as off until somebody sets them."""
WIFI_ON: Mapping[str, str] = {"0": "false", "1": "true", "2": "true", "3": "false"}
"""2: on in spite of airplane mode; 3: switched off by airplane mode."""
ZEN_MODE: Mapping[str, str] = {"null": "false", "0": "false", "1": "true", "2": "true", "3": "true"}
"""1: priority only, 2: nothing, 3: alarms only."""
LOCATION_MODE: Mapping[str, str] = {"0": "false", "1": "true", "2": "true", "3": "true"}

LANGUAGE_NAMES: Mapping[str, str] = {
    "en": "English",
    "de": "Deutsch",
    "es": "Español",
    "fr": "Français",
    "it": "Italiano",
    "nl": "Nederlands",
    "pl": "Polski",
    "pt": "Português",
    "sv": "Svenska",
    "tr": "Türkçe",
}
"""As the settings of a phone call them."""

_NIGHT_MASK, _NIGHT_YES = 0x30, 0x20


_SYSTEM_POSTERS = frozenset({"android", "com.android.systemui"})
"""Android itself: what it posts comes back by itself and belongs to no task."""
_NOT_CLEARABLE_BITS = 0x2 | 0x20
_NOT_CLEARABLE_NAMES = frozenset({"ONGOING_EVENT", "NO_CLEAR"})
_GROUP_SUMMARY_BIT = 0x200


def misunderstood(expected: str, text: str) -> DeviceError:
    return DeviceError(f"expected {expected} from the phone, got {text[:300]!r}")


def truth(value: bool) -> str:
    """ "true" or "false"."""
    return "true" if value else "false"


def search(pattern: str, text: str, expected: str) -> re.Match[str]:
    """The first match, lines as lines; raises `DeviceError` if there is none."""
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise misunderstood(expected, text)
    return found


def parse_choice(text: str, meanings: Mapping[str, str], setting: str) -> str:
    meaning = meanings.get(text.strip())
    if meaning is None:
        raise misunderstood(f"{setting} to be one of {', '.join(meanings)}", text)
    return meaning


def parse_integer(text: str, setting: str) -> str:
    value = text.strip()
    if not re.fullmatch(r"-?\d+", value):
        raise misunderstood(f"{setting} to be a whole number", text)
    return str(int(value))


def parse_ring_vibration(text: str) -> str:
    """Three settings, a line each: vibrate_on, ring_vibration_intensity, vibrate_when_ringing.

    Calls vibrate unless all vibration is off; the intensity (0 to 3) decides if it was ever set, then the older switch.
    """
    lines = text.split()
    allowed = [{"null", "0", "1"}, {"null", "0", "1", "2", "3"}, {"null", "0", "1"}]
    if len(lines) != 3 or any(line not in choices for line, choices in zip(lines, allowed, strict=True)):
        raise misunderstood("vibrate_on, ring_vibration_intensity and vibrate_when_ringing", text)
    everything, intensity, switch = lines
    if everything == "0":
        return "false"
    return truth(intensity != "0") if intensity != "null" else truth(switch == "1")


def parse_volume(text: str) -> tuple[int, int, int]:
    """Level, minimum and maximum from `cmd media_session volume --stream N --get`."""
    found = search(
        r"volume is (\d+) in range \[(\d+)\.\.(\d+)\]", text, "'volume is LEVEL in range [MINIMUM..MAXIMUM]'"
    )
    level, minimum, maximum = (int(number) for number in found.groups())
    return level, minimum, maximum


def parse_bluetooth(text: str) -> str:
    """Whether the adapter is on, from `dumpsys bluetooth_manager`.

    The setting bluetooth_on is no substitute: it stays set while airplane mode keeps the adapter off.
    """
    return search(r"^\s*enabled: (true|false)\s*$", text, "'enabled: true' or 'enabled: false'").group(1)


def parse_night_mode(text: str) -> str:
    """Whether the theme is dark, from `cmd uimode night` followed by `dumpsys uimode`.

    On a schedule ("auto", "custom_schedule") what shows now decides.
    """
    mode = search(r"^Night mode: (\w+)\s*$", text, "'Night mode: yes', 'no' or a schedule").group(1)
    if mode in ("yes", "no"):
        return truth(mode == "yes")
    current = search(r"\bmCurUiMode=0x([0-9a-f]+)", text, "'mCurUiMode=0x...' in `dumpsys uimode`").group(1)
    return truth(int(current, 16) & _NIGHT_MASK == _NIGHT_YES)


def parse_battery(text: str) -> str:
    """Charge in percent from `dumpsys battery`."""
    level = search(r"^\s*level: (\d+)\s*$", text, "'level: N' in `dumpsys battery`").group(1)
    scale = search(r"^\s*scale: ([1-9]\d*)\s*$", text, "'scale: N' in `dumpsys battery`").group(1)
    return str(int(level) * 100 // int(scale))


def parse_wakefulness(text: str) -> str:
    """Whether the screen is on, from `dumpsys power`."""
    state = search(
        r"^\s*mWakefulness=(Awake|Asleep|Dozing|Dreaming)\s*$", text, "'mWakefulness=...' in `dumpsys power`"
    )
    return truth(state.group(1) in ("Awake", "Dreaming"))


def parse_clock(text: str) -> str:
    """Time of day from `date +%H:%M`."""
    return search(r"\A\s*(\d\d:\d\d)\s*\Z", text, "a time such as '09:05'").group(1)


def parse_language(text: str) -> str:
    """The language in its own words ("Deutsch"), or its tag if it is not in `LANGUAGE_NAMES`.

    Three lines, of which the first that is set decides: system_locales, persist.sys.locale, ro.product.locale.
    """
    lines = [line.strip() for line in text.split("\n")[:3]]
    tag = next((line.split(",")[0] for line in lines if line and line != "null"), "")
    if len(lines) != 3 or not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]+)*", tag):
        raise misunderstood("a language tag such as 'en-US' on one of three lines", text)
    return LANGUAGE_NAMES.get(tag.partition("-")[0], tag)


def parse_time_zone(text: str) -> str:
    """The city of persist.sys.timezone: "New York" for America/New_York."""
    zone = search(r"\A\s*([A-Za-z]+(?:/[A-Za-z0-9_+-]+)*)\s*\Z", text, "a time zone such as 'Europe/Berlin'").group(1)
    return zone.rpartition("/")[2].replace("_", " ")


def parse_packages(text: str) -> list[str]:
    """The names in `pm list packages`, whose lines are "package:NAME"."""
    lines = text.split()
    if "package:android" not in lines or any(not line.startswith("package:") for line in lines):
        raise misunderstood("lines 'package:NAME', the one of 'android' among them", text)
    return [line.removeprefix("package:") for line in lines]


def parse_process_names(text: str) -> list[str]:
    """The names in `ps -A -o NAME`."""
    title, *names = [line.strip() for line in text.strip().split("\n")]
    if title != "NAME" or "system_server" not in names:
        raise misunderstood("the title 'NAME' and process names, 'system_server' among them", text)
    return names


def parse_file_exists(text: str, path: str) -> str:
    """Whether `ls -d PATH` names the path or says that it does not exist; anything else, such as a refusal, raises."""
    said = text.strip()
    if said == path:
        return "true"
    if said.startswith("ls: ") and said.endswith(": No such file or directory"):
        return "false"
    raise misunderstood(f"{path!r} or 'No such file or directory'", text)


def parse_home_activity(text: str) -> str:
    """The default home screen from `cmd package resolve-activity --brief`: its last line, as PACKAGE/CLASS."""
    last = text.strip().rpartition("\n")[2].strip()
    package, slash, name = last.partition("/")
    if not slash or " " in last or package == "android":  # "android" asks which home screen to use
        raise misunderstood("one default home screen as PACKAGE/CLASS", text)
    return expand_component(package, name)


def expand_component(package: str, name: str) -> str:
    """An activity with its class in full: ".Settings" lies in the package."""
    return f"{package}/{package}{name}" if name.startswith(".") else f"{package}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One posted notification."""

    package: str
    is_clearable: bool
    is_group_summary: bool


def parse_focus(text: str) -> tuple[str, str]:
    """The activity in front, as PACKAGE/CLASS, and the title of the focused window of display 0, in `dumpsys window
    displays`; empty text where nothing has the focus.

    The window is another one than the activity's while the notification shade, a pop-up or the lock screen is open.
    """
    displays = re.split(r"^\s*Display: mDisplayId=", text, flags=re.MULTILINE)[1:]
    display = next((part for part in displays if re.match(r"0\b", part)), None)
    if display is None:
        raise misunderstood("a section 'Display: mDisplayId=0' in `dumpsys window displays`", text)
    window = search(
        r"^\s*mCurrentFocus=(?:null|Window\{\S+ u\d+ (.*)\})\s*$", display, "'mCurrentFocus=Window{...}' or null"
    )
    app = search(
        r"^\s*mFocusedApp=(?:null|ActivityRecord\{\S+ u\d+ ([^\s/}]+)/([^\s}]+).*\})\s*$",
        display,
        "'mFocusedApp=ActivityRecord{...}' or null",
    )
    activity = "" if app.group(1) is None else expand_component(app.group(1), app.group(2))
    return activity, window.group(1) or ""


def count_clearable_notifications(text: str) -> int:
    """How many notifications a person can clear, from `dumpsys notification`: of apps, neither ongoing nor pinned.

    The summary of a group counts only where it stands alone.
    """
    clearable = [
        notification
        for notification in parse_notifications(text)
        if notification.is_clearable and notification.package not in _SYSTEM_POSTERS
    ]
    singles = [notification.package for notification in clearable if not notification.is_group_summary]
    lone_summaries = {notification.package for notification in clearable} - set(singles)
    return len(singles) + len(lone_summaries)


def parse_notifications(text: str) -> list[Notification]:
    """The section "Notification List" of `dumpsys notification`; without it nothing is posted."""
    if "Current Notification Manager state" not in text:
        raise misunderstood("'Current Notification Manager state' in `dumpsys notification`", text)
    title = re.search(r"^  Notification List:\s*$", text, re.MULTILINE)
    rest = "" if title is None else text[title.end() :]
    end = re.search(r"^ {0,2}(?!NotificationRecord\()\S", rest, re.MULTILINE)
    section = rest if end is None else rest[: end.start()]
    records = re.split(r"^\s*NotificationRecord\(", section, flags=re.MULTILINE)[1:]
    return [_notification(record) for record in records]


def _notification(record: str) -> Notification:
    package = search(r"\bpkg=(\S+)", record, "'pkg=NAME' in a notification").group(1)
    flags = search(r"^\s*flags=(\S*)\s*$", record, "'flags=...' in a notification").group(1)
    if flags.startswith("0x"):
        bits = int(flags, 16)
        return Notification(
            package=package,
            is_clearable=bits & _NOT_CLEARABLE_BITS == 0,
            is_group_summary=bits & _GROUP_SUMMARY_BIT != 0,
        )
    names = set(flags.split("|"))
    return Notification(
        package=package, is_clearable=not names & _NOT_CLEARABLE_NAMES, is_group_summary="GROUP_SUMMARY" in names
    )


def parse_permissions(text: str, package: str) -> dict[str, bool]:
    """Permission -> granted to user 0, from `dumpsys package NAME` of an installed package."""
    section = _section(text, "Package", package)
    if section is None:
        raise misunderstood(f"'Package [{package}]' in `dumpsys package`", text)
    shared = re.search(r"^\s*sharedUser=SharedUserSetting\{\S+ ([^\s/}]+)/", section, re.MULTILINE)
    sections = [section] if shared is None else [section, _section(text, "SharedUser", shared.group(1)) or ""]
    permissions: dict[str, bool] = {}
    for part in sections:
        user = 0
        for line in part.splitlines():
            if found := re.match(r"\s*User (\d+):", line):
                user = int(found.group(1))
            elif user == 0 and (found := re.match(r"\s*([\w.]+): granted=(true|false)\b", line)):
                permissions[found.group(1)] = found.group(2) == "true"
    return permissions


def _section(text: str, kind: str, name: str) -> str | None:
    """From "  KIND [NAME] (...)" up to the next line that is indented as little."""
    start = re.search(rf"^  {kind} \[{re.escape(name)}\] \(.*\n", text, re.MULTILINE)
    if start is None:
        return None
    end = re.search(r"^ {0,2}\S", text[start.end() :], re.MULTILINE)
    return text[start.end() :] if end is None else text[start.end() : start.end() + end.start()]


def parse_alarm_times(text: str) -> list[str]:
    """Times such as "06:45" at which alarm clocks will ring, sorted, from `dumpsys alarm`."""
    if "Current Alarm Manager state" not in text:
        raise misunderstood("'Current Alarm Manager state' in `dumpsys alarm`", text)
    times = re.findall(r"^\s*Alarm clock:\s*\n\s*triggerTime=\d+-\d+-\d+ (\d\d:\d\d):", text, re.MULTILINE)
    if len(times) != len(re.findall(r"^\s*Alarm clock:\s*$", text, re.MULTILINE)):
        raise misunderstood("a line 'triggerTime=DATE TIME' after each 'Alarm clock:'", text)
    return sorted(set(times))


def parse_recent_packages(text: str) -> list[str]:
    """Packages of the recent apps, latest first, from `dumpsys activity recents`; the home screen is not among them."""
    if "ACTIVITY MANAGER RECENT TASKS" not in text:
        raise misunderstood("'ACTIVITY MANAGER RECENT TASKS' in `dumpsys activity recents`", text)
    tasks = re.split(r"^\s*\* Recent #\d+: ", text, flags=re.MULTILINE)[1:]
    pattern = r"^\s*(?:mActivityComponent|realActivity)=\{?([^\s/{}]+)/"
    expected = "'mActivityComponent=PACKAGE/CLASS' in a task"
    standard = [task for task in tasks if "type=standard" in task.split("\n")[0]]
    return list(dict.fromkeys(search(pattern, task, expected).group(1) for task in standard))


def parse_known_networks(text: str) -> dict[str, int]:
    """Name -> id of the saved Wi-Fi networks, from `cmd wifi list-networks`."""
    title, *rows = text.strip().split("\n")
    if title.strip() == "No networks":
        return {}
    if not title.startswith("Network Id"):
        raise misunderstood("'Network Id  SSID  Security type' or 'No networks'", text)
    found = [search(r"^(\d+)\s+(.*?)\s+\S+\s*$", row, "an id, a name and a security type") for row in rows]
    return {match.group(2): int(match.group(1)) for match in found}


def parse_connected_network(text: str) -> str:
    """Name of the Wi-Fi network in use, "" without one, from `cmd wifi status`."""
    if re.search(r"^Wifi is (disabled|not connected)\b", text, re.MULTILINE):
        return ""
    return search(r"^Wifi is connected to \"(.*)\"\s*$", text, "'Wifi is connected to \"NAME\"' or not").group(1)


def parse_rows(text: str, columns: Sequence[str]) -> list[Mapping[str, str]]:
    """Rows of `content query` with this projection; the last column may hold commas and line breaks."""
    if text.strip() == "No result found.":
        return []
    first, *rows = re.split(r"^Row: \d+ ", text, flags=re.MULTILINE)
    pattern = ", ".join(f"{re.escape(column)}=(.*?)" for column in columns) + r"\s*"
    found = [re.fullmatch(pattern, row, re.DOTALL) for row in rows]
    if first.strip() or not rows or None in found:
        raise misunderstood(f"rows with {', '.join(columns)}, or 'No result found.'", text)
    return [
        {column: "" if value == "NULL" else value for column, value in zip(columns, match.groups(), strict=True)}
        for match in found
        if match is not None
    ]
