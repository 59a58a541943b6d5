"""Why a step's success changed: because of the tasks that were drawn, or because of the success at each of them."""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain

from sqlalchemy import func, select

from cua_rl.database.models import Group, Step
from cua_rl.evaluation.statistics import sum_tasks
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import RunAccess
from cua_rl.monitor.figures import make_rate
from cua_rl.monitor.group_queries import find_source

_Groups = dict[str, list[tuple[int, int]]]  # successes and rollouts of each group, by task


async def load_step_change(run: RunAccess, step: int, num_before: int) -> schemas.StepChange:
    """The step against as many steps before it; raises `NotFoundError`.

    The difference of two rates is the sum of the change within each task, weighted as in this step, and of the change
    of the weights at the earlier rates (E. M. Kitagawa, 1955, Journal of the American Statistical Association 50).
    Success is the mean over groups, as everywhere.
    """
    await find_source(run, "step", step)
    query = (
        select(Step.step, Group.task_id, Group.num_successes, Group.num_rollouts)
        .join(Step, Group.step_id == Step.id)
        .where(Step.training_id == run.training.id, Step.step <= step, Group.num_rollouts > 0)
    )
    earlier = select(Step.step).where(Step.training_id == run.training.id, Step.step < step)
    earlier = earlier.order_by(Step.step.desc()).limit(num_before).subquery()
    first = await run.session.scalar(select(func.min(earlier.c.step)))
    before: _Groups = defaultdict(list)
    now: _Groups = defaultdict(list)
    for number, task, won, done in await run.session.execute(
        query.where(Step.step >= (step if first is None else first))
    ):
        (now if number == step else before)[task].append((won or 0, done or 0))
    then, current = (_mean(list(chain.from_iterable(groups.values()))) for groups in (before, now))
    effects = _effects(before, now)
    change = Fraction(0) if then is None or current is None else current - then
    tasks = sorted(effects, key=lambda task: (-abs(effects[task]), task))
    return schemas.StepChange(
        first_step=first or 0,
        last_step=step - 1,
        before=None if then is None else float(then),
        now=None if current is None else float(current),
        task_mix=float(change - sum(effects.values())),
        tasks=[
            schemas.TaskShare(
                task_id=task,
                before=make_rate(sum_tasks(before[task])),
                now=make_rate(sum_tasks(now[task])),
                effect=float(effects[task]),
            )
            for task in tasks
        ],
    )


def _mean(groups: Sequence[tuple[int, int]]) -> Fraction | None:
    return sum((Fraction(won, done) for won, done in groups), Fraction(0)) / len(groups) if groups else None


def _effects(before: _Groups, now: _Groups) -> dict[str, Fraction]:
    """The change within each task that both have, times its share of this step's groups."""
    total = sum(map(len, now.values()))
    effects: dict[str, Fraction] = {}
    for task, groups in now.items():
        earlier, current = _mean(before.get(task, [])), _mean(groups)
        if earlier is not None and current is not None:
            effects[task] = Fraction(len(groups), total) * (current - earlier)
    return effects
