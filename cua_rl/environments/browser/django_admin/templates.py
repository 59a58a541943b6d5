"""Tasks on the admin site: each asks for one change, and succeeds if the database shows that change and no other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from cua_rl.environments.browser.django_admin.server import AdminSite
from cua_rl.environments.browser.django_admin.state import Names, Person, SiteState, draw_names
from cua_rl.environments.browser.page import as_page
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.tasks.answers import is_answer
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.errors import TaskError
from cua_rl.types.judgement import Validation

ADMIN_BROWSER = DeviceAbilities(
    name="a browser with Django admin", has_shell=False, is_seeded=True, environment="django_admin"
)
MAX_TURNS = 15
_PREFIX = "django_admin/"
_HOME, _USERS, _GROUPS = r"/admin/", r"/admin/auth/user/", r"/admin/auth/group/"
_USER, _GROUP = r"/admin/auth/user/\d+/change/", r"/admin/auth/group/\d+/change/"


@dataclass(frozen=True, slots=True)
class Follow:
    """On a page whose path matches, click a link; `selector` may end in :text("...") for what it says."""

    path: str
    selector: str


@dataclass(frozen=True, slots=True)
class Fill:
    """On a page whose path matches, let a field hold a text."""

    path: str
    selector: str
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """On a page whose path matches, let a box be ticked or not."""

    path: str
    selector: str
    is_on: bool


@dataclass(frozen=True, slots=True)
class Press:
    """On a page whose path matches, press a button."""

    path: str
    selector: str


Step = Follow | Fill | Tick | Press


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminInstance:
    """What one instance asks for."""

    instruction: str
    wanted: SiteState
    """The site once it is done."""
    answer: str | None = None
    """What the agent's last message must say, for tasks that ask."""
    route: tuple[Step, ...] = ()
    """How it is done; empty where there is no expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminTemplate(Template):
    """A task whose people and groups differ by seed."""

    draw: Callable[[Names, Random], AdminInstance]

    @property
    def name(self) -> str:
        """The id without the site, such as "add_group"."""
        return self.task_id.removeprefix(_PREFIX)

    @property
    def has_expert(self) -> bool:
        return "expert" in self.tags

    def instance(self, seed: int) -> AdminInstance:
        """What the instance of this seed asks for."""
        return self.draw(draw_names(seed), Random(f"{self.name}-{seed}"))

    def make_task(self, seed: int) -> Task:
        """The instance of this seed."""
        instance, state = self.instance(seed), draw_names(seed).state

        async def prepare(device: Device) -> None:
            page = as_page(device)
            if not isinstance(page.site, AdminSite):
                raise TaskError(f"expected a page of an admin site, got {page.device_id!r}; run it on one")
            await page.site.reset(state)
            await page.open_page(f"{page.site.url}enter/")

        async def validate(device: Device, answer: str | None) -> Validation:
            actual, wanted = await device.query("site_state"), instance.wanted.as_json()
            if instance.answer is None or actual != wanted:
                return Validation(query="site_state", expected=wanted, actual=actual, success=actual == wanted)
            success = is_answer(answer, instance.answer)
            return Validation(query="answer", expected=instance.answer, actual=answer or "", success=success)

        return self.build_task(seed, instance.instruction, prepare=prepare, validate=validate)


def add_group(names: Names, random: Random) -> AdminInstance:
    group = random.choice(names.new_groups)
    return AdminInstance(
        instruction=f"Add a group called {group}.",
        wanted=replace(names.state, groups=(*names.state.groups, group)),
        route=(
            Follow(_HOME, ".model-group .addlink"),
            Fill(r"/admin/auth/group/add/", "#id_name", group),
            Press(r"/admin/auth/group/add/", "input[name=_save]"),
        ),
    )


def delete_group(names: Names, random: Random) -> AdminInstance:
    group = random.choice(names.state.groups)
    return AdminInstance(
        instruction=f"Delete the group {group}.",
        wanted=replace(names.state, groups=tuple(name for name in names.state.groups if name != group)),
        route=(
            Follow(_HOME, ".model-group th a"),
            Follow(_GROUPS, f'th a:text("{group}")'),
            Follow(_GROUP, ".deletelink"),
            Press(r"/admin/auth/group/\d+/delete/", "input[type=submit]"),
        ),
    )


def rename_group(names: Names, random: Random) -> AdminInstance:
    old, new = random.choice(names.state.groups), random.choice(names.new_groups)
    groups = tuple(new if name == old else name for name in names.state.groups)
    return AdminInstance(
        instruction=f"Rename the group {old} to {new}.",
        wanted=replace(names.state, groups=groups),
        route=(
            Follow(_HOME, ".model-group th a"),
            Follow(_GROUPS, f'th a:text("{old}")'),
            Fill(_GROUP, "#id_name", new),
            Press(_GROUP, "input[name=_save]"),
        ),
    )


def deactivate_user(names: Names, random: Random) -> AdminInstance:
    return _tick(names, random, "Deactivate the user {}.", "is_active", False)


def make_staff(names: Names, random: Random) -> AdminInstance:
    return _tick(names, random, "Give the user {} staff status.", "is_staff", True)


def _tick(names: Names, random: Random, instruction: str, field: str, is_on: bool) -> AdminInstance:
    name = random.choice(names.state.people).username
    return AdminInstance(
        instruction=instruction.format(name),
        wanted=names.state.with_person(name, **{field: is_on}),
        route=(*_to_user(name), Tick(_USER, f"#id_{field}", is_on), Press(_USER, "input[name=_save]")),
    )


def rename_user(names: Names, random: Random) -> AdminInstance:
    old, new = random.choice(names.state.people).username, random.choice(names.new_people)
    return AdminInstance(
        instruction=f"Change the username of {old} to {new}.",
        wanted=names.state.with_person(old, username=new),
        route=(*_to_user(old), Fill(_USER, "#id_username", new), Press(_USER, "input[name=_save]")),
    )


def change_email(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    email = f"{name}{random.randrange(10, 100)}@example.org"
    return AdminInstance(
        instruction=f"Set the email address of the user {name} to {email}.",
        wanted=names.state.with_person(name, email=email),
        route=(*_to_user(name), Fill(_USER, "#id_email", email), Press(_USER, "input[name=_save]")),
    )


def delete_user(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    people = tuple(person for person in names.state.people if person.username != name)
    return AdminInstance(instruction=f"Delete the user {name}.", wanted=replace(names.state, people=people))


def add_user(names: Names, random: Random) -> AdminInstance:
    name, password = random.choice(names.new_people), f"pass-{random.randrange(10_000, 100_000)}"
    person = Person(username=name, email="")
    return AdminInstance(
        instruction=f"Add a user called {name} with the password {password}.",
        wanted=replace(names.state, people=(*names.state.people, person)),
    )


def count_groups(names: Names, random: Random) -> AdminInstance:
    return AdminInstance(
        instruction="How many groups are there? Answer with a number.",
        wanted=names.state,
        answer=str(len(names.state.groups)),
    )


def _to_user(name: str) -> tuple[Step, ...]:
    return (Follow(_HOME, ".model-user th a"), Follow(_USERS, f'th a:text("{name}")'))


def _template(
    name: str,
    draw: Callable[[Names, Random], AdminInstance],
    category: Category,
    difficulty: Difficulty,
    *,
    has_expert: bool = False,
) -> AdminTemplate:
    return AdminTemplate(
        task_id=f"{_PREFIX}{name}",
        category=category,
        difficulty=difficulty,
        max_turns=MAX_TURNS,
        tags=("django_admin", "expert") if has_expert else ("django_admin",),
        draw=draw,
    )


ADMIN_TEMPLATES: tuple[AdminTemplate, ...] = (
    _template("add_group", add_group, "input", "medium", has_expert=True),
    _template("delete_group", delete_group, "navigation", "medium", has_expert=True),
    _template("rename_group", rename_group, "input", "medium", has_expert=True),
    _template("deactivate_user", deactivate_user, "settings", "hard", has_expert=True),
    _template("make_staff", make_staff, "settings", "hard", has_expert=True),
    _template("rename_user", rename_user, "input", "hard", has_expert=True),
    _template("change_email", change_email, "input", "hard", has_expert=True),
    _template("delete_user", delete_user, "navigation", "hard"),
    _template("add_user", add_user, "input", "medium"),
    _template("count_groups", count_groups, "app", "easy"),
)
