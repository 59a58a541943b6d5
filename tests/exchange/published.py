"""Trajectories in exactly the shapes that their publishers ship, with screenshots of ours; contents are made up."""

import json
from base64 import b64encode
from typing import Any

from tests.exchange.files import HEIGHT_PX, WIDTH_PX, draw


def shot(number: int) -> str:
    """A screenshot in base64."""
    return b64encode(draw(number)).decode()


def openai_log(
    *actions: dict[str, Any], display: tuple[int, int] = (WIDTH_PX, HEIGHT_PX), environment: str = "browser"
) -> dict[str, Any]:
    """A request of the Responses API, as in openai/openai-cua-sample-app (agent/agent.py)."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Buy tea."}]
    for number, action in enumerate(actions):
        call = {"type": "computer_call", "id": f"cu_{number}", "call_id": f"call_{number}", "status": "completed"}
        shown = {
            "type": "input_image",
            "image_url": f"data:image/png;base64,{shot(number)}",
            "current_url": "http://a/",
        }
        items += [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [{"type": "summary_text", "text": f"Why {number}"}]},
            call | {"action": action, "pending_safety_checks": []},
            {"type": "computer_call_output", "call_id": f"call_{number}", "output": shown},
        ]
    said: dict[str, Any] = {"type": "output_text", "text": "Bought.", "annotations": []}
    items.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]})
    size = {"display_width": display[0], "display_height": display[1]}
    return {"model": "computer-use-preview", "input": items, "tools": [
        {"type": "computer_use_preview", **size, "environment": environment}
    ]}  # fmt: skip


def anthropic_log(*actions: dict[str, Any], display: tuple[int, int] = (WIDTH_PX, HEIGHT_PX)) -> dict[str, Any]:
    """A request of the Messages API, as in anthropics/anthropic-quickstarts (computer-use-demo)."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Buy tea."}]}]
    for number, action in enumerate(actions):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "computer", "input": action}
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": shot(number)}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "is_error": False, "content": [image]}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": f"Why {number}"}, use]},
            {"role": "user", "content": [result]},
        ]
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "Bought."}]})
    size = {"display_width_px": display[0], "display_height_px": display[1], "display_number": 1}
    return {"messages": messages, "tools": [{"type": "computer_20250124", "name": "computer", **size}]}


def gemini_log(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Contents of the Gemini API, as in google-gemini/computer-use-preview (agent.py)."""
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "Buy tea."}]}]
    for number, (name, args) in enumerate(calls):
        blob = {"inline_data": {"mime_type": "image/png", "data": shot(number)}}
        response = {"name": name, "response": {"url": "http://a/"}, "parts": [blob]}
        contents += [
            {"role": "model", "parts": [{"text": f"Why {number}"}, {"function_call": {"name": name, "args": args}}]},
            {"role": "user", "parts": [{"function_response": response}]},
        ]
    contents.append({"role": "model", "parts": [{"text": "Bought."}]})
    return {"contents": contents}


def adp_of_a_phone(*actions: dict[str, Any]) -> dict[str, Any]:
    """As neulab/agent-data-protocol, datasets/androidcontrol/sample_std.json: the goal is the agent's first message."""
    content: list[dict[str, Any]] = [{"class_": "message_action", "content": "Buy tea.", "description": None}]
    for number, action in enumerate(actions):
        box = {"x": 1.0, "y": 2.0, "width": 3.0, "height": 4.0}
        note = {"text": "8:37", "element_type": "android.widget.TextView", "bounding_box": box}
        seen = {"class_": "image_observation", "content": shot(number), "annotations": [note], "source": "user"}
        content += [seen, {"class_": "api_action", "description": f"Why {number}", **action}]
    last: dict[str, Any] = {
        "class_": "image_observation",
        "content": shot(len(actions)),
        "annotations": [],
        "source": "user",
    }
    return {"schema_version": "1.2.0", "id": "0", "content": [*content, last], "details": {}}


def atif_of_a_phone(*actions: dict[str, Any]) -> dict[str, Any]:
    """As neulab/agent-data-protocol, datasets/androidcontrol/sample_atif.json: nobody is the user."""

    def step(number: int, **more: Any) -> dict[str, Any]:
        image: dict[str, Any] = {"type": "image", "source": {"path": shot(number)}, "extra": {"annotations": []}}
        return {
            "step_id": number + 2,
            "source": "agent",
            "message": "",
            "observation": {"results": [{"content": [image], "extra": {"adp_class": "image_observation"}}]},
            **more,
        }

    first = {"step_id": 1, "source": "agent", "message": "Buy tea.", "extra": {"adp_class": "message_action"}}
    steps = [first, step(0)]
    for number, action in enumerate(actions, start=1):
        call = {"tool_call_id": f"c{number}", "function_name": action["function"], "arguments": action["kwargs"]}
        why = {"adp_class": "api_action", "description": f"Why {number - 1}"}
        steps.append(step(number, tool_calls=[call], extra=why))
    extra: dict[str, Any] = {"adp_schema_version": "1.3.2", "adp_available_apis": None, "adp_details": {}}
    agent = {"name": "adp", "version": "1.3.2"}
    return {"schema_version": "ATIF-v1.7", "session_id": "0", "agent": agent, "steps": steps, "extra": extra}


def android_control_record(*actions: dict[str, Any]) -> dict[str, Any]:
    """As the TFRecords of google-research/google-research (android_control/README.md): actions are JSON strings."""
    number = len(actions) + 1
    return {
        "episode_id": 7,
        "goal": "Buy tea.",
        "screenshots": [shot(place) for place in range(number)],
        "accessibility_trees": [""] * number,
        "screenshot_widths": [WIDTH_PX] * number,
        "screenshot_heights": [HEIGHT_PX] * number,
        "actions": [json.dumps(action) for action in actions],
        "step_instructions": [f"Why {place}" for place in range(len(actions))],
    }
