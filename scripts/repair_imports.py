"""Make torch's companions importable beside CPU torch, and leave them alone where they are. Standard library only.

vLLM and Transformers import torchvision, and use torchaudio and torchcodec if they are installed. The package index has
these three for CUDA only: beside CPU torch their compiled parts do not load, and importing them raises.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DECLARATION = """

if not _has_ops():  # CPU torch beside a CUDA torchvision: declare the two operators that the import looks for
    import torch

    _DECLARED_OPS = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _DECLARED_OPS.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Repair or remove what cannot be imported; exit status 1 if torchvision stays broken."""
    for name in ("torchaudio", "torchcodec"):
        if find_spec(name) and import_error(name):
            say(f"removing {name}: its library does not load beside this torch, and nothing here needs it")
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)
    error = import_error("torchvision")
    if error is None:
        return 0
    if "operator torchvision::" in error:
        extension = find_package("torchvision") / "extension.py"
        say(
            "torchvision's compiled operators do not load beside CPU torch; declaring the two that its import looks for"
        )
        with extension.open("a") as file:
            file.write(DECLARATION)
        error = import_error("torchvision")
    if error is not None:
        print(
            f"setup: expected torchvision to import, got:\n{error}\nsetup: install one that fits torch", file=sys.stderr
        )
        return 1
    return 0


def import_error(name: str) -> str | None:
    """What a fresh interpreter says when it imports the package, or None if all is well."""
    result = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr.strip()


def find_package(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"expected {name} to be installed, found no package of that name; run pip install {name}"
        )
    return Path(spec.origin).parent


def say(text: str) -> None:
    """Tell what is being done."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
