"""A reader who does what a page says, in one folder, without training anything and without services.

Recipes run with `dry_run=true` in this process, from the command line and from Python; scripts and benchmarks parse
what they are given; what the page names elsewhere (a gym server, a model of the hub) is a double or a folder.
"""

import asyncio
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chz
import yaml

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.command_line.settings import SettingNames
from cua_rl.command_line.values import UnfitValueError, parse_value
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes import (
    ask_checkpoints,
    calibrate_judge,
    doctor,
    evaluate,
    export_model,
    export_rollout,
    export_trajectories,
    import_trajectories,
    new_environment,
    plan,
    prune,
    rebuild_datums,
    recover,
    replay_step,
    serve_tinker,
    sft,
    suite,
    take_over,
    train,
)
from cua_rl.recipes.gym_command import translate
from cua_rl.recipes.serve_monitor import MonitorConfig
from cua_rl.run.model_servers import ServeModelConfig
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.vllm_command import Platform, vllm_options
from cua_rl.types.errors import ConfigError
from scripts.chaos_hosts import ChaosHostsConfig
from scripts.chaos_kill import ChaosConfig
from scripts.chaos_members import ChaosMembersConfig
from scripts.chaos_ray import ChaosRayConfig
from scripts.chaos_tinker import ChaosTinkerConfig
from scripts.red_team.__main__ import RedTeamConfig
from scripts.replay_runs import ReplayRunsConfig
from scripts.tiny_models import make_ladder_model, make_tiny_arithmetic_model, make_tiny_model, make_tiny_page_model
from tests.documentation.examples import ASSIGNMENT, ROOT, Example

Recipe = Callable[[Sequence[str]], int]
RECIPES: Mapping[str, tuple[type[Any], Any]] = {
    "cua_rl.recipes.train": (train.CLIConfig, train),
    "cua_rl.recipes.evaluate": (evaluate.EvaluateConfig, evaluate),
    "cua_rl.recipes.sft": (sft.SftConfig, sft),
}
"""They know `dry_run`, and can be used from Python."""
MACHINE = "1x79.6"
"""What dry runs plan for: the models that pages name fit."""
OTHER_CONFIGS: Mapping[str, type[Any]] = {
    "cua_rl.recipes.serve_monitor": MonitorConfig,
    "cua_rl.recipes.serve_model": ServeModelConfig,
    "cua_rl.recipes.serve_tinker": serve_tinker.ServeTinkerConfig,
    "cua_rl.recipes.doctor": doctor.DoctorConfig,
    "cua_rl.recipes.plan": plan.PlanConfig,
    "cua_rl.recipes.calibrate_judge": calibrate_judge.CalibrateConfig,
    "cua_rl.recipes.export_model": export_model.ExportModelConfig,
    "cua_rl.recipes.export_rollout": export_rollout.ExportConfig,
    "cua_rl.recipes.export_trajectories": export_trajectories.ExportTrajectoriesConfig,
    "cua_rl.recipes.import_trajectories": import_trajectories.ImportTrajectoriesConfig,
    "cua_rl.recipes.new_environment": new_environment.NewEnvironmentConfig,
    "cua_rl.recipes.rebuild_datums": rebuild_datums.RebuildConfig,
    "cua_rl.recipes.replay_step": replay_step.ReplayConfig,
    "cua_rl.recipes.ask_checkpoints": ask_checkpoints.AskConfig,
    "cua_rl.recipes.suite": suite.SuiteConfig,
    "cua_rl.recipes.take_over": take_over.TakeOverConfig,
    "cua_rl.recipes.recover": recover.RecoverConfig,
    "cua_rl.recipes.prune": prune.PruneConfig,
    "scripts.tiny_models.make_ladder_model": make_ladder_model.LadderModelConfig,
    "scripts.tiny_models.make_tiny_arithmetic_model": make_tiny_arithmetic_model.TinyArithmeticModelConfig,
    "scripts.tiny_models.make_tiny_model": make_tiny_model.TinyModelConfig,
    "scripts.tiny_models.make_tiny_page_model": make_tiny_page_model.TinyPageModelConfig,
    "scripts.chaos_hosts": ChaosHostsConfig,
    "scripts.chaos_kill": ChaosConfig,
    "scripts.chaos_members": ChaosMembersConfig,
    "scripts.chaos_ray": ChaosRayConfig,
    "scripts.chaos_tinker": ChaosTinkerConfig,
    "scripts.red_team": RedTeamConfig,
    "scripts.replay_runs": ReplayRunsConfig,
}
CONFIGS = {name: config for name, (config, _) in RECIPES.items()} | dict(OTHER_CONFIGS)
WITHOUT_OPTIONS = {
    "benchmarks.import_time": 0,
    "benchmarks.random_agent": 1,
    "benchmarks.trainer_steps": 3,
    "benchmarks.trl_steps": 3,
    "cua_rl.monitor.openapi": 0,
    "cua_rl.recipes.rl_minimal": 0,
    "scripts.settings_page": 0,
    "scripts.metrics_page": 0,
    "scripts.code_shape": 0,
    "scripts.needed_turns": 0,
    "scripts.red_team.hosts": 0,
    "tests.evaluation.test_coverage": 1,
}
"""Programs without an argument parser, and how many arguments they take."""
LOAD_TORCH = {"benchmarks.real_shapes", "benchmarks.trainer_peaks"}
"""Programs that take a process of the fast tests ten seconds and half a gigabyte to load."""
NO_SUCH_OPTION = "--no-such-option"


