"""Scripted experts for demo tasks: they read the phone's state, list scanned elements in reading order, and act."""

from random import Random

from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import find_template
from cua_rl.environments.phone.demo.template import (
    Hold,
    Operation,
    PullShade,
    SlideTo,
    SwipeUp,
    TapKey,
    TapOn,
    TaskTemplate,
    Tell,
    TurnPage,
)
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import SLIDER_LEFT, SLIDER_RIGHT
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.elements import Element, Screen
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.tasks.expert import Decision, Expert
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Click, Drag, Finish, LongPress, PressButton, TypeText
from cua_rl.types.errors import TaskError

_FREE_PLACE = 96, 285
"""Below the icons of a home page, logical units."""
_TAP_GRID = 24
"""Distance of the places that experts prefer to tap, logical units: half the size of an icon."""
_SCANNED_KINDS = (
    "app_icon",
    "row",
    "switch_row",
    "choice_row",
    "slider",
    "button",
    "round_button",
    "field",
    "photo",
    "pill",
    "tile",
    "swatch",
)


def decide(task: Task | TaskTemplate, phone: SimulatedPhone) -> Decision:
    """The right next turn, or the end if the goal is met or cannot be reached from this screen."""
    template = task if isinstance(task, TaskTemplate) else find_template(task.task_id)
    operation = find_operation(template, phone)
    return Decision(scanned=(), action=operation) if isinstance(operation, Finish) else _carry_out(operation, phone)


def find_operation(template: TaskTemplate, phone: SimulatedPhone) -> Operation | Finish:
    """What the route says for this screen, or the end if the goal is met or cannot be reached from it."""
    instance = template.instance(phone.state.seed)
    if instance.goal.is_met(read_query(phone.state, instance.goal.query), None):
        return Finish(success_claimed=True)
    for move in instance.route:
        fits = move.query is None or read_query(phone.state, move.query) == move.value
        if move.screen == phone.state.screen and fits:
            return move.operation
    return Finish(success_claimed=False)


class ImperfectExpert:
    """Taps a random element with probability `error_rate` per turn, and gives up after such a mistake.

    The errors are spread over all elements, so that a model cloned from this expert still gives every right action some
    probability, which reinforcement learning can raise.
    """

    def __init__(self, task: Task | TaskTemplate, *, error_rate: float, random: Random) -> None:
        self._task = task
        self._error_rate = error_rate
        self._random = random
        self._has_strayed = False

    def decide(self, phone: SimulatedPhone) -> Decision:
        """The next turn on this phone; call once per turn."""
        right = decide(self._task, phone)
        if isinstance(right.action, Finish):
            return right
        if self._has_strayed:
            return Decision(scanned=(), action=Finish(success_claimed=False))
        if not right.scanned or self._random.random() >= self._error_rate:
            return right
        elements = scannable_elements(build_screen(phone.state))
        chosen = self._random.choice(elements)
        guess = Decision(scanned=_labels_up_to(elements, chosen), action=_tap(chosen, phone.scale))
        self._has_strayed = guess != right
        return guess


class DemoExperts:
    """The `Experts` of demo tasks, on simulated phones."""

    def knows(self, task_id: str) -> bool:
        return task_id in TEMPLATES

    def make(self, task: Task, device: Device, *, error_rate: float, random: Random) -> Expert:
        """An expert for one phone; raises `TaskError` for another device."""
        if not isinstance(device, SimulatedPhone):
            raise TaskError(f"expected a simulated phone for the experts of demo tasks, got {device.device_id!r}")
        phone, expert = device, ImperfectExpert(task, error_rate=error_rate, random=random)

        async def decide_next() -> Decision:
            return expert.decide(phone)

        return decide_next


def scannable_elements(screen: Screen) -> tuple[Element, ...]:
    """What can be tapped on the screen without keyboard and navigation bar, in reading order."""
    both = (*screen.visible_content(), *screen.fixed)
    return tuple(element for element in both if element.is_tappable and element.kind in _SCANNED_KINDS)


