"""Print which tasks a source loads: `python examples/list_tasks.py '{"source_type": "demo_all", "category": "input"}'`.

Without an argument: the custom tasks beside this file, and the task folders as a phone with a shell would get them.
"""

import sys
from pathlib import Path

from cua_rl.environments.device import DeviceAbilities
from cua_rl.task_loader import SIMULATOR, TaskSources, load_tasks

HERE = Path(__file__).parent
REAL_PHONE = DeviceAbilities(name="a real phone", has_shell=True, is_seeded=False)


def list_tasks(sources: TaskSources, device: DeviceAbilities = SIMULATOR) -> list[str]:
    """One line per task."""
    tasks = load_tasks(sources, seed=0, split="train", device=device)
    first_of_each = {task.task_id: task for task in tasks.batch(0, len(tasks.templates))}
    lines = (first_of_each[task_id] for task_id in tasks.task_ids)
    return [f"{task.task_id:32} {task.category:10} {task.difficulty:8} {task.instruction}" for task in lines]


def main() -> None:
    """List what was asked for, or the examples."""
    if len(sys.argv) > 1:
        print("\n".join(list_tasks(sys.argv[1])))
        return
    print("\n".join(list_tasks({"source_type": "file", "file_path": str(HERE / "custom_tasks.jsonl")})))
    print("\n".join(list_tasks({"source_type": "task_adapter", "tasks_dir": str(HERE / "tasks")}, REAL_PHONE)))


if __name__ == "__main__":
    main()
