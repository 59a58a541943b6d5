"""One AndroidWorld task in its own episode loop: the payload names `task`, `console_port` and `adb_path`."""

import base64
import io
import json
import os
import random
import sys

from android_world import episode_runner, registry
from android_world.agents import base_agent
from android_world.env import env_launcher, json_action
from openai import OpenAI
from PIL import Image

ACTIONS = ["click", "long_press", "type", "scroll", "system_button", "open_app", "wait", "answer", "terminate"]
PROPERTIES = {
    "action": {"type": "string", "enum": ACTIONS},
    "coordinate": {"type": "array", "items": {"type": "integer"}, "description": "x and y, each from 0 to 1000"},
    "text": {"type": "string", "description": "what to type or answer, or the name of an app"},
    "direction": {"type": "string", "enum": ["up", "down", "left", "right"], "description": "where to scroll"},
    "button": {"type": "string", "enum": ["Back", "Home", "Enter"]},
    "status": {"type": "string", "enum": ["success", "failure"], "description": "how the task ended"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["action"]}
TOOL = {"type": "function", "name": "mobile_use", "description": "Do one action.", "parameters": PARAMETERS}
DIRECTIONS = {name: name for name in PROPERTIES["direction"]["enum"]}
BUTTONS = {"Back": "navigate_back", "Home": "navigate_home", "Enter": "keyboard_enter"}


def action_of(arguments: str, width_px: int, height_px: int) -> json_action.JSONAction:
    """Raises `ValueError` if the call is no action."""
    try:
        given = json.loads(arguments)
        x, y = (float(place) / 1000 for place in given.get("coordinate", (0, 0)))
        match given["action"]:
            case "click" | "long_press" as name:
                place = {"x": round(x * (width_px - 1)), "y": round(y * (height_px - 1))}
                return json_action.JSONAction(action_type=name, **place)
            case "type":
                return json_action.JSONAction(action_type="input_text", text=str(given["text"]))
            case "scroll":
                return json_action.JSONAction(action_type="scroll", direction=DIRECTIONS[given["direction"]])
            case "system_button":
                return json_action.JSONAction(action_type=BUTTONS[given["button"]])
            case "open_app":
                return json_action.JSONAction(action_type="open_app", app_name=str(given["text"]))
            case "answer":
                return json_action.JSONAction(action_type="answer", text=str(given["text"]))
            case "wait":
                return json_action.JSONAction(action_type="wait")
            case "terminate":
                goal_status = "complete" if given["status"] == "success" else "infeasible"
                return json_action.JSONAction(action_type="status", goal_status=goal_status)
            case other:
                raise ValueError(f"unknown action {other!r}")
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"malformed call: {error!r}") from None


class Policy(base_agent.EnvironmentInteractingAgent):
    """Asks the gateway once per step; everything that it has seen stays in the prompt."""

    def reset(self, go_home: bool = False) -> None:
        super().reset(go_home)
        self.model, self.items = OpenAI(max_retries=0, timeout=None), []

    def step(self, goal: str) -> base_agent.AgentInteractionResult:
        if not self.items:
            question = [{"type": "input_text", "text": goal}, self.screen()]
            self.items.append({"role": "user", "content": question})
        response = self.model.responses.create(model=os.environ["CUA_MODEL"], input=self.items, tools=[TOOL])
        self.items += response.output
        call = next((item for item in response.output if item.type == "function_call"), None)
        try:
            action = action_of(call.arguments if call else "null", *self.env.logical_screen_size)
        except ValueError as error:
            output = [{"type": "input_text", "text": str(error)}]
        else:
            self.env.execute_action(action)  # an answer is kept for the task, which reads it
            if action.action_type == "status":
                return base_agent.AgentInteractionResult(done=True, data={})
            output = [self.screen()]
        reply = {"type": "function_call_output", "call_id": call.call_id} if call else {"role": "user"}
        self.items.append(reply | {"output" if call else "content": output})
        return base_agent.AgentInteractionResult(done=False, data={})

    def screen(self) -> dict[str, str]:
        file = io.BytesIO()
        Image.fromarray(self.get_post_transition_state().pixels).save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}


def main() -> None:
    payload = json.load(sys.stdin)
    random.seed(int(os.environ["CUA_SEED"]))  # of the task's parameters: the same for every member of a group
    tasks = registry.TaskRegistry()
    task_type = tasks.get_registry(tasks.ANDROID_WORLD_FAMILY)[payload["task"]]
    environment = env_launcher.load_and_setup_env(
        console_port=payload["console_port"], emulator_setup=False, adb_path=payload["adb_path"]
    )
    try:
        task = task_type(task_type.generate_random_params())
        task.initialize_task(environment)
        steps = min(int(os.environ["CUA_MAX_TURNS"]), int(10 * task.complexity))  # AndroidWorld's own limit
        policy = Policy(environment, transition_pause=payload.get("pause", 1.0))
        episode = episode_runner.run_episode(
            goal=task.goal, agent=policy, max_n_steps=steps, start_on_home_screen=task.start_on_home_screen
        )
        score = float(task.is_successful(environment)) if episode.done else 0.0  # as AndroidWorld counts
        task.tear_down(environment)
    finally:
        environment.close()
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps({"reward": score, "success": score >= 1.0}).encode())


if __name__ == "__main__":
    main()
