"""What is found on a page, and that a page which says something wrong is found out."""

from pathlib import Path

import pytest

from tests.documentation.examples import Example, is_command, is_options, read_examples, read_usage
from tests.documentation.reader import Reader

PAGE = """# A page

Options such as `loss=ppo clip_high=0.28` and words such as `rewards` and `.venv`.

```bash
make train ARGS="max_steps=1"   # one step
MONITOR_BASE_URL=http://here python -m cua_rl.recipes.train \\
    tasks='{"source_type":
      "demo_all"}'

export GBOX_API_KEY=...
```

```python
assert True
```

```python file=tasks/one.py
NUMBER = 1
```

```
tasks ──► CONTROLLER
```

| device | needs | command |
|---|---|---|
| boxes | `GBOX_API_KEY` | `python -m cua_rl.recipes.train device=gbox` |
"""


def found_in(folder: Path, text: str) -> list[Example]:
    (folder / "page.md").write_text(text)
    return read_examples(folder / "page.md")


def complaint_about(folder: Path, text: str) -> str:
    """What a reader of the page says of it."""
    reader = Reader(stands_for={}, set_variable=lambda name, value: None)
    return "\n".join(reader.complaints(found_in(folder, text)))


def test_a_page_gives_its_commands_blocks_and_options_with_their_places(tmp_path: Path) -> None:
    examples = found_in(tmp_path, PAGE)

    assert [(example.line, example.kind) for example in examples] == [
        (3, "options"),
        (6, "command"),
        (7, "command"),
        (11, "command"),
        (15, "python"),
        (19, "file"),
        (28, "command"),
    ]
    assert examples[1].words == ["make", "train", "ARGS=max_steps=1"]
    assert examples[2].words[-1] == 'tasks={"source_type":\n      "demo_all"}'
    assert examples[5].file == "tasks/one.py"
    assert examples[6].words[0] == "GBOX_API_KEY=..."


def test_a_usage_line_gives_its_optional_parts_too() -> None:
    usage = "Say so:\n\n    python -m scripts.fuzz_monitor [--requests 2000] [key=value ...]     # or `make monitor`\n"

    assert [example.text for example in read_usage("fuzz_monitor.py", usage)] == ["make monitor"]
    assert [example.text for example in read_usage("fuzz_monitor.py", usage.split("  # or")[0])] == [
        "python -m scripts.fuzz_monitor --requests 2000 key=value"
    ]


def test_words_that_look_alike_are_neither_commands_nor_options() -> None:
    assert not any(is_command(text) for text in ("python", "make", ".venv", "kill -9", "import torchvision"))
    assert not any(is_options(text) for text in ("parity_limit", "ppo dual_clip=c", "step=", "--arms plain"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```bash\nfrobnicate --now\n```\n", "expected a rule for 'frobnicate'"),
        ("```\nmake train\n```\n", "names its language"),
        ('```bash\nmake train ARGS="open\n```\n', "closed block"),
        ("`python -m cua_rl.recipes.train grup_size=4`", "expected settings of a recipe"),
        ("Use `grup_size=4`.", "expected settings of a recipe"),
        ("Use `group_size=many`.", "expected settings of a recipe"),
        ("Run `make trian`.", "trian"),
        ("Run `python -m benchmarks.no_such_thing`.", "expected a module"),
        ("Run `python -m benchmarks.controller_load --rolouts 512`.", "--rolouts"),
        ("Run `pip install 'cua_rl[brwser]'`.", "brwser"),
        ("Run `scripts/no_such_script.sh`.", "expected an executable file"),
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("```python\nfrom cua_rl.recipes.train import main_loop\n```\n", "ImportError"),
        ('```json\n{"a": }\n```\n', "expected json"),
    ],
)
def test_a_page_that_says_something_wrong_is_found_out(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in complaint_about(tmp_path, text)