def _carry_out(operation: Operation, phone: SimulatedPhone) -> Decision:
    match operation:
        case TapOn(label=label):
            return seek(label, phone)
        case Hold(label=label) if label:
            decision = seek(label, phone)
            if not isinstance(decision.action, Click):
                return decision
            return Decision(scanned=decision.scanned, action=LongPress(x=decision.action.x, y=decision.action.y))
        case SlideTo(label=label, share=share):
            elements = scannable_elements(build_screen(phone.state))
            slider = next(element for element in elements if element.label == label)
            width, y = SLIDER_RIGHT - SLIDER_LEFT, slider.rect.centre[1]
            from_x, to_x = round(SLIDER_LEFT + slider.level * width), round(SLIDER_LEFT + share * width)
            return Decision(scanned=_labels_up_to(elements, slider), action=_drag(from_x, y, to_x, y, phone.scale))
        case _:
            return Decision(scanned=(), action=act(operation, phone))


def act(
    operation: TapKey | Hold | SwipeUp | PullShade | TypeText | PressButton | TurnPage | Tell, phone: SimulatedPhone
) -> Action | Finish:
    """What to do without looking for an element first."""
    scale, middle = phone.scale, WIDTH // 2
    match operation:
        case TapKey(label=label):
            screen = build_screen(phone.state)
            keys = (item for item in (*screen.content, *screen.fixed) if item.kind == "key" and item.label == label)
            return _tap(next(keys), scale)
        case Hold():
            x, y = _FREE_PLACE
            return LongPress(x=x * scale, y=y * scale)
        case SwipeUp():
            return _drag(middle, 260, middle, 80, scale)
        case PullShade():
            return _drag(middle, 6, middle, 200, scale)
        case TypeText() | PressButton():
            return operation
        case TurnPage(by=by):
            return _swipe_page(by, scale)
        case Tell(query=query):
            return Finish(success_claimed=True, answer=read_query(phone.state, query))


def seek(label: str, phone: SimulatedPhone) -> Decision:
    """Tap the element with this label, or swipe to where it is; the end if this screen does not have it."""
    screen = build_screen(phone.state)
    elements = scannable_elements(screen)
    target = next((element for element in elements if element.label == label), None)
    if target is not None:
        return Decision(scanned=_labels_up_to(elements, target), action=_tap(target, phone.scale))
    scanned = tuple(element.label for element in elements)
    if screen.name == "home":
        return Decision(scanned=scanned, action=_swipe_page(1 if phone.state.home_page == 0 else -1, phone.scale))
    hidden = next((element for element in screen.content if element.label == label), None)
    if hidden is None:
        return Decision(scanned=scanned, action=Finish(success_claimed=False))
    middle = WIDTH // 2
    from_y, to_y = (260, 80) if hidden.rect.y > screen.viewport.y else (80, 260)
    return Decision(scanned=scanned, action=_drag(middle, from_y, middle, to_y, phone.scale))


def _labels_up_to(elements: tuple[Element, ...], target: Element) -> tuple[str, ...]:
    return tuple(element.label for element in elements[: elements.index(target) + 1])


def _tap(element: Element, scale: int) -> Click:
    """Tap near the centre, on a coarse grid if it has a point there: a place that a small model can learn exactly."""
    rect, (x, y) = element.rect, element.rect.centre
    grid_x, grid_y = (round(place / _TAP_GRID) * _TAP_GRID for place in (x, y))
    x = grid_x if rect.x < grid_x < rect.x + rect.width - 1 else x
    y = grid_y if rect.y < grid_y < rect.y + rect.height - 1 else y
    return Click(x=x * scale, y=y * scale)


def _swipe_page(by: int, scale: int) -> Drag:
    near, far = WIDTH // 5, 4 * WIDTH // 5
    return _drag(far, 170, near, 170, scale) if by > 0 else _drag(near, 170, far, 170, scale)


def _drag(x: int, y: int, to_x: int, to_y: int, scale: int) -> Drag:
    return Drag(x=x * scale, y=y * scale, to_x=to_x * scale, to_y=to_y * scale)
