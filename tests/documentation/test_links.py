"""Links between pages, to their headings and to files lead somewhere, and readers are led to every page."""

import re
from pathlib import Path

import pytest

from tests.documentation.examples import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("training-monitor/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([\w./-]+\.(?:md|py|sh|txt|ts|jsonl|mjs|example|ini))`")
FOLDERS = (
    "",
    "cua_rl",
    "docs",
    "examples",
    "examples/agents",
    "tests",
    "cua_rl/rl",
    "cua_rl/agent",
    "training-monitor/src/charts",
)
"""Where pages leave out the beginning of a path."""
NAMING = {".py", ".sh", ".toml", ".yaml", ".yml", ".conf", ".sbatch", "Makefile", "env.example"}
"""Files other than pages whose messages and comments name pages."""
MADE = {
    *("outcomes", "attempts", "results", "metrics", "checkpoints", "judge_prompt", "task", "validator", "my_tasks"),
    "utils",
}
"""Files that a run writes, that a reader does, or that nobody should."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The addresses of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.name}: {link}")
    return broken


def test_every_link_of_a_page_leads_somewhere() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []


@pytest.mark.parametrize(("page", "folder"), [("README.md", "docs"), ("CONTRIBUTING.md", "docs/dev")])
def test_readme_leads_to_every_page_for_users_and_contributing_to_every_page_for_developers(
    page: str, folder: str
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(text) if "://" not in link}
    assert [path.name for path in (ROOT / folder).glob("*.md") if path not in linked] == []


def test_every_file_that_a_page_names_exists() -> None:
    named = {(page.name, name) for page in PAGES for name in SPAN.findall(without_code(page.read_text("utf-8")))}
    gone = [
        (page, name)
        for page, name in sorted(named)
        if Path(name).stem not in MADE and not any((ROOT / folder / name).exists() for folder in FOLDERS)
    ]
    assert gone == []


def test_every_page_that_code_names_exists() -> None:
    folders = ("cua_rl", "scripts", "benchmarks", "deploy", "configs", "examples", "tests")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in NAMING]
    places = [*inside, *(path for path in ROOT.iterdir() if path.suffix in NAMING or path.name in NAMING)]
    gone = [
        f"{place.relative_to(ROOT)}: {page}"
        for place in places
        for page in re.findall(r"(?<![\w/-])docs/[\w/]+\.md", place.read_text(encoding="utf-8"))
        if not (ROOT / page).is_file()
    ]
    assert gone == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading, of two\n[good](#one-heading-of-two) [bad](#two) [gone](gone.md) [web](https://x.y)\n"
    )
    assert broken_links(page) == ["page.md: #two", "page.md: gone.md"]
