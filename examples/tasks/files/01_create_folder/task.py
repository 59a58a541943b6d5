"""A folder that must exist in the end, and must not at the beginning."""

from dataclasses import dataclass

from .validator import FOLDER, FolderValidator


@dataclass
class Task:
    name: str = "Create a folder"
    description: str = "Create a folder called abc in Downloads."
    category: str = "system"
    max_turns: int = 16

    def get_validator(self) -> FolderValidator:
        return FolderValidator()

    def get_pre_hook(self):
        return lambda adb: adb.shell(f"rmdir {FOLDER}")


def create_task() -> Task:
    return Task()
