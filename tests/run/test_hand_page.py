"""The page on which a person takes over: what it shows and takes, and from whom."""

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from cua_rl.run.hand_page import serve_page
from tests.run.test_by_hand import SCREEN, person, request


async def test_the_page_shows_the_turn_and_passes_lines_on_in_their_order(tmp_path: Path) -> None:
    asked = person(tmp_path)
    async with serve_page(asked, "Open the settings.") as link, httpx.AsyncClient() as browser:
        parts = urlsplit(link)
        root, browser.headers["Authorization"] = f"http://{parts.netloc}", f"Bearer {parts.fragment}"
        before = (await browser.get(f"{root}/api/turn")).json()
        assert (await browser.post(f"{root}/api/lines", json={"lines": ["jump", "click 96 160"]})).json() == 2

        await asked.sample_turn(request())

        after = (await browser.get(f"{root}/api/turn")).json()
        again = (await browser.get(f"{root}/api/turn", params={"seen": after["seen"]})).json()
    assert (before["task"], before["turn"], before["image"]) == ("Open the settings.", 2, "")
    assert (after["turn"], after["seen"], after["image"]) == (3, SCREEN.sha256, SCREEN.data_url())
    assert after["said"][1].startswith("not done: expected help, finish, or one of click")
    assert after["said"][2] == "  Click(x=96, y=160)"
    assert (again["seen"], again["image"], after["is_phone"]) == (SCREEN.sha256, "", True)


@pytest.mark.parametrize("key", ["", "Basic dTpw", "Bearer another"])
async def test_without_the_links_token_nothing_is_shown_or_taken(tmp_path: Path, key: str) -> None:
    asked = person(tmp_path)
    async with serve_page(asked, "Open the settings.") as link:
        root = f"http://{urlsplit(link).netloc}"
        headers = {"Authorization": key} if key else {}
        async with httpx.AsyncClient(headers=headers) as stranger:
            answers = [
                await stranger.get(f"{root}/api/turn"),
                await stranger.post(f"{root}/api/lines", json={"lines": ["click 1 2"]}),
            ]
            page = await stranger.get(root)
    assert [answer.status_code for answer in answers] == [401, 401]
    assert asked.lines.empty()
    assert urlsplit(link).hostname == "127.0.0.1"
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert urlsplit(link).fragment not in page.text
