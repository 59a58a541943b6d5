"""Count the turns that the experts of the demo tasks take, which make their levels.

python -m scripts.needed_turns    # after adding or changing tasks; takes a minute
"""

from cua_rl.environments.phone.demo.expert import decide
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import NEEDED_TURNS_PATH, TEMPLATES
from cua_rl.environments.phone.simulator.device import perform
from cua_rl.types.actions import Finish

SEEDS = range(8)


def count_turns(template: TaskTemplate, seed: int) -> int:
    """The turns until the goal holds or, where it is an answer, is told."""
    phone, num_turns = make_simulated_phone(template.make_task(seed)), 0
    while not isinstance(action := decide(template, phone).action, Finish):
        phone.state = perform(phone.state, action, phone.scale)
        num_turns += 1
    return num_turns + (action.answer is not None)


def needed_turns(template: TaskTemplate) -> int:
    """The most turns that any of the instances takes."""
    return max(count_turns(template, seed) for seed in SEEDS)


def main() -> None:
    """Write the table that `templates.py` reads."""
    lines = [f"{task_id} {needed_turns(template)}" for task_id, template in TEMPLATES.items()]
    NEEDED_TURNS_PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {NEEDED_TURNS_PATH} with {len(lines)} tasks")


if __name__ == "__main__":
    main()
