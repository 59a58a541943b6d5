"""Stands for the package android_world, as far as its documented interface is used, on a scripted phone.

The phone shows a button at a place that the task draws; the task is to press it, then to say that it is done.
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

WIDTH_PX, HEIGHT_PX = 108, 240


@dataclass
class JSONAction:
    action_type: str
    x: int | None = None
    y: int | None = None
    text: str | None = None
    direction: str | None = None
    goal_status: str | None = None
    app_name: str | None = None


@dataclass
class AgentInteractionResult:
    done: bool
    data: dict[str, Any]


class EnvironmentInteractingAgent:
    def __init__(self, env: "Phone", name: str = "", transition_pause: float | None = 1.0) -> None:
        self.env, self.name, self.transition_pause = env, name, transition_pause

    def reset(self, go_home: bool = False) -> None:
        self.env.reset(go_home=go_home)

    def get_post_transition_state(self) -> SimpleNamespace:
        return self.env.get_state(wait_to_stabilize=False)


class Phone:
    logical_screen_size = (WIDTH_PX, HEIGHT_PX)

    def __init__(self, script: str) -> None:
        self.script = script
        self.button: int | None = None
        self.pressed = False

    def reset(self, go_home: bool = False) -> None:
        assert go_home

    def get_state(self, wait_to_stabilize: bool = False) -> SimpleNamespace:
        pixels = numpy.zeros((HEIGHT_PX, WIDTH_PX, 3), dtype=numpy.uint8)
        assert self.button is not None
        pixels[self.button : self.button + 24] = 255
        return SimpleNamespace(pixels=pixels)

    def execute_action(self, action: JSONAction) -> None:
        if self.script == "lost":
            raise RuntimeError("the emulator is gone")
        if self.script == "hangs":
            os.write(1, b"hangs\n")
            time.sleep(600)
        for words in (action.text, action.app_name):  # adb's commands are made of them
            assert words is None or words.split(" ")
        assert action.action_type != "scroll" or action.direction in ("up", "down", "left", "right")
        if action.action_type == "click":
            assert self.button is not None
            assert action.y is not None
            self.pressed = self.button <= action.y < self.button + 24

    def close(self) -> None:
        sys.stdout.write("closed\n")


class PressTheButton:
    goal, complexity, start_on_home_screen = "Press the button.", 0.3, True

    def __init__(self, params: dict[str, int]) -> None:
        self.params = params

    @classmethod
    def generate_random_params(cls) -> dict[str, int]:
        return {"button": random.randrange(0, HEIGHT_PX - 24)}

    def initialize_task(self, env: Phone) -> None:
        env.button = self.params["button"]

    def is_successful(self, env: Phone) -> float:
        return float(env.pressed)

    def tear_down(self, env: Phone) -> None:
        env.button = None


class PressItInTime(PressTheButton):
    complexity = 1.0


class TaskRegistry:
    ANDROID_WORLD_FAMILY = "android_world"

    def get_registry(self, family: str) -> dict[str, type[PressTheButton]]:
        assert family == self.ANDROID_WORLD_FAMILY
        return {"PressTheButton": PressTheButton, "PressItInTime": PressItInTime}


def run_episode(
    goal: str, agent: Any, max_n_steps: int = 10, start_on_home_screen: bool = False
) -> AgentInteractionResult:
    agent.reset(start_on_home_screen)
    for _ in range(max_n_steps):
        if agent.step(goal).done:
            return AgentInteractionResult(done=True, data={})
    return AgentInteractionResult(done=False, data={})


def load_and_setup_env(console_port: int, emulator_setup: bool, adb_path: str) -> Phone:
    assert not emulator_setup
    assert console_port == 5554
    return Phone(adb_path)


def provide(name: str, **members: Any) -> None:
    """Make a module of the package importable."""
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)


provide("android_world.registry", TaskRegistry=TaskRegistry)
provide("android_world.episode_runner", run_episode=run_episode)
provide("android_world.agents")
provide(
    "android_world.agents.base_agent",
    AgentInteractionResult=AgentInteractionResult,
    EnvironmentInteractingAgent=EnvironmentInteractingAgent,
)
provide("android_world.env")
provide("android_world.env.env_launcher", load_and_setup_env=load_and_setup_env)
provide("android_world.env.json_action", JSONAction=JSONAction)
