"""The pages of the `miniwob` package: how to begin, query and read one."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from cua_rl.environments.browser.page import as_page
from cua_rl.environments.browser.settings import Clip, PageSettings
from cua_rl.environments.device import Device
from cua_rl.host.users import public_copy
from cua_rl.types.errors import ConfigError

WIDTH, HEIGHT = 160, 210
"""The part of a page that belongs to the task, CSS pixels."""
_VIEWPORT = 500, 320  # in a smaller one, what is beside the task would move into it
_TIME_LIMIT_MS = 100_000_000  # pages allow ten seconds, far too few for a model
DEFAULT_SCALE = 3.0

_BEGIN = """
async ({ seed, limitMs }) => {
  await new Promise(requestAnimationFrame);
  window.scrollTo(0, 0);
  window.__cuaCloseList();
  document.body.tabIndex = -1;
  document.body.focus();
  document.body.blur();
  document.body.removeAttribute('tabindex');
  document.querySelectorAll('*').forEach(element => { element.scrollTop = element.scrollLeft = 0; });
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = limitMs;
  core.startEpisodeReal();
  core.cover_div.onclick = null;
  core.cover_div.textContent = 'DONE';
  while (!WOB_TASK_READY) await new Promise(resolve => setTimeout(resolve, 10));
  const told = core.getUtterance();
  window.__cuaTold = typeof told === 'string' ? told : told.utterance;
  const images = window.__cuaImages = window.__cuaImages || {};
  const urls = Array.from(document.images, image => image.src);
  for (const element of document.querySelectorAll('body *')) {
    const style = getComputedStyle(element);
    for (const [, url] of (style.content + style.backgroundImage).matchAll(/url\\("([^"]+)"\\)/g)) urls.push(url);
  }
  for (const { textContent } of document.querySelectorAll('style'))  // also those that a mouse over them shows
    for (const [, url] of textContent.matchAll(/url\\(["']?([^"')]+)/g)) urls.push(url);
  await Promise.all(urls.filter(url => url && !images[url]).map(url => {
    images[url] = new Image();
    images[url].src = url;
    return images[url].decode().catch(() => null);
  }));
}
"""
"""Begin with this seed. What covers the page at its end says so, and no longer begins it again.

The screen is that of the seed, whatever was done before: what still scrolls ends with the next frame, everything
scrolls back, the Tab key goes to the first element, and images are there, kept for the next time that the page shows
them.
"""
_RESULT = "() => ({ isOver: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL, told: window.__cuaTold })"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageResult:
    """The page's own verdict on its task. `reward` is -1 to 1, before any penalty for time; 0 until it is over."""

    is_over: bool
    reward: float
    instruction: str


@lru_cache(maxsize=1)
def html_folder() -> Path:
    """Where the pages are; raises `ConfigError` if the package is not installed."""
    spec = find_spec("miniwob")  # importing it would load Selenium
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("expected the package miniwob for MiniWoB++ tasks; pip install 'cua_rl[browser]'")
    return public_copy(Path(spec.submodule_search_locations[0]) / "html")  # browsers may have their own users


def page_url(name: str) -> str:
    return (html_folder() / "miniwob" / f"{name}.html").as_uri()


def miniwob_settings(scale: float = DEFAULT_SCALE) -> PageSettings:
    """Screens of 160 x 210 pixels times the scale; pages reach nothing but their own files."""
    return PageSettings(
        allowed_urls=(f"{html_folder().as_uri()}/",),
        viewport_width=_VIEWPORT[0],
        viewport_height=_VIEWPORT[1],
        clip=Clip(width=WIDTH, height=HEIGHT),
        scale=scale,
        quiet_ms=0,
    )


async def begin(device: Device, name: str, seed: int, *, reload: bool = False) -> None:
    """Make the page of a task look as this seed has it: in place if the page is open already, unless `reload`."""
    page = as_page(device)
    if reload or page.url != page_url(name):
        await page.open_page(page_url(name))
    await page.leave()
    await page.evaluate(_BEGIN, {"seed": str(seed), "limitMs": _TIME_LIMIT_MS})


async def read_result(device: Device) -> PageResult:
    """How the task on the page stands."""
    result = cast("dict[str, object]", await as_page(device).evaluate(_RESULT))
    reward = result["reward"]
    return PageResult(
        is_over=result["isOver"] is True,
        reward=float(reward) if isinstance(reward, int | float) else 0.0,
        instruction=str(result["told"]),
    )
