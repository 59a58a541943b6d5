"""An environment of a package of your own: pictures of two halves, of which one is red.

Its entry point, in your pyproject.toml, makes "red_half" a source of tasks like all others:

    [project.entry-points."cua_rl.environments"]
    red_half = "red_half:RED_HALF"
"""

import io
from dataclasses import dataclass
from typing import Self

from PIL import Image

from cua_rl.environments.contract import Environment, Loading, Source
from cua_rl.environments.device import ActionRejected, DeviceAbilities, DeviceKind, Screen
from cua_rl.environments.pool import DeviceRequest
from cua_rl.tasks.goal import Goal, check_goal
from cua_rl.tasks.task import Task, Template
from cua_rl.types.actions import Action, Click
from cua_rl.types.conversation import EncodedImage

SCREEN = Screen(kind="browser", width_px=320, height_px=240)


@dataclass(slots=True)
class Halves:
    """The device: a picture that knows which half was clicked."""

    red: str
    clicked: str = ""
    device_id: str = "halves"
    kind: DeviceKind = "browser"

    async def observe(self) -> EncodedImage:
        image = Image.new("RGB", (SCREEN.width_px, SCREEN.height_px), "white")
        image.paste("red", (0 if self.red == "left" else 160, 0, 160 if self.red == "left" else 320, 240))
        image.save(encoded := io.BytesIO(), "PNG")
        return EncodedImage(data=encoded.getvalue(), format="png", width_px=image.width, height_px=image.height)

    async def execute(self, action: Action) -> None:
        if not isinstance(action, Click):
            raise ActionRejected("Only a click has an effect on this picture.")
        self.clicked = "left" if action.x < 160 else "right"

    async def query(self, name: str) -> str:
        return self.clicked

    async def close(self) -> None: ...


class Pictures:
    """The backend: makes a device for each rollout."""

    abilities = DeviceAbilities(name="a picture", has_shell=False, is_seeded=True, environment="red_half")

    async def make(self, request: DeviceRequest) -> Halves:
        return Halves(red=str(request.world))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...


class RedHalf(Template):
    """The task: its seed decides which half is red, and the picture is made from its `world`."""

    def make_task(self, seed: int) -> Task:
        red = ("left", "right")[seed % 2]
        goal = Goal(query="clicked", expected=red)
        return self.build_task(
            seed, "Click on the red half.", validate=lambda device, said: check_goal(goal, device, said), world=red
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedHalfSource(Source):
    """Where tasks come from; fields of this class would be keys of a task source."""

    source_types = ("red_half",)

    def load(self, loading: Loading) -> list[RedHalf]:
        return [RedHalf(task_id="red_half/click", category="app", difficulty="easy", max_turns=3)]


RED_HALF = Environment(
    name="red_half",
    sources=(RedHalfSource,),
    make_backend=lambda order: Pictures(),
    smallest_screen=lambda order: SCREEN,
)
