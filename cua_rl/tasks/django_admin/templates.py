"""Tasks on the admin site: each asks for one change, and succeeds if the database shows that change and no other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from cua_rl.devices.browser.page import BrowserPage
from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.errors import TaskError
from cua_rl.tasks.django_admin.server import LentSite
from cua_rl.tasks.django_admin.state import Names, Person, SiteState, draw_names
from cua_rl.tasks.django_admin.steps import Fill, Follow, Press, Step, Tick
from cua_rl.tasks.task import Category, Difficulty, Task
from cua_rl.types import Validation

ADMIN_BROWSER = DeviceAbilities(
    name="a browser with a Django admin site",
    has_shell=False,
    is_seeded=True,
    site="django_admin",
    queries=frozenset({"site_state"}),
)
MAX_TURNS = 15
_HOME, _USERS, _GROUPS = r"/admin/", r"/admin/auth/user/", r"/admin/auth/group/"
_USER, _GROUP = r"/admin/auth/user/\d+/change/", r"/admin/auth/group/\d+/change/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminInstance:
    """What one instance asks for."""

    instruction: str
    wanted: SiteState
    """The site once it is done."""
    answer: str | None = None
    """What the agent's last message must contain, for tasks that ask."""
    route: tuple[Step, ...] = ()
    """How it is done; empty where no expert knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminTemplate:
    """A task whose people and groups differ by seed."""

    name: str
    category: Category
    difficulty: Difficulty
    draw: Callable[[Names, Random], AdminInstance]
    has_expert: bool = False

    @property
    def task_id(self) -> str:
        return f"django_admin/{self.name}"

    @property
    def tags(self) -> tuple[str, ...]:
        return ("django_admin", "expert") if self.has_expert else ("django_admin",)

    def instance(self, seed: int) -> AdminInstance:
        """What the instance of this seed asks for."""
        return self.draw(draw_names(seed), Random(f"{self.name}-{seed}"))

    def make_task(self, seed: int) -> Task:
        """The instance of this seed."""
        instance = self.instance(seed)
        return Task(
            task_id=self.task_id,
            seed=seed,
            instruction=instance.instruction,
            category=self.category,
            difficulty=self.difficulty,
            max_turns=MAX_TURNS,
            tags=self.tags,
            prepare=partial(_prepare, draw_names(seed).state),
            validate=partial(_validate, instance),
        )


async def _prepare(state: SiteState, device: Device) -> None:
    if not isinstance(device, BrowserPage) or not isinstance(device.site, LentSite):
        raise TaskError(f"expected a page of an admin site, got {device.device_id!r}; leave choosing devices to tasks")
    await device.site.reset(state)
    await device.open_page(f"{device.site.url}enter/")


async def _validate(instance: AdminInstance, device: Device, answer: str | None) -> Validation:
    actual, wanted = await device.query("site_state"), instance.wanted.as_json()
    told = instance.answer is None or (answer is not None and instance.answer in answer)
    if instance.answer is None or actual != wanted:
        return Validation(query="site_state", expected=wanted, actual=actual, success=actual == wanted)
    return Validation(query="answer", expected=instance.answer, actual=answer or "", success=told)


def _add_group(names: Names, random: Random) -> AdminInstance:
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


def _delete_group(names: Names, random: Random) -> AdminInstance:
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


def _rename_group(names: Names, random: Random) -> AdminInstance:
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


def _deactivate_user(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    return AdminInstance(
        instruction=f"Deactivate the user {name}.",
        wanted=names.state.with_person(name, is_active=False),
        route=(*_to_user(name), Tick(_USER, "#id_is_active", False), Press(_USER, "input[name=_save]")),
    )


def _make_staff(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    return AdminInstance(
        instruction=f"Give the user {name} staff status.",
        wanted=names.state.with_person(name, is_staff=True),
        route=(*_to_user(name), Tick(_USER, "#id_is_staff", True), Press(_USER, "input[name=_save]")),
    )


def _rename_user(names: Names, random: Random) -> AdminInstance:
    old, new = random.choice(names.state.people).username, random.choice(names.new_people)
    return AdminInstance(
        instruction=f"Change the username of {old} to {new}.",
        wanted=names.state.with_person(old, username=new),
        route=(*_to_user(old), Fill(_USER, "#id_username", new), Press(_USER, "input[name=_save]")),
    )


def _change_email(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    email = f"{name}{random.randrange(10, 100)}@example.org"
    return AdminInstance(
        instruction=f"Set the email address of the user {name} to {email}.",
        wanted=names.state.with_person(name, email=email),
        route=(*_to_user(name), Fill(_USER, "#id_email", email), Press(_USER, "input[name=_save]")),
    )


def _delete_user(names: Names, random: Random) -> AdminInstance:
    name = random.choice(names.state.people).username
    people = tuple(person for person in names.state.people if person.username != name)
    return AdminInstance(instruction=f"Delete the user {name}.", wanted=replace(names.state, people=people))


def _add_user(names: Names, random: Random) -> AdminInstance:
    name, password = random.choice(names.new_people), f"pass-{random.randrange(10_000, 100_000)}"
    person = Person(username=name, email="")
    return AdminInstance(
        instruction=f"Add a user called {name} with the password {password}.",
        wanted=replace(names.state, people=(*names.state.people, person)),
    )


def _count_groups(names: Names, random: Random) -> AdminInstance:
    return AdminInstance(
        instruction="How many groups are there? Answer with a number.",
        wanted=names.state,
        answer=str(len(names.state.groups)),
    )


def _to_user(name: str) -> tuple[Step, ...]:
    return (Follow(_HOME, ".model-user th a"), Follow(_USERS, f'th a:text("{name}")'))


ADMIN_TEMPLATES: tuple[AdminTemplate, ...] = (
    AdminTemplate(name="add_group", category="input", difficulty="medium", draw=_add_group, has_expert=True),
    AdminTemplate(name="delete_group", category="navigation", difficulty="medium", draw=_delete_group, has_expert=True),
    AdminTemplate(name="rename_group", category="input", difficulty="medium", draw=_rename_group, has_expert=True),
    AdminTemplate(
        name="deactivate_user", category="settings", difficulty="hard", draw=_deactivate_user, has_expert=True
    ),
    AdminTemplate(name="make_staff", category="settings", difficulty="hard", draw=_make_staff, has_expert=True),
    AdminTemplate(name="rename_user", category="input", difficulty="hard", draw=_rename_user, has_expert=True),
    AdminTemplate(name="change_email", category="input", difficulty="hard", draw=_change_email, has_expert=True),
    AdminTemplate(name="delete_user", category="navigation", difficulty="hard", draw=_delete_user),
    AdminTemplate(name="add_user", category="input", difficulty="medium", draw=_add_user),
    AdminTemplate(name="count_groups", category="app", difficulty="easy", draw=_count_groups),
)
