"""Tasks inside apps and on the launcher: never done at the start, always doable, and only by doing the right thing."""

import pytest

from cua_rl.environments.phone.demo.expert import decide
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate, Tell
from cua_rl.environments.phone.demo.templates import APP_EVAL, APP_TRAINING, GRADED_EVAL, GRADED_TRAINING, TEMPLATES
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.reducer import enter_key
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Button, Click, Finish, PressButton, PressKey, TypeText

SEEDS = (0, 1, 2, 17, 4711, 999_999, 1_000_000, 1_234_567)
TRAINING, EVALUATION = (*APP_TRAINING, *GRADED_TRAINING), (*APP_EVAL, *GRADED_EVAL)
ALL = (*TRAINING, *EVALUATION)
TOLD = [template for template in ALL if template.instance(0).goal.how == "told"]


async def play(task: Task, phone: SimulatedPhone) -> tuple[str | None, int]:
    """What the expert answers in the end, and in how many turns it gets there."""
    for turn in range(1, task.max_turns + 1):
        decision = decide(task, phone)
        if isinstance(decision.action, Finish):
            assert decision.action.success_claimed, (task.seed, phone.state.screen)
            return decision.action.answer, turn
        await phone.execute(decision.action)
    raise AssertionError(f"seed {task.seed}: out of turns on {phone.state.screen}")


@pytest.mark.parametrize("template", ALL, ids=lambda template: template.task_id)
async def test_untouched_fails_and_the_expert_succeeds_within_the_turns(template: TaskTemplate) -> None:
    task, num_turns = template.make_task(0), 0
    for seed in SEEDS:
        task = template.make_task(seed)
        phone = make_simulated_phone(task)

        assert not (await task.validate(phone, None)).success, seed
        assert not (await task.validate(phone, "done")).success, seed
        answer, turns = await play(task, phone)
        assert (await task.validate(phone, answer)).success, seed
        num_turns = max(num_turns, turns)
    # Two turns of slack at least, so that one slip and its repair do not lose the task; not many more.
    assert task.max_turns - 4 <= num_turns <= task.max_turns - 2


@pytest.mark.parametrize("template", TOLD, ids=lambda template: template.task_id)
async def test_a_wrong_answer_fails(template: TaskTemplate) -> None:
    task = template.make_task(3)
    phone = make_simulated_phone(task)
    answer, _ = await play(task, phone)
    assert answer is not None

    assert (await task.validate(phone, f"It is {answer}.")).success
    assert not (await task.validate(phone, f"It is 1{answer}.")).success
    assert not (await task.validate(phone, f"It is {answer}1.")).success
    assert not (await task.validate(phone, "success")).success
    assert not (await task.validate(phone, None)).success


async def test_a_sum_counts_only_once_the_calculator_has_worked_it_out() -> None:
    task = TEMPLATES["train_164_calculate_sum"].make_task(3)
    used, unused = make_simulated_phone(task), make_simulated_phone(task)
    answer, _ = await play(task, used)

    assert not (await task.validate(unused, answer)).success


@pytest.mark.parametrize("template", ALL, ids=lambda template: template.task_id)
def test_instructions_differ_between_seeds_wherever_something_is_drawn(template: TaskTemplate) -> None:
    instructions = {template.instance(seed).instruction for seed in range(40)}
    goals = {template.instance(seed).goal for seed in range(40)}

    assert len(instructions) > 1 or len(goals) == 1 or template.tags[1] in ("camera", "screenshots")


def test_evaluation_asks_for_nothing_that_training_asks_for() -> None:
    trained = {template.instance(seed).instruction for template in TRAINING for seed in range(200)}
    asked = {template.instance(seed).instruction for template in EVALUATION for seed in range(200)}

    assert trained & asked == set()


def test_there_are_enough_tasks_and_every_question_is_answered_by_telling() -> None:
    assert len(APP_TRAINING) >= 25
    assert len(APP_EVAL) >= 12
    assert {template.task_id for template in ALL} <= set(TEMPLATES)
    for template in TOLD:
        assert any(isinstance(move.operation, Tell) for move in template.instance(0).route)


async def almost(task_id: str, seed: int = 3) -> tuple[Task, SimulatedPhone]:
    """The phone right before the expert's last move."""
    task = TEMPLATES[task_id].make_task(seed)
    phone, before = make_simulated_phone(task), make_simulated_phone(task)
    while not isinstance((decision := decide(task, phone)).action, Finish):
        before.state = phone.state
        await phone.execute(decision.action)
    return task, before


@pytest.mark.parametrize("template", [t for t in ALL if t not in TOLD], ids=lambda template: template.task_id)
async def test_nothing_counts_before_the_last_move(template: TaskTemplate) -> None:
    task, phone = await almost(template.task_id)

    assert not (await task.validate(phone, "done")).success


async def test_a_draft_that_was_sent_does_not_count() -> None:
    task = TEMPLATES["eval_18_compose_sms_draft"].make_task(3)
    phone = make_simulated_phone(task)
    await play(task, phone)
    phone.state = enter_key(phone.state)

    assert not (await task.validate(phone, "done")).success


async def test_an_alarm_that_was_typed_but_not_saved_does_not_count() -> None:
    task, phone = await almost("train_152_set_alarm")
    label = task.instruction.removeprefix("Set an alarm for ").removesuffix(".")
    await phone.execute(PressButton(button=Button.BACK))
    await phone.execute(PressButton(button=Button.BACK))

    assert label not in [item.label for item in build_screen(phone.state).content]
    assert not (await task.validate(phone, "done")).success


async def test_the_right_text_to_somebody_else_does_not_count() -> None:
    task, phone = await almost("train_157_send_message")
    text = phone.state.draft
    here = int(phone.state.subscreens[-1])
    other = next(thread.contact for i, thread in enumerate(phone.state.threads) if i != here)
    for _ in range(2):
        await phone.execute(PressButton(button=Button.BACK))
    for label in (other, "Message"):
        x, y = next(item for item in (*build_screen(phone.state).content, *build_screen(phone.state).fixed)
                    if item.label == label).rect.centre  # fmt: skip
        await phone.execute(Click(x=x, y=y))
    await phone.execute(TypeText(text=text))
    await phone.execute(PressKey(keys=("enter",)))

    assert text in [sent.text for thread in phone.state.threads for sent in thread.texts]
    assert not (await task.validate(phone, "done")).success
