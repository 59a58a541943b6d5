from pathlib import Path

import pytest

from cua_rl.environments.browser.chromium import chromium_command, find_chromium
from cua_rl.environments.browser.hands import require_possible
from cua_rl.environments.browser.settings import Clip, PageSettings
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.key_names import key_chord
from cua_rl.types.actions import Button, Click, OpenApp, PressButton, PressKey
from cua_rl.types.errors import ConfigError


def make_program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_the_headless_shell_is_preferred_to_the_full_browser(tmp_path: Path) -> None:
    make_program(tmp_path, "chromium")
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert find_chromium(environ) == tmp_path / "chromium"
    shell = make_program(tmp_path, "chromium-headless-shell")
    assert find_chromium(environ) == shell


def test_a_browser_that_playwright_downloaded_is_the_last_choice(tmp_path: Path) -> None:
    downloaded = make_program(tmp_path / "ms" / "chromium-1200" / "chrome-linux", "chrome")
    environ = {"PATH": "", "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path / "ms")}
    assert find_chromium(environ) == downloaded


def test_no_browser_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"install_system_packages\.sh"):
        find_chromium({"PATH": str(tmp_path), "HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="CUA_RL_CHROMIUM"):
        find_chromium({"PATH": str(tmp_path), "CUA_RL_CHROMIUM": "no-such-browser"})


def test_only_hosts_of_allowed_addresses_have_addresses() -> None:
    command = chromium_command(
        Path("/bin/chromium"), Path("/tmp/p"), ("https://shop.example/a/", "file:///pages/"), 1.5
    )
    assert "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE shop.example" in command
    assert "--user-data-dir=/tmp/p" in command
    assert "--force-device-scale-factor=1.5" in command


@pytest.mark.parametrize(
    ("url", "is_blocked"),
    [
        ("https://shop.example/a/b", False),
        ("https://shop.example/b", True),
        ("https://shop.example.evil.net/a/", True),
        ("data:image/png;base64,AAAA", False),
        ("file:///etc/passwd", True),
    ],
)
def test_everything_but_allowed_beginnings_is_blocked(url: str, is_blocked: bool) -> None:
    settings = PageSettings(allowed_urls=("https://shop.example/a/",))
    assert (settings.blocked_urls.match(url) is not None) is is_blocked


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed_urls"):
        PageSettings(allowed_urls=())
    with pytest.raises(ConfigError, match="scale"):
        PageSettings(allowed_urls=("file:///",), scale=0)
    with pytest.raises(ConfigError, match="clip"):
        PageSettings(allowed_urls=("file:///",), viewport_width=100, clip=Clip(width=110, height=10))


def test_keys_have_the_names_that_agents_give_them() -> None:
    assert key_chord(("ctrl", "a")) == "Control+a"
    assert key_chord(("Page_Down",)) == "PageDown"
    assert key_chord(("ctrl", "+")) == "Control++"


@pytest.mark.parametrize("key", ["bogus", "é", "\t", "\0", "\x7f", ""])
def test_a_key_that_the_browser_does_not_know_is_told_to_the_model(key: str) -> None:
    with pytest.raises(ActionRejected, match="There is no key"):
        key_chord((key,))


@pytest.mark.parametrize("action", [OpenApp(name="Mail"), PressButton(button=Button.HOME), PressKey(keys=("nokey",))])
def test_what_no_browser_can_do_is_told_to_the_model(action: OpenApp | PressButton | PressKey) -> None:
    with pytest.raises(ActionRejected):
        require_possible(action)
    require_possible(Click(x=0, y=0))


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:8000/shop/", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("https://fonts.example.org/css", "fonts.example.org:443"),
        ("http://fonts.example.org/", "fonts.example.org:80"),
        ("wss://live.example.org/", "live.example.org:443"),
        ("http://127.0.0.1", "127.0.0.1"),  # also the beginning of http://127.0.0.1:8000/
        ("http://[::1]:8000/", "[::1]:8000"),
    ],
)
def test_sockets_and_redirects_reach_the_hosts_of_allowed_addresses(url: str, host: str) -> None:
    nowhere = ("file:///srv/pages/", "http://127.0.0.1:0/")
    assert PageSettings(allowed_urls=(*nowhere, url)).reached_hosts == (host,)