class WrongExample(Exception):
    """The page does not hold."""


@dataclass(kw_only=True)
class Reader:
    """Works in the current folder. `stands_for` are texts of pages, and what they mean in this place."""

    stands_for: Mapping[str, str]
    set_variable: Callable[[str, str], None]
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    """What the Python of the page has defined so far."""
    seen: set[str] = field(default_factory=set[str])
    """Commands that ran already: pages repeat them."""

    def complaints(self, examples: Sequence[Example]) -> list[str]:
        """What does not hold of a page. Files come first: a page shows how they are used before it shows them."""
        found: list[str] = []
        for example in sorted(examples, key=lambda example: example.kind != "file"):
            try:
                self._follow(example)
            except WrongExample as error:
                found.append(f"{example.place}: {example.text.strip()}: {error}")
        return found

    def _follow(self, example: Example) -> None:
        match example.kind:
            case "command":
                self._command(example)
            case "options":
                _check_options(example.words)
            case "file":
                assert example.file is not None
                Path(example.file).parent.mkdir(parents=True, exist_ok=True)
                Path(example.file).write_text(example.text)
            case "python":
                self._python(example)
            case "json":
                _check_json(example)
            case "unnamed":
                raise WrongExample("expected a closed block that names its language, got commands in one without")

    def _python(self, example: Example) -> None:
        text = re.sub(r"(cli_main\(\w+Config\()", rf"\1dry_run=True, machine={MACHINE!r}, ", self._here(example.text))
        code = compile(text, example.place, "exec")
        output = io.StringIO()
        try:
            with redirect_stdout(output):
                exec(code, self.names)
        except (Exception, SystemExit) as error:
            raise WrongExample(f"expected it to run, got {type(error).__name__}: {error}") from error

    def _command(self, example: Example) -> None:
        words = [self._here(word) for word in example.words]
        while ASSIGNMENT.fullmatch(words[0]):
            self.set_variable(*words.pop(0).split("=", 1))
        if "\0".join(words) not in self.seen:
            self._run(words, Path(example.page).parent)
        self.seen.add("\0".join(words))

    def _here(self, text: str) -> str:
        for named, meant in self.stands_for.items():
            text = text.replace(named, meant)
        return text

    def _run(self, words: list[str], page_folder: Path) -> None:
        match words:
            case ["vllm", "serve", _, *arguments]:
                _check_server(arguments)
            case ["python" | ".venv/bin/python" | ".venv-trl/bin/python", "-m", module, *arguments]:
                self._module(module, arguments)
            case ["python" | ".venv/bin/python", path, *arguments] if path.endswith(".py"):
                self._script(path, arguments)
            case ["python", "-X", "importtime", "-c", code]:
                _succeeds([sys.executable, "-X", "importtime", "-c", code])
            case ["./train.sh", *arguments]:
                if arguments != ["--help"]:
                    _check_options(translate(arguments, {}), train.CLIConfig)
            case ["make", *arguments]:
                self._make(arguments)
            case ["export", *assignments]:
                for assignment in assignments:
                    self.set_variable(*assignment.split("=", 1))
            case _:
                _check_tool(words, page_folder)

    def _module(self, module: str, arguments: list[str]) -> None:
        if module in RECIPES:
            _recipe(module, arguments)
        elif module == "cua_rl.vllm_cpu_server":
            _check_server(arguments[2:])  # behind --model
        elif module in CONFIGS:
            _check_options([word for word in arguments if "=" in word.split("://")[0]], CONFIGS[module])
        elif module in WITHOUT_OPTIONS:
            _takes(module, arguments)
        elif module in ("pip", "pytest") and arguments[-1] == "my_icons":
            pass  # tests/environments/test_third_party_environment.py installs and tests it
        elif module in LOAD_TORCH:
            pass  # tests/real/test_commands.py reads their options
        elif (ROOT / f"{module.replace('.', '/')}.py").is_file():
            check_parser(module, arguments)
        else:
            raise WrongExample(f"expected a module, got {module!r}")

    def _script(self, path: str, arguments: list[str]) -> None:
        if not (ROOT / path).is_file():
            raise WrongExample(f"expected a script of the repository, got {path!r}")
        if path.startswith("scripts/"):
            self._module(path.removesuffix(".py").replace("/", "."), arguments)
        else:
            _runs_as_main(ROOT / path, arguments)

    def _make(self, arguments: list[str]) -> None:
        # -n runs what is marked + or recursive only; a target that does not exist is an error all the same
        _succeeds(["make", "-n", *arguments], folder=ROOT)
        given = dict(word.split("=", 1) for word in arguments if "=" in word)
        if arguments[0] == "train":
            self._run(["python", "-m", "cua_rl.recipes.train", *shlex.split(given.get("ARGS", ""))], ROOT)


