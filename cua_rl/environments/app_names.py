"""Finds an Android app by its common name."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from cua_rl.environments.device import ActionRejected

_COMMON = {"com", "org", "net", "android", "google", "apps", "app"}


def find_package(name: str, packages: Iterable[str]) -> str:
    """The package called `name`, or whose last words are those of `name`: "Settings" is com.android.settings.

    Android's shell does not tell the labels of icons. Raises `ActionRejected` if none or several fit.
    """
    known = sorted(set(packages))
    if name.strip() in known:
        return name.strip()
    wanted = _letters(name)
    fitting = [package for package in known if wanted and wanted in _endings(package)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ActionRejected(f"several apps are called {name!r}: {', '.join(fitting)}; give the package")
    near = get_close_matches(wanted, {ending: None for package in known for ending in _endings(package)}, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ": tap its icon"
    raise ActionRejected(f"no app is called {name!r}{hint}")


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _endings(package: str) -> set[str]:
    """ "com.google.android.deskclock" can be called deskclock or googledeskclock."""
    words = [_letters(word) for word in package.split(".")]
    telling = [word for word in words if word not in _COMMON] or words[-1:]
    return {"".join(telling[i:]) for i in range(len(telling))} | {words[-1]}
