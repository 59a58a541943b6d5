"""Every command, block and option on our pages and in our usage lines does what it says."""

import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image
from sqlalchemy import make_url
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tokenizers import AddedToken, Tokenizer

from cua_rl.command_line.settings import format_help
from cua_rl.database.session import database_url
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.task_loader import load_tasks
from scripts.tiny_models.vocabulary import page_pieces
from tests.builders import NO_TENSORS
from tests.documentation.examples import ROOT, is_command, read_examples, read_usage
from tests.documentation.reader import CONFIGS, Reader
from tests.doubles.gbox_server import KEY, GboxDouble
from tests.doubles.gym_server import GymDouble
from tests.doubles.judge_endpoint import KEY as JUDGE_KEY
from tests.doubles.judge_endpoint import JudgeEndpoint, verdict
from tests.evaluation.fake_endpoint import serve_in_thread
from tests.renderers.model_folders import REAL_RANGE, build_small_folder, write_settings

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "training-monitor" / "README.md",
    ]
)
MODULES = sorted(
    path
    for pattern in ("examples/*.py", "scripts/*.py", "benchmarks/*.py", "cua_rl/recipes/*.py", "cua_rl/rebuild_*.py")
    for path in ROOT.glob(pattern)
    if any(example.kind == "command" for example in read_examples(path))
)
MODEL_SIZES = ROOT / "tests" / "machine" / "model_configs" / "Qwen3-VL-4B-Instruct" / "config.json"
"""Those of the 4B model that pages name."""
ADB = """#!/bin/sh
case "$*" in
  *devices*) printf 'List of devices attached\\nemulator-5554\\tdevice\\n';;
  *version*) echo 'Android Debug Bridge version 1.0.41';;
esac
"""


NVIDIA_SMI = "#!/bin/sh\necho 0, GPU-8932, 81559\n"
"""A machine with one GPU of 80 GB, on which the models that pages name fit."""


class ServerDouble:
    """Says what a vLLM server says of itself."""

    def app(self) -> Starlette:
        async def models(request: Request) -> JSONResponse:
            return JSONResponse({"data": [{"id": "base", "parent": None, "max_model_len": 16384}]})

        async def tokenize(request: Request) -> JSONResponse:
            return JSONResponse({"tokens": [1]})

        return Starlette(routes=[Route("/v1/models", models), Route("/tokenize", tokenize, methods=["POST"])])


class MonitorDouble:
    """Takes whatever a run sends."""

    def app(self) -> Starlette:
        async def take(request: Request) -> JSONResponse:
            return JSONResponse({})

        return Starlette(routes=[Route("/api/ingest/batch", take, methods=["POST"])])