def _check_tool(words: Sequence[str], page_folder: Path) -> None:
    """A package, script or checker that the page calls by its own name."""
    match words:
        case ["pip", "install", package]:
            _check_extra(package)
        case ["npm", *arguments]:
            _check_npm(arguments, ROOT / page_folder)
        case ["bash", path] | [path, *_] if path.endswith(".sh") or path == ".ci/run":
            _check_shell_script(path, ROOT / page_folder, is_called=words[0] == path)
        case [path] if (ROOT / path).is_file():
            pass  # the page speaks of a file
        case ["ruff" | ".venv/bin/ruff", command, *_]:
            _succeeds([sys.executable, "-m", "ruff", command, "--help"])
        case ["ray", *arguments]:
            _check_ray(arguments)
        case ["docker" | "buildah" | "sbatch" | "kubectl" | "sky", *_]:
            _check_deployment(words)
        case ["ray", *arguments]:
            _check_ray(arguments)
        case ["pre-commit", "install"] if (ROOT / ".pre-commit-config.yaml").is_file():
            pass
        case _:
            raise WrongExample(f"expected a rule for {words[0]!r} in tests/documentation/reader.py, got none")


def _check_ray(arguments: Sequence[str]) -> None:
    """Ray, if it is installed, has the command and its options."""
    if find_spec("ray") is None:
        return  # an extra that the tests do without
    command = [sys.executable, "-m", "ray.scripts.scripts", arguments[0], "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    unknown = [word for word in arguments[1:] if word.partition("=")[0] not in known]
    if unknown or not known:
        raise WrongExample(f"expected options of ray {arguments[0]}, got {unknown}")


def _check_deployment(words: Sequence[str]) -> None:
    """Files, images and settings that a command for containers or clusters names are there."""
    match words:
        case ["docker", "build", "--target", target, "--tag", _, "."]:
            known = re.findall(r" AS (\w+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
            is_known = target in known
        case ["docker", "compose", "--profile", profile, "up", *services]:
            composed = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
            is_known = set(services) <= set(composed) and any(
                profile in one.get("profiles", ()) for one in composed.values()
            )
        case ["docker", "run", *_, "python", "-m", module]:
            is_known = module in CONFIGS
        case ["docker" | "buildah", "run", *_, "python", "-m", module, setting]:
            _check_options([setting], CONFIGS[module])
            is_known = True
        case ["sbatch", path, *settings]:
            _check_options(settings, train.CLIConfig)
            is_known = (ROOT / path).is_file()
        case ["sky", "jobs", "launch", path, *_]:
            is_known = (ROOT / path).is_file()
        case ["kubectl", "apply", "--kustomize", folder]:
            named = yaml.safe_load((ROOT / folder / "kustomization.yaml").read_text("utf-8"))["resources"]
            is_known = all((ROOT / folder / name).exists() for name in named)
        case ["kubectl", "--namespace", "cua-rl", "create" | "port-forward", *_] | [
            "kubectl",
            "create",
            "namespace",
            "cua-rl",
        ]:
            is_known = True
        case _:
            is_known = False
    if not is_known:
        raise WrongExample("expected files, images and services of this repository")


def _recipe(module: str, arguments: Sequence[str]) -> None:
    """Run it dry from the command line and from Python, and compare the effective configurations."""
    config_class, recipe = RECIPES[module]
    given = [word for word in arguments if word not in ("key=value", "...", "dry_run=true")]
    _check_options([word for word in given if "=" in word and not word.startswith("-")], config_class)
    if any("runs/" in word for word in given):
        return  # a dry run would look for that run's folder, and no run is recorded here
    if any(word.startswith("rollout_workers=") for word in given) and find_spec("ray") is None:
        return  # a dry run refuses it, and Ray is an extra that the tests do without
    if not any(word.startswith("machine=") for word in given):
        given.append(f"machine={MACHINE}")
    said = _captured(lambda: recipe.main([*given, "dry_run=true"]))
    values = _python_values(config_class, given)
    by_python = _captured(lambda: asyncio.run(recipe.cli_main(config_class(**values, dry_run=True))) or 0)
    typed, called = _json_of(said), _json_of(by_python)
    different = {name: (typed[name], called.get(name)) for name in typed if typed[name] != called.get(name)}
    if different:
        raise WrongExample(f"expected the same settings from Python as from the command line, got {different}")


def _python_values(config_class: type[Any], arguments: Sequence[str]) -> dict[str, Any]:
    """What a caller in Python writes for these arguments."""
    config, names = parse_command_line(config_class, arguments), SettingNames(config_class)
    heads = [re.match(r"--([\w-]+)|([\w-]+)[\w.-]*=", word) for word in arguments]
    given = {(head[1] or head[2]).replace("-", "_") for head in heads if head}
    fields = {names.find(name).name.split(".")[0] for name in given}
    return {name: getattr(config, name) for name in chz.chz_fields(config_class) if name in fields}


def _captured(run: Callable[[], int]) -> str:
    """What it prints; raises `WrongExample` with its complaint if it fails."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = run()
    except ConfigError as error:
        raise WrongExample(f"from Python: {error}") from error
    if status != 0:
        raise WrongExample(f"expected status 0, got {status}: {err.getvalue().strip()}")
    return out.getvalue()


def _json_of(text: str) -> dict[str, Any]:
    return json.loads(text[text.index("{") :])


def _check_server(arguments: Sequence[str]) -> None:
    """The flags are those with which a run starts its own server, whatever the device; values may be others."""
    config = ServerConfig(model_path=TINY_QWEN3_VL, max_lora_rank=8, max_model_len=64, max_num_seqs=1)
    platforms: tuple[Platform, ...] = ("cuda", "cpu")
    command, on_cpu = (vllm_options(config, "http://127.0.0.1:8000", platform) for platform in platforms)
    flags = [{word for word in options if word.startswith("--")} for options in (command, on_cpu, arguments)]
    own, given = flags[0] | flags[1], flags[2]
    always = flags[0] & flags[1] - {"--uvicorn-log-level", "--middleware", "--dtype"}
    if not always <= given <= own:
        raise WrongExample(f"expected the flags of a run's own server, got {sorted(given ^ always)} besides")
    fixed = {name: command[command.index(name) + 1] for name in _FIXED_FLAGS}
    shown = {name: arguments[arguments.index(name) + 1] for name in _FIXED_FLAGS}
    if shown != fixed:
        raise WrongExample(f"expected {fixed}, got {shown}")


_FIXED_FLAGS = ("--served-model-name", "--logprobs-mode", "--generation-config")


def _check_options(words: Sequence[str], config_class: type[Any] | None = None) -> None:
    """Names are settings of the recipe, or of one of all, and values have their type; `...` and letters stand open."""
    for config in [config_class] if config_class else CONFIGS.values():
        names = SettingNames(config)
        if all(_fits(word, names) for word in words if word not in ("key=value", "NAME=VALUE")):
            return
    raise WrongExample(f"expected settings of a recipe with values of their types, got {' '.join(words)!r}")


def _fits(word: str, names: SettingNames) -> bool:
    name, value = word.split("=", 1)
    name = name.removeprefix("--").replace("-", "_")
    if names.find_entry(name) is not None:
        return True
    try:
        setting = names.find(name)
    except ConfigError:
        return False
    if "..." in value or "<" in value or (len(value) == 1 and value.isalpha()):
        return True
    try:
        parse_value(value, setting.kind)
    except UnfitValueError:
        return False
    return True


def _check_json(example: Example) -> None:
    texts = example.text.splitlines() if example.file == "jsonl" else [example.text]
    try:
        for text in texts:
            json.loads(text)
    except json.JSONDecodeError as error:
        raise WrongExample(f"expected {example.file}, got {error}") from error


def _check_extra(package: str) -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = package.partition("[")[2].removesuffix("]").split(",")
    if not package.startswith("cua_rl[") or not set(asked) <= set(extras):
        raise WrongExample(f"expected extras out of {sorted(extras)}, got {package!r}")


def _check_npm(arguments: Sequence[str], folder: Path) -> None:
    scripts = json.loads((folder / "package.json").read_text())["scripts"]
    if arguments[0] != "ci" and not (arguments[0] == "run" and arguments[1] in scripts):
        raise WrongExample(f"expected npm ci, or npm run with one of {sorted(scripts)}, got {arguments!r}")


def _check_shell_script(path: str, page_folder: Path, *, is_called: bool) -> None:
    found = next((folder / path for folder in (page_folder, ROOT) if (folder / path).is_file()), None)
    if found is None or (is_called and not os.access(found, os.X_OK)):
        raise WrongExample(f"expected an executable file, got {path!r}")
    _succeeds(["bash", "-n", str(found)])


def _takes(module: str, arguments: Sequence[str]) -> None:
    if len(arguments) != WITHOUT_OPTIONS[module] and "per" not in arguments:
        raise WrongExample(f"expected {WITHOUT_OPTIONS[module]} arguments for {module}, got {arguments!r}")
    if not (ROOT / f"{module.replace('.', '/')}.py").is_file():
        raise WrongExample(f"expected a module, got {module!r}")


def check_parser(module: str, arguments: Sequence[str]) -> None:
    """Its parser takes the arguments: with one more that it cannot know, it complains of that one and nothing else."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if "import argparse" not in path.read_text(encoding="utf-8"):  # it would run
        raise WrongExample(f"expected a rule for {module} in tests/documentation/reader.py, got none")
    complaint, status = _main_of(lambda: runpy.run_path(str(path), run_name="__main__"), module, arguments)
    if status != 2 or f"unrecognized arguments: {NO_SUCH_OPTION}\n" not in complaint:
        raise WrongExample(f"expected {module} to take {list(arguments)!r}, got status {status}: {complaint[-300:]}")


def _runs_as_main(path: Path, arguments: Sequence[str]) -> None:
    complaint, status = _main_of(lambda: runpy.run_path(str(path), run_name="__main__"), path.name, arguments, extra=())
    if status != 0:
        raise WrongExample(f"expected {path.name} to run, got status {status}: {complaint[-300:]}")


def _main_of(
    start: Callable[[], object], program: str, arguments: Sequence[str], extra: Sequence[str] = (NO_SUCH_OPTION,)
) -> tuple[str, int]:
    """What a program says on stderr when it is run in this process, and its status."""
    before, sys.argv = sys.argv, [program, *arguments, *extra]
    err = io.StringIO()
    try:
        with redirect_stderr(err), redirect_stdout(io.StringIO()):
            start()
    except SystemExit as ended:
        return err.getvalue(), ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return err.getvalue(), 0


def _succeeds(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongExample(f"expected {' '.join(command)!r} to end well, got status {done.returncode}: {done.stderr}")
