"""Print the shape of the package as one line of JSON: `python -m scripts.code_shape`.

The engine is the package without `environments/`. A room is a folder of the package, or a module beside the folders.
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

from scripts.code_size import PACKAGE, ROOT, count_settings

CONFIGURATIONS = ("Config", "Settings", "Plan", "Limits", "Wishes", "Demand")


def shape(texts: dict[Path, str]) -> dict[str, float]:
    """The figures of these modules; paths begin with the package."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    calls = Counter(ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call))
    dataclasses = [node.name for node in classes if any("dataclass" in ast.unparse(d) for d in node.decorator_list)]
    num_lines = sum(text.count("\n") for text in texts.values())
    num_comments = sum(
        token.type == tokenize.COMMENT
        for text in texts.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return {
        "engine_lines": sum(text.count("\n") for path, text in texts.items() if path.parts[1] != "environments"),
        "lines": num_lines,
        "configuration_types": sum(node.name.endswith(CONFIGURATIONS) for node in classes),
        "dataclasses": len(dataclasses),
        "dataclasses_constructed_once": sum(calls[name] == 1 for name in dataclasses),
        "casts_per_1000_lines": round(1000 * calls["cast"] / num_lines, 2),
        "edges_between_rooms": len(room_edges(trees)),
        "comments_per_100_lines": round(100 * num_comments / num_lines, 2),
    }


def room_edges(trees: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second."""
    edges = {
        (path.with_suffix("").parts[1], f"{node.module}.{alias.name}".split(".")[1])
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}.")
        for alias in node.names
    }
    return {(importer, imported) for importer, imported in edges if importer != imported}


def main() -> None:
    """Measure the package and what `train --help all` lists."""
    texts = {path.relative_to(ROOT): path.read_text("utf-8") for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    command = [sys.executable, "-m", f"{PACKAGE}.recipes.train", "--help", "all"]
    help_text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(json.dumps(shape(texts) | {"settings_in_help_all": count_settings(help_text)}))


if __name__ == "__main__":
    main()
