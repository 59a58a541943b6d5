"""Branches on pages without copies: siblings do their parents' turns again, by seed and actions, screen by screen."""

import pytest

pytest.importorskip("miniwob", reason="`make setup` installs the pages")
pytest.importorskip("django", reason="`make setup` installs the site")

from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.templates import ADMIN_BROWSER
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.pool import DeviceBackend
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.task_loader import load_tasks
from tests.rollout.test_branches import ON_COMPUTERS, RandomModel, run

KINDS: list[tuple[str, DeviceAbilities, type[DeviceBackend]]] = [
    ("miniwob", MINIWOB_BROWSER, MiniWobPages),
    ("django_admin", ADMIN_BROWSER, AdminPages),
]


@pytest.mark.parametrize(("source_type", "abilities", "pages"), KINDS, ids=[kind[0] for kind in KINDS])
async def test_siblings_on_a_page_come_to_the_fork_by_the_turns_of_their_parent(
    source_type: str, abilities: DeviceAbilities, pages: type[DeviceBackend]
) -> None:
    assert abilities.is_repeatable
    tasks = load_tasks({"source_type": source_type}, seed=0, split="train", device=abilities)
    num_siblings = 0
    for task in tasks.batch(0, 2):
        model = RandomModel(tool="computer_use", acts=ON_COMPUTERS)
        group = (await run(task, BranchingSettings(num_siblings=2), backend=pages(), model=model)).group
        members = {one.rollout_id: one for one in group.rollouts}
        for one in members.values():
            if one.parent_id is not None:
                parent, place = members[one.parent_id], one.fork_turn
                assert one.turns[:place] == parent.turns[:place]
                assert one.own_turns[0].agent.before == parent.turns[place].agent.before
                assert one.own_turns[0].model.prompt == parent.turns[place].model.prompt
                num_siblings += 1
    assert num_siblings > 0
