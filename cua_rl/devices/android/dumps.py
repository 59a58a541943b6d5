"""Parsers of Android's long dumps: windows, notifications, packages, alarms, recent tasks, networks, content rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cua_rl.devices.android.readings import expand_component, misunderstood, search

_SYSTEM_POSTERS = frozenset({"android", "com.android.systemui"})
"""Android itself: what it posts comes back by itself and is nobody's task."""
_NOT_CLEARABLE_BITS = 0x2 | 0x20
_NOT_CLEARABLE_NAMES = frozenset({"ONGOING_EVENT", "NO_CLEAR"})
_GROUP_SUMMARY_BIT = 0x200


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """What the first display shows: the activity in front, as PACKAGE/CLASS, and the title of the focused window.

    The window is another one than the activity's while the notification shade, a pop-up or the lock screen is open.
    """

    activity: str
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One posted notification."""

    package: str
    is_clearable: bool
    is_group_summary: bool


def parse_focus(text: str) -> Focus:
    """The focus of display 0 in `dumpsys window displays`; empty text where nothing has it."""
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
    return Focus(activity=activity, window=window.group(1) or "")


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
    records = re.split(r"^\s*NotificationRecord\(", _notification_list(text), flags=re.MULTILINE)[1:]
    return [_notification(record) for record in records]


def _notification_list(text: str) -> str:
    title = re.search(r"^  Notification List:\s*$", text, re.MULTILINE)
    if title is None:
        return ""
    rest = text[title.end() :]
    end = re.search(r"^ {0,2}(?!NotificationRecord\()\S", rest, re.MULTILINE)
    return rest if end is None else rest[: end.start()]


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
    return {name: granted for part in sections for name, granted in _permissions(part)}


def _section(text: str, kind: str, name: str) -> str | None:
    """From "  KIND [NAME] (...)" up to the next line that is indented as little."""
    start = re.search(rf"^  {kind} \[{re.escape(name)}\] \(.*\n", text, re.MULTILINE)
    if start is None:
        return None
    end = re.search(r"^ {0,2}\S", text[start.end() :], re.MULTILINE)
    return text[start.end() :] if end is None else text[start.end() : start.end() + end.start()]


def _permissions(section: str) -> Iterator[tuple[str, bool]]:
    user = 0
    for line in section.splitlines():
        if found := re.match(r"\s*User (\d+):", line):
            user = int(found.group(1))
        elif user == 0 and (found := re.match(r"\s*([\w.]+): granted=(true|false)\b", line)):
            yield found.group(1), found.group(2) == "true"


def parse_alarm_times(text: str) -> list[str]:
    """Times such as "06:45" at which alarm clocks will ring, sorted, from `dumpsys alarm`."""
    if "Current Alarm Manager state" not in text:
        raise misunderstood("'Current Alarm Manager state' in `dumpsys alarm`", text)
    times = re.findall(r"^\s*Alarm clock:\s*\n\s*triggerTime=\d+-\d+-\d+ (\d\d:\d\d):", text, re.MULTILINE)
    if len(times) != len(re.findall(r"^\s*Alarm clock:\s*$", text, re.MULTILINE)):
        raise misunderstood("a line 'triggerTime=DATE TIME' after each 'Alarm clock:'", text)
    return sorted(set(times))


def parse_recent_packages(text: str) -> list[str]:
    """Packages of the recent apps, latest first, from `dumpsys activity recents`; the home screen is none of them."""
    if "ACTIVITY MANAGER RECENT TASKS" not in text:
        raise misunderstood("'ACTIVITY MANAGER RECENT TASKS' in `dumpsys activity recents`", text)
    tasks = re.split(r"^\s*\* Recent #\d+: ", text, flags=re.MULTILINE)[1:]
    return list(dict.fromkeys(_task_package(task) for task in tasks if "type=standard" in task.split("\n")[0]))


def _task_package(task: str) -> str:
    found = search(
        r"^\s*(?:mActivityComponent|realActivity)=\{?([^\s/{}]+)/", task, "'mActivityComponent=PACKAGE/CLASS' in a task"
    )
    return found.group(1)


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
