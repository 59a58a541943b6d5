"""Parsers of what single settings and short commands of Android print: text in, text out.

Whatever is not understood is a `DeviceError`: an answer that nobody can read is never a "false".
"""

import re
from collections.abc import Mapping

from cua_rl.errors import DeviceError

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


def misunderstood(expected: str, text: str) -> DeviceError:
    """The failure of a parser."""
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
    """What the value of a setting means."""
    meaning = meanings.get(text.strip())
    if meaning is None:
        raise misunderstood(f"{setting} to be one of {', '.join(meanings)}", text)
    return meaning


def parse_integer(text: str, setting: str) -> str:
    """A setting that is a whole number."""
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
    """The language in its own words ("Deutsch"), or its tag if it is none of `LANGUAGE_NAMES`.

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
