"""docs/settings.md says what the recipes say."""

import re

from cua_rl.command_line.settings import list_settings
from scripts.settings_page import PAGE, RECIPES, format_page, shown_default


def test_the_page_is_what_the_recipes_say_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == format_page(), "run python -m scripts.settings_page"


def test_every_setting_of_every_recipe_stands_on_it_with_its_default() -> None:
    rows = set(re.findall(r"^\| `([\w.]+)` \| `?(.*?)`? \|", format_page(), re.MULTILINE))

    for recipe in RECIPES:
        for setting in list_settings(recipe.config_class):
            if setting.group is not None:
                continue
            default = "required" if repr(setting.default) == "required" else shown_default(setting.default) or "empty"
            assert (setting.name, default.replace("|", "\\|")) in rows


def test_the_page_is_the_same_in_every_checkout() -> None:
    assert str(PAGE.parents[1]) not in format_page()


def test_presets_stand_apart_from_defaults() -> None:
    page = format_page()

    assert "| `lora_rank` | `32` |" in page
    assert "`lora_rank=16`" in page.partition("Without model_name, the embedded demo presets:")[2].splitlines()[0]