def make_page_model(folder: Path) -> None:
    """What `scripts.tiny_models.make_tiny_page_model` makes, but for what its weights have learned."""
    shutil.copytree(TINY_QWEN3_VL, folder)
    tokenizer = Tokenizer.from_file(str(TINY_QWEN3_VL / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in page_pieces()])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of models that pages name."""
    folder = tmp_path_factory.mktemp("models")
    model = build_small_folder(folder / "model")
    write_settings(model, REAL_RANGE)
    (model / "config.json").write_text(MODEL_SIZES.read_text())
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    make_page_model(folder / "tiny_page_model")
    return folder


@pytest.fixture(scope="module")
def stands_for(models: Path) -> Generator[dict[str, str]]:
    """What takes the place of each model and service that pages name; services are doubles on this machine."""
    tasks = load_tasks({"source_type": "demo_training"}, seed=0, split="train").batch(0, 40)
    with ExitStack() as services:
        gym = services.enter_context(serve_in_thread(GymDouble(tasks, gym_id="umetrip"))).removesuffix("/v1")
        gbox = services.enter_context(serve_in_thread(GboxDouble())).removesuffix("/v1")
        monitor = services.enter_context(serve_in_thread(MonitorDouble())).removesuffix("/v1")  # type: ignore[arg-type]
        vllm = services.enter_context(serve_in_thread(ServerDouble())).removesuffix("/v1")  # type: ignore[arg-type]
        judge = services.enter_context(serve_in_thread(JudgeEndpoint(lambda asked: verdict(True))))
        yield {
            "https://judge.example/v1": judge,
            "JUDGE_API_KEY=...": f"JUDGE_API_KEY={JUDGE_KEY}",
            "Qwen/Qwen3-VL-4B-Instruct": str(models / "model"),
            "model_name=...": f"model_name={models / 'model'}",
            "http://gym:5010": gym,
            "http://host:5010": gym,
            "http://mini:3000": gym,  # a dry run asks no more of it than an answer
            "http://localhost:28080": gbox,
            "GBOX_API_KEY=...": f"GBOX_API_KEY={KEY}",
            "https://monitor.example": monitor,
            "tasks.source_type=my_icons": "tasks.source_type=demo_training",  # an environment that the page installs
            "https://host/v1": f"{vllm}/v1",
            "base_url=http://127.0.0.1:8000": f"base_url={vllm}",
            "base_url=http://host:8000": f"base_url={vllm}",
        } | {
            f".harnesses/{page.parent.name}/bin/python": sys.executable
            for page in (ROOT / "examples" / "harnesses").glob("*/README.md")
        }


@pytest.fixture
def place(tmp_path: Path, models: Path, stands_for: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A folder with models, an adb and whatever else pages take for granted."""
    for folder in ("examples", "cua_rl"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "bin").mkdir()
    for program, text in (("adb", ADB), ("nvidia-smi", NVIDIA_SMI)):
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "shots").mkdir()
    Image.new("RGB", (192, 320)).save(tmp_path / "shots" / "1.png")
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    for name in ("DATABASE_URL", "POSTGRES_HOST", "MONITOR_BASE_URL", "MONITOR_PROJECT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OTHER_API_KEY", "a-key")
    monkeypatch.chdir(tmp_path)
    return Reader(stands_for=stands_for, set_variable=monkeypatch.setenv)


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_does_what_it_says(page: Path, place: Reader) -> None:
    wrong = place.complaints(read_examples(page))
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def test_at_least_sixty_commands_and_blocks_are_followed() -> None:
    examples = [example for page in (*PAGES, *MODULES) for example in read_examples(page)]
    texts = {example.text for example in examples if example.kind in ("command", "python")}

    assert len(texts) >= 100
    assert sum(example.kind == "options" for example in examples) >= 60


def test_what_help_shows_can_be_typed(place: Reader) -> None:
    for module, config in CONFIGS.items():
        text = format_help(config)
        shown = [span for span in re.findall(r"`([^`]+)`", text) if is_command(span)]
        examples = list(read_usage(module, "".join(f"`{span}`\n" for span in shown)))
        assert place.complaints(examples) == []
        assert len(re.findall(r"^  \w+=", text, re.MULTILINE)) >= 2, module


def test_the_command_that_pages_show_first_answers_in_a_process_of_its_own() -> None:
    train = [sys.executable, "-m", "cua_rl.recipes.train"]
    helped = subprocess.run([*train, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    refused = subprocess.run([*train, "grup_size=4"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert "  group_size=" in helped.stdout
    assert (refused.returncode, "did you mean 'group_size'" in refused.stderr) == (2, True)


def test_the_example_of_the_environment_is_what_the_package_reads() -> None:
    lines = (ROOT / "env.example").read_text(encoding="utf-8").splitlines()
    listed = dict(re.findall(r"^#?([A-Z][A-Z_]+)=(.*)$", "\n".join(lines), re.MULTILINE))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cua_rl").rglob("*.py"))

    assert [name for name in listed if name not in sources and not name.startswith(("HF_", "WANDB_"))] == []
    in_parts = {name: value for name, value in listed.items() if name.startswith("POSTGRES_")}
    whole = make_url(database_url({"DATABASE_URL": listed["DATABASE_URL"]}) or "")
    assert whole == make_url(database_url(in_parts) or "")
