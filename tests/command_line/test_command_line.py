"""The command line of recipes, on a small example configuration."""

import json
from pathlib import Path
from typing import Any, Literal

import chz
import pytest

from cua_rl.command_line.fields import Given, with_presets
from cua_rl.command_line.parsing import load_config, parse_command_line
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError


@chz.chz
class Lora:
    rank: int = chz.field(default=32, doc="rank of every adapter")


@chz.chz
class Example:
    """Every kind of setting that recipes have."""

    model_name: str = chz.field(default="tiny", doc="folder or name of the model")
    group_size: int = chz.field(default=4, doc="rollouts of one task")
    learning_rate: float = chz.field(default=1e-5, doc="step size")
    skip_baseline: bool = chz.field(default=False, doc="no evaluation before training")
    max_steps_off_policy: int | None = chz.field(default=None, doc="none is synchronous")
    box_type: Literal["android", "linux"] = chz.field(default="android", doc="kind of device")
    log_path: Path | None = chz.field(default=None, doc="folder of the run")
    tasks: dict[str, Any] | list[dict[str, Any]] = chz.field(
        default_factory=lambda: {"source_type": "demo_training"}, doc="training tasks"
    )
    names: list[str] = chz.field(default_factory=list[str], doc="only these")
    sizes: tuple[int, ...] = chz.field(default=(), doc="numbers")
    lora: Lora = chz.field(default_factory=Lora, doc="adapter")

    @chz.validate
    def _group_is_a_group(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size must be >= 2, got {self.group_size!r}; set group_size=4")


@chz.chz
class Needy:
    model_name: str = chz.field(doc="model to evaluate")


def parse(*argv: str) -> Example:
    return parse_command_line(Example, argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("group_size=8",),
        ("--group_size", "8"),
        ("--group_size=8",),
        ("--group-size", "8"),
        ("--group-size=8",),
        ("group-size=8",),
        ("group_size=2", "--group_size", "8"),
    ],
)
def test_all_forms_say_the_same(argv: tuple[str, ...]) -> None:
    assert parse(*argv) == parse("group_size=8")
    assert parse(*argv).group_size == 8


def test_a_flag_alone_is_true_and_may_carry_a_word() -> None:
    assert parse("--skip_baseline").skip_baseline
    assert parse("--skip-baseline", "--group_size", "3").group_size == 3
    assert parse("--skip_baseline", "model_name=x").model_name == "x"
    assert not parse("--skip_baseline", "false").skip_baseline


def test_values_take_the_type_of_their_setting() -> None:
    config = parse(
        "learning_rate=1e-3",
        "max_steps_off_policy=2",
        "box_type=linux",
        "log_path=/tmp/a b",
        "names=a, b",
        "sizes=[1,2]",
    )

    assert config.learning_rate == 1e-3
    assert config.max_steps_off_policy == 2
    assert config.box_type == "linux"
    assert config.log_path == Path("/tmp/a b")
    assert config.names == ["a", "b"]
    assert config.sizes == (1, 2)
    assert parse("max_steps_off_policy=2", "max_steps_off_policy=none").max_steps_off_policy is None
    assert parse("learning_rate=-1").learning_rate == parse("--learning_rate", "-1").learning_rate == -1.0
    assert parse("model_name=none").model_name == "none"


def test_dictionaries_and_lists_are_json() -> None:
    task = '{"source_type": "ids", "task_ids": ["a"], "seed": null, "x": "b=c"}'

    assert parse(f"tasks={task}").tasks == {"source_type": "ids", "task_ids": ["a"], "seed": None, "x": "b=c"}
    assert parse("--tasks", task) == parse(f"tasks={task}")
    assert parse('tasks=[{"a": 1}, {"b": 2}]').tasks == [{"a": 1}, {"b": 2}]


def test_items_of_a_json_list_take_the_type_of_the_setting() -> None:
    assert parse("names=[5554, 5556]").names == ["5554", "5556"]  # as a file of settings may say it
    assert parse("names=[]").names == []


def test_entries_of_a_dictionary_may_be_set_one_by_one() -> None:
    config = parse("tasks.source_type=ids", "tasks.limit=3", 'tasks.task_ids=["a"]')

    assert config.tasks == {"source_type": "ids", "limit": 3, "task_ids": ["a"]}
    assert parse('tasks={"a": 1}', "tasks.b=2").tasks == {"a": 1, "b": 2}


