"""Recognises pages by which sites turn browsers away: refusals, challenges, captchas."""

import re
from collections.abc import Mapping

_REFUSALS = (403, 429, 503)
_TITLES = re.compile(
    r"just a moment|attention required|access (to this page has been )?denied|pardon our interruption|robot or human"
    r"|are you a robot|human verification|security check|ddos-guard|captcha|unusual traffic",
    re.IGNORECASE,
)
_CAPTCHAS = (
    "#px-captcha",  # HUMAN (PerimeterX)
    "iframe[src*='captcha-delivery.com']",  # DataDome
    "#challenge-form, #challenge-error-text",  # Cloudflare
    "form#captcha-form",  # Google
    "form[action*='validateCaptcha']",  # Amazon
    "iframe[src*='_Incapsula_Resource']",  # Imperva
    "script[src*='awswaf.com'][src*='captcha.js']",  # Amazon's firewall
    "iframe[src*='arkoselabs.com']",
)
"""What only pages contain that show nothing but a captcha."""
_WIDGETS = (
    "iframe[src*='recaptcha']",
    "iframe[src*='hcaptcha.com']",
    "iframe[src*='challenges.cloudflare.com']",
    ".g-recaptcha, .h-captcha, .cf-turnstile",
)
"""What other pages contain, too, beside a form."""

LOOK = """
({ captchas, widgets }) => {
  const find = selectors => selectors.find(selector => document.querySelector(selector)) || '';
  return { title: document.title, captcha: find(captchas), widget: find(widgets) };
}
"""
SELECTORS = {"captchas": _CAPTCHAS, "widgets": _WIDGETS}
"""The argument of `LOOK`."""


def why_blocked(status: int, headers: Mapping[str, str], seen: Mapping[str, str], *, is_first: bool) -> str | None:
    """What turns the browser away on a page, from its status, its headers and what `LOOK` returns; None if nothing.

    A refusal alone (403, 503) counts only for the first page: later ones may be what the agent asked for.
    """
    if seen["captcha"]:
        return f"a captcha ({seen['captcha']})"
    if headers.get("cf-mitigated") == "challenge":
        return "a challenge (cf-mitigated)"
    if status in _REFUSALS:
        if _TITLES.search(seen["title"]) or seen["widget"]:
            return f"a challenge ({seen['title'] or seen['widget']!r}, status {status})"
        if is_first or status == 429:
            return f"status {status}"
    return None
