"""What chance alone achieves: every demo task untouched, by its expert, and by an agent that acts at random.

    python -m benchmarks.random_agent [20]     # attempts at each task

The random agent is the strong kind: it taps elements, not pixels. Prints one line per task, then JSON lines; a task
that chance solves would reward luck. Questions are answered with a random word.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.claims import require
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.demo.expert import decide
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.types.actions import Action, Button, Click, Drag, Finish, LongPress, PressButton, TypeText

TARGET = 0.05
WORDS = ("hello", "settings", "12", "7", "Emma", "news")
FINISH_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What happened on one task."""

    template: TaskTemplate
    untouched: bool
    expert_turns: int | None
    """None if the expert failed."""
    num_lucky: int
    num_actions: int
    """Of the random agent."""
    num_rejected: int


async def main(num_episodes: int) -> None:
    """Try every task and print."""
    rows = [await measure(template, num_episodes) for template in TEMPLATES.values()]
    require_actions(rows)
    print(f"{'task':44} {'difficulty':10} {'max_turns':>9} {'untouched':>9} {'expert':>8} {'random':>8}")
    for row in rows:
        expert = "fails" if row.expert_turns is None else f"{row.expert_turns} turns"
        untouched = "succeeds" if row.untouched else "fails"
        name, template = row.template.task_id, row.template
        lucky = f"{row.num_lucky}/{num_episodes}"
        print(f"{name:44} {template.difficulty:10} {template.max_turns:9} {untouched:>9} {expert:>8} {lucky:>8}")
    for difficulty in ("easy", "medium", "hard"):
        of_kind = [row for row in rows if row.template.difficulty == difficulty]
        rate = sum(row.num_lucky for row in of_kind) / (num_episodes * len(of_kind))
        print(
            json.dumps({"figure": f"random_success_rate_{difficulty}", "value": round(rate, 4), "tasks": len(of_kind)})
        )
    harder = [row for row in rows if row.template.difficulty != "easy"]
    reached = sum(row.num_lucky > 0 for row in harder) / len(harder)
    figure = {"figure": "share_of_tasks_not_easy_that_chance_reached", "value": round(reached, 4), "target": TARGET}
    print(json.dumps(figure | {"episodes": num_episodes, "tasks": len(harder)}))
    print(json.dumps({"figure": "untouched_successes", "value": sum(row.untouched for row in rows), "target": 0}))
    failures = sum(row.expert_turns is None for row in rows)
    print(json.dumps({"figure": "expert_failures", "value": failures, "target": 0, "tasks": len(rows)}))


def require_actions(rows: Sequence[Row]) -> None:
    """Refuse figures of chance that had no chance: the phone carried out hardly anything."""
    require(
        "an agent that acts at random",
        acts_at_every_task=(True, all(row.num_actions for row in rows)),
        most_actions_are_carried_out=(True, sum(row.num_rejected - 0.2 * row.num_actions for row in rows) < 0),
    )


async def measure(template: TaskTemplate, num_episodes: int) -> Row:
    """One instance untouched and by the expert, `num_episodes` others at random."""
    task = template.make_task(0)
    untouched = (await task.validate(make_simulated_phone(task), None)).success
    played = [await play_at_random(template, seed) for seed in range(num_episodes)]
    return Row(
        template=template,
        untouched=untouched,
        expert_turns=await play_expert(template, 0),
        num_lucky=sum(is_lucky for is_lucky, _ in played),
        num_actions=sum(outcomes.total() for _, outcomes in played),
        num_rejected=sum(outcomes["rejected"] for _, outcomes in played),
    )


async def play_expert(template: TaskTemplate, seed: int) -> int | None:
    """In how many actions the expert succeeds."""
    task = template.make_task(seed)
    phone = make_simulated_phone(task)
    for num_actions in range(task.max_turns + 1):
        action = decide(task, phone).action
        if isinstance(action, Finish):
            return num_actions if (await task.validate(phone, action.answer)).success else None
        if num_actions < task.max_turns:
            await phone.execute(action)
    return task.max_turns if (await task.validate(phone, None)).success else None


async def play_at_random(template: TaskTemplate, seed: int) -> tuple[bool, Counter[str]]:
    """Whether chance leaves the phone as the task wants it, and how many actions it took, "done" and "rejected"."""
    task, random = template.make_task(seed), Random(f"{template.task_id}-{seed}")
    phone, outcomes = make_simulated_phone(task), Counter[str]()
    for _ in range(task.max_turns):
        if random.random() < FINISH_RATE:
            break
        try:
            await phone.execute(draw_action(phone, random))
            outcomes["done"] += 1
        except ActionRejected:
            outcomes["rejected"] += 1
    return (await task.validate(phone, random.choice(WORDS))).success, outcomes


def draw_action(phone: SimulatedPhone, random: Random) -> Action:
    """Mostly a tap on something that can be tapped."""
    kind = random.random()
    if kind < 0.1:
        return PressButton(button=random.choice((Button.BACK, Button.HOME, Button.RECENTS)))
    if kind < 0.15:
        return TypeText(text=random.choice(WORDS))
    if kind < 0.3:
        x, y, to_x, to_y = (random.randrange(edge) for edge in (WIDTH, HEIGHT, WIDTH, HEIGHT))
        return Drag(x=x, y=y, to_x=to_x, to_y=to_y)
    screen = build_screen(phone.state)
    targets = [item for item in (*screen.visible_content(), *screen.fixed) if item.is_tappable]
    x, y = random.choice(targets).rect.centre if targets else (WIDTH // 2, HEIGHT // 2)
    return LongPress(x=x, y=y) if kind < 0.35 else Click(x=x, y=y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="measure what chance alone achieves")
    parser.add_argument("num_attempts", nargs="?", type=int, default=20, help="attempts at each task")
    asyncio.run(main(parser.parse_args().num_attempts))