def test_nested_settings_have_dots() -> None:
    assert parse("lora.rank=16").lora.rank == 16
    assert parse("--lora.rank", "16").lora.rank == 16


def find_presets(given: Given) -> Given:
    return {"group_size": 8, "learning_rate": 1e-3} if given.get("model_name") is None else {}


@with_presets(find_presets, explain_field, accept_value)
@chz.chz
class Preset:
    model_name: str | None = chz.field(default=None, doc="model")
    group_size: int = chz.field(default=4, doc="rollouts of one task")
    learning_rate: float = chz.field(default=1e-5, doc="step size")


def test_presets_lie_between_defaults_and_what_is_given_in_python_and_on_the_command_line() -> None:
    assert Preset() == parse_command_line(Preset, [])
    assert (Preset().group_size, Preset().learning_rate) == (8, 1e-3)
    # what is given wins, also where it is the default
    assert Preset(group_size=4) == parse_command_line(Preset, ["group_size=4"])
    assert (Preset(group_size=4).group_size, Preset(group_size=4).learning_rate) == (4, 1e-3)
    assert Preset(model_name="m") == parse_command_line(Preset, ["--model_name", "m"])
    assert Preset(model_name="m").group_size == 4


@pytest.mark.parametrize(
    ("config_class", "arguments"),
    [
        (CLIConfig, {}),
        (CLIConfig, {"group_size": 4, "groups_per_batch": 10, "tasks": {"source_type": "demo_training"}}),
        (CLIConfig, {"model_name": "some/model"}),
        (CLIConfig, {"model_name": "some/model", "tasks": {"source_type": "miniwob"}}),
        (EvaluateConfig, {}),
        (EvaluateConfig, {"models": [{"name": "a", "model_name": "some/model"}]}),
        (SftConfig, {}),
        (SftConfig, {"model_name": "some/model", "lora_rank": 8}),
    ],
)
def test_recipes_take_the_same_values_from_python_and_from_the_command_line(
    config_class: type[CLIConfig] | type[EvaluateConfig] | type[SftConfig], arguments: dict[str, Any]
) -> None:
    argv = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in arguments.items()]

    assert parse_command_line(config_class, argv) == config_class(**arguments)


def test_a_file_of_settings_lies_under_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "# a run\ngroup_size: 8\nlearning_rate: 1e-3\nskip-baseline: true\nmax_steps_off_policy: null\nsizes: [1, 2]\n"
        "tasks: {source_type: ids, task_ids: [a]}\nlora: {rank: 16}\nlog_path: /tmp/a b\n"
    )

    for config in (parse("--config", str(file), "group_size=6"), parse("group_size=6", f"config={file}")):
        assert (config.group_size, config.learning_rate, config.skip_baseline, config.sizes) == (6, 1e-3, True, (1, 2))
        assert config.tasks == {"source_type": "ids", "task_ids": ["a"]}
        assert (config.lora.rank, config.log_path) == (16, Path("/tmp/a b"))
        assert config == load_config(Example, file, group_size=6)
    assert parse(f"--config={file}", "tasks.limit=3").tasks == {"source_type": "ids", "task_ids": ["a"], "limit": 3}
    (tmp_path / "empty.yaml").touch()
    assert load_config(Example, tmp_path / "empty.yaml") == Example()


def test_a_file_counts_for_presets(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name: some/model\n")

    assert (
        load_config(CLIConfig, file)
        == CLIConfig(model_name="some/model")
        == parse_command_line(CLIConfig, ["--config", str(file)])
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grup_size: 8", ["run.yaml", "'grup_size'", "did you mean 'group_size'?"]),
        ("group_size: four", ["run.yaml", "group_size to be a whole number", "'four'"]),
        ("tasks: [a", ["expected YAML", "run.yaml"]),
        ("- a\n- b", ["expected names and values", "got a list"]),
        ("lora: {rnk: 1}", ["'lora.rnk'", "did you mean 'lora.rank'?"]),
        ("group_size: 1", ["group_size must be >= 2, got 1"]),
    ],
)
def test_a_wrong_file_is_explained(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)

    for load in (lambda: parse("--config", str(file)), lambda: load_config(Example, str(file))):
        with pytest.raises(ConfigError) as caught:
            load()
        for word in words:
            assert word in str(caught.value)


