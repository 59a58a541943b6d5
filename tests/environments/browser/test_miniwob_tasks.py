import pytest

pytest.importorskip("miniwob", reason="`make setup` installs the pages")

from cua_rl.environments.browser.django_admin.state import draw_names
from cua_rl.environments.browser.django_admin.templates import ADMIN_BROWSER, ADMIN_TEMPLATES
from cua_rl.environments.browser.miniwob.routes import ROUTES, PageElement
from cua_rl.environments.browser.miniwob.templates import DEVELOPMENT, MINIWOB_BROWSER, UNSUITED, all_templates
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, allowed_urls
from cua_rl.environments.phone.demo.phone import SIMULATOR
from cua_rl.environments.table import find_environment, parse_sources
from cua_rl.run.training_config import CLIConfig
from cua_rl.task_loader import load_tasks, require_disjoint
from cua_rl.types.actions import TypeText
from cua_rl.types.errors import ConfigError
from scripts.tiny_models.page_tasks import LABELS, TINY_TASKS
from scripts.tiny_models.vocabulary import label_forms, page_pieces


def element(kind: str, text: str = "", *, id: str = "", value: str = "", is_focused: bool = False) -> PageElement:
    return PageElement(
        kind=kind, id=id, text=text, value=value, is_focused=is_focused, x=0.0, y=0.0, width=10.0, height=10.0
    )


def miniwob(split: str = "train", **fields: object):
    return load_tasks({"source_type": "miniwob", **fields}, seed=0, split=split, device=MINIWOB_BROWSER)


def test_the_development_set_is_the_default_and_every_page_can_be_asked_for_by_name() -> None:
    assert set(miniwob().task_ids) == {f"miniwob/{name}" for name in DEVELOPMENT}
    assert miniwob(task_names=["click-button", "tic-tac-toe"]).task_ids == (
        "miniwob/click-button", "miniwob/tic-tac-toe"
    )  # fmt: skip
    assert len(all_templates()) == 130
    assert len(miniwob(tags=["measuring"]).task_ids) == 100


def test_the_catalog_speaks_only_of_pages_that_exist() -> None:
    names = {template.name for template in all_templates()}
    mentioned = {*DEVELOPMENT, *ROUTES, *TINY_TASKS, *(name for group in UNSUITED.values() for name in group)}
    assert mentioned <= names
    assert {*ROUTES, *TINY_TASKS} <= set(DEVELOPMENT)
    assert not set(DEVELOPMENT) & {name for group in UNSUITED.values() for name in group}


def test_training_and_evaluation_never_share_an_instance() -> None:
    train, held_out = miniwob("train"), miniwob("eval")
    require_disjoint(train, held_out)
    assert all(task.seed < 1_000_000 for task in train.batch(3, 40))
    assert all(task.seed >= 1_000_000 for task in held_out.held_out(40))


def test_a_misspelt_page_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="click-button"):
        miniwob(task_names=["click-buton"])


def test_tasks_of_a_site_run_on_its_browser_and_nowhere_else() -> None:
    with pytest.raises(ConfigError, match="the embedded simulator"):
        load_tasks({"source_type": "miniwob"}, seed=0, split="train", device=SIMULATOR)
    with pytest.raises(ConfigError, match="MiniWoB"):
        load_tasks({"source_type": "demo_training"}, seed=0, split="train", device=MINIWOB_BROWSER)
    with pytest.raises(ConfigError, match="one kind of device"):
        find_environment([{"source_type": "miniwob"}, {"source_type": "demo_training"}])
    assert find_environment({"source_type": "demo_training"}).name == "simulator"


def test_training_on_a_site_is_evaluated_there_unless_told_otherwise() -> None:
    buttons: dict[str, object] = {"source_type": "miniwob", "task_names": ["click-button"]}
    page: dict[str, object] = {"source_type": "page", "pages": [{"url": "http://127.0.0.1/", "instruction": "Look."}]}

    assert CLIConfig(model_name="m", tasks=buttons).eval_tasks == buttons
    assert CLIConfig(model_name="m", tasks=page).eval_tasks is None  # its pages are the same for every seed
    assert CLIConfig(model_name="m", tasks=buttons, eval_tasks=None).eval_tasks is None
    assert CLIConfig(model_name="m", tasks={"source_type": "demo_all"}).eval_tasks == {"source_type": "demo_eval"}


