"""Prints rows for the tasks of a Harbor data set, by its registry name, and downloads each of them once.

`python list_tasks.py FOLDER PAYLOAD`: the payload, a JSON object, has in `dataset` what Harbor's job files have there
(`name` and `version`; `registry_path` or `registry_url` for another registry than Harbor's; `task_names`), and beside
it what all rows have in common, such as `agent` and `environment`.
"""

import asyncio
import json
import sys
from pathlib import Path

from harbor.models.job.config import DatasetConfig
from harbor.models.task.task import Task
from harbor.tasks.client import TaskClient


async def main(folder: Path, payload: str) -> None:
    fields = json.loads(payload)
    dataset = DatasetConfig.model_validate(fields.pop("dataset"))
    ids = [config.get_task_id() for config in await dataset.get_task_configs()]
    found = await TaskClient().download_tasks(ids, output_dir=folder)
    for task_id, path in zip(ids, found.paths, strict=True):
        row = {"task_id": task_id.get_name(), "instruction": Task(path).instruction}
        print(json.dumps({**row, "payload": {"task": {"path": str(path)}, **fields}}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