def test_a_missing_file_and_a_wrong_name_in_python_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a YAML file, got .*nowhere\.yaml"):
        parse("--config", str(tmp_path / "nowhere.yaml"))
    (tmp_path / "run.yaml").touch()
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        load_config(Example, tmp_path / "run.yaml", grup_size=3)


def test_linux_boxes_are_those_of_gbox_and_few_paid_boxes_run_at_a_time() -> None:
    gym: dict[str, object] = {"source_type": "gym"}

    assert (CLIConfig(box_type="linux").device, CLIConfig(box_type="linux").max_concurrent_rollouts) == ("gbox", 8)
    assert CLIConfig(box_type="linux", device="simulator").device == "simulator"
    assert CLIConfig(device="gbox").max_concurrent_rollouts == 8
    assert CLIConfig(device="gbox", max_concurrent_rollouts=128).max_concurrent_rollouts == 128
    assert CLIConfig(tasks=gym, box_type="linux").device == "simulator"  # the gym brings its devices
    assert CLIConfig(tasks=gym).max_concurrent_rollouts == 8
    assert CLIConfig().max_concurrent_rollouts == 0  # what the plan chooses
    assert EvaluateConfig(box_type="linux").max_concurrent_rollouts == 8


def test_the_demo_fits_its_model_from_python_too() -> None:
    config = CLIConfig(tasks={"source_type": "demo_training"}, group_size=4, groups_per_batch=10)

    assert (config.server.max_model_len, config.max_tokens, config.lora_rank) == (2048, 48, 16)
    assert (config.group_size, config.groups_per_batch) == (4, 10)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("grup_size=3",), ["'grup_size'", "did you mean 'group_size'?"]),
        (("--lora.rnk", "3"), ["'lora.rnk'", "did you mean 'lora.rank'?"]),
        (("zzz=3",), ["'zzz'", "--help"]),
        (("group_size=four",), ["group_size to be a whole number", "got 'four'", "group_size=4"]),
        (("group_size=4.5",), ["a whole number", "'4.5'"]),
        (("max_steps_off_policy=x",), ["a whole number or none", "'x'"]),
        (("learning_rate=nan",), ["a finite number", "'nan'"]),
        (("box_type=ios",), ["one of android, linux", "'ios'"]),
        (("skip_baseline=maybe",), ["true or false", "'maybe'"]),
        (('tasks={"a": }',), ["a JSON dictionary", "the JSON breaks at character 7"]),
        (("tasks=demo_training",), ["a JSON dictionary", "got 'demo_training'", '{"source_type": "demo_training"}']),
        (("sizes=1,b",), ["a whole number", "'1,b'"]),
        (('sizes=[1, "b"]',), ["a whole number", "[1, "]),
        (("sizes=[1, 0.5]",), ["a whole number", "[1, 0.5]"]),
        (('tasks=["demo"]',), ["a JSON list, each item a JSON dictionary", "demo"]),
        (("group_size=1",), ["group_size must be >= 2, got 1; set group_size=4"]),
        (("group_size",), ["expected key=value", "'group_size'"]),
        (("--group_size",), ["expected a value after '--group_size'"]),
        (("--group_size", "--skip_baseline"), ["expected a value after '--group_size'"]),
        (("lora=os:getcwd",), ["its parts, one by one"]),
    ],
)
def test_a_wrong_argument_is_explained(argv: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)

    for word in words:
        assert word in str(caught.value)


def test_a_missing_required_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="expected a value for model_name, got none; add model_name="):
        parse_command_line(Needy, [])


def test_help_lists_every_setting_with_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(Example, ["--help"], {"Without model_name, the demo presets": {"learning_rate": 0.002}})

    output = capsys.readouterr().out
    assert caught.value.code == 0
    assert output.endswith("Without model_name, the demo presets:\n  learning_rate=0.002\n")
    for part in (
        "group_size=4",
        "learning_rate=1e-05",
        "rollouts of one task",
        "lora.rank=32",
        "one of android, linux",
        "skip_baseline=false",
    ):
        assert part in output


def test_values_and_files_that_are_nested_too_deeply_are_mistakes_like_any_other(tmp_path: Path) -> None:
    deep = "[" * 10_000
    (tmp_path / "deep.yaml").write_text(f"tasks: {deep}")
    for arguments in ([f"tasks={deep}"], [f"trainer.gpus={deep}"], ["--config", str(tmp_path / "deep.yaml")]):
        with pytest.raises(ConfigError, match="expected"):
            parse_command_line(CLIConfig, arguments)