@pytest.mark.parametrize(
    ("name", "instruction", "elements", "expected"),
    [
        ("click-button", 'Click on the "Ok" button.', (element("button", "ok"), element("button", "Ok")), 1),
        ("click-color", "Click on the red colored box.", (element("color", "blue"), element("color", "red")), 1),
        ("click-dialog-2", 'Click the button in the dialog box labeled "x".', (element("button", "x"),), 0),
        ("click-widget", 'Click on a "textarea" widget.', (element("text"), element("textarea")), 1),
        ("click-option", "Select ab and click Submit.", (element("radio", "ab", value="false"), element("button")), 0),
        ("click-option", "Select ab and click Submit.", (element("radio", "ab", value="true"), element("button")), 1),
        ("click-tab-2-medium", 'find and click on the link "in".', (element("link", "out"), *[element("tab")] * 2), 2),
    ],
)
def test_experts_find_what_the_instruction_names(
    name: str, instruction: str, elements: tuple[PageElement, ...], expected: int
) -> None:
    assert ROUTES[name](instruction, elements) == elements[expected]


def test_experts_write_into_the_field_that_has_the_focus() -> None:
    said = 'Enter "Keli" into the text field and press Submit.'
    assert ROUTES["enter-text"](said, [element("text", id="tt", is_focused=True)]) == TypeText(text="Keli")


def test_the_tiny_model_has_a_token_for_every_form_of_every_label() -> None:
    pieces = page_pieces()
    assert {form for label in LABELS for form in label_forms(label)} <= set(pieces)
    assert len(pieces) == len(set(pieces))


def test_the_admin_site_of_evaluation_has_names_that_training_never_shows() -> None:
    def words(seeds: range) -> set[str]:
        drawn = [draw_names(seed) for seed in seeds]
        people = {person.username for names in drawn for person in names.state.people}
        return people | {group for names in drawn for group in (*names.state.groups, *names.new_groups)}

    assert not words(range(200)) & words(range(1_000_000, 1_000_200))


@pytest.mark.parametrize("template", ADMIN_TEMPLATES, ids=lambda template: template.name)
def test_admin_tasks_begin_undone_and_name_what_exists(template) -> None:
    for seed in (*range(40), *range(1_000_000, 1_000_040)):
        instance, names = template.instance(seed), draw_names(seed)
        assert instance.answer is not None or instance.wanted.as_json() != names.state.as_json()
        assert len({person.username for person in instance.wanted.people}) == len(instance.wanted.people)


def test_admin_tasks_are_loaded_for_their_browser() -> None:
    source = {"source_type": "django_admin", "tags": ["expert"]}
    loaded = load_tasks(source, seed=0, split="train", device=ADMIN_BROWSER)
    assert loaded.task_ids == tuple(template.task_id for template in ADMIN_TEMPLATES if template.has_expert)


def test_pages_of_the_users_own_say_where_they_may_go() -> None:
    task = {
        "url": "http://127.0.0.1:8000/shop/",
        "instruction": "Buy tea.",
        "check": {"query": "count:li", "expected": 2},
    }
    source = {"source_type": "page", "pages": [task]}
    (config,) = parse_sources(source)
    assert allowed_urls([config]) == ("http://127.0.0.1:8000/",)
    loaded = load_tasks(source, seed=0, split="train", device=PAGE_BROWSER)
    assert loaded.task_ids == ("page/1",)
    (wider,) = parse_sources({**source, "allowed_urls": ["https://a.example/", "https://b.example/"]})
    assert allowed_urls([wider]) == ("https://a.example/", "https://b.example/")
    for broken in (task | {"url": "ftp://x"}, task | {"check": {"query": "bogus", "expected": "x"}}, task | {"wat": 1}):
        with pytest.raises(ConfigError, match="expected"):
            load_tasks({"source_type": "page", "pages": [broken]}, seed=0, split="train", device=PAGE_BROWSER)
