"""Every evaluation that cannot work is refused with a message, before a model loads or an endpoint is asked."""

import json
import struct
from pathlib import Path

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.evaluate import main
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.prepared_evaluation import prepare_evaluation, require_same_evaluation
from cua_rl.run.rollout_config import AgentSettings
from cua_rl.run_folder.checkpoints import load_adapter_folder
from cua_rl.sampling.config import ServerConfig
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import mapping


def write_adapter(folder: Path, *, width: int = 128, layer: int = 0, update: float = 1.0, module: str = "") -> Path:
    """A LoRA adapter of rank 2 on one projection."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.model.{module or f'language_model.layers.{layer}.self_attn.q_proj'}"
    size_a, size_b = 4 * 2 * width, 4 * width * 2
    header = {
        f"{name}.lora_A.weight": {"dtype": "F32", "shape": [2, width], "data_offsets": [0, size_a]},
        f"{name}.lora_B.weight": {"dtype": "F32", "shape": [width, 2], "data_offsets": [size_a, size_a + size_b]},
    }
    encoded = json.dumps(header).encode()
    weights = struct.pack(f"<{2 * width}f", *[0.5] * (2 * width)) + struct.pack(
        f"<{2 * width}f", *[update] * (2 * width)
    )
    (folder / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + weights)
    return folder


def test_an_adapter_is_looked_at_without_torch(tmp_path: Path) -> None:
    trained = load_adapter_folder(write_adapter(tmp_path / "000048"), TINY_QWEN3_VL)
    fresh = load_adapter_folder(write_adapter(tmp_path / "fresh", update=0.0), TINY_QWEN3_VL)

    assert (trained.rank, trained.policy_version, trained.changes_model) == (2, 48, True)
    assert (fresh.policy_version, fresh.changes_model) == (0, False)
    on_vision = load_adapter_folder(write_adapter(tmp_path / "v", module="visual.blocks.0.attn.qkv"), TINY_QWEN3_VL)
    assert (trained.reaches_vision, on_vision.reaches_vision) == (False, True)


@pytest.mark.parametrize("geometry", [{"width": 64}, {"layer": 40}])
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, geometry: dict[str, int]) -> None:
    folder = write_adapter(tmp_path / "other", **geometry)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="name the model that it was trained on"):
        load_adapter_folder(folder, TINY_QWEN3_VL)


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "cut")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])

    with pytest.raises(ConfigError, match="cut short"):
        load_adapter_folder(folder, TINY_QWEN3_VL)


REMOTE = '{"name": "x", "base_url": "https://api.example.com/v1", "model": "m"'
BAD = [
    (["num_task=3"], "did you mean 'num_tasks'"),
    (["num_attempts=0"], "num_attempts: expected at least 1"),
    (["temperature=-1"], "temperature: expected at least 0"),
    (["max_tokens=4000"], "max_tokens: expected less than max_model_len=2048"),
    (["max_model_len=100000"], "max_model_len: expected at most 4096"),
    (["reward=shapd"], "did you mean 'shaped'"),
    (["models=[]"], "at least one entry"),
    (['models=[{"adapter": "x"}]'], "expected a name"),
    (['models=[{"name": "a"}, {"name": "a"}]'], "different name for each"),
    (['models=[{"name": "a", "adaptr": "x"}]'], "did you mean 'adapter'"),
    (['models=[{"name": "a", "adapter": "{place}/nowhere"}]'], "no adapter_config.json"),
    (['models=[{"name": "a", "model_name": "{place}/nowhere"}]'], "model_name: expected"),
    ([f"models=[{REMOTE}" + ', "api_key": "secret"}]'], "expected api_key_env"),
    ([f"models=[{REMOTE}" + ', "api_key_env": "NO_SUCH_KEY_SET"}]'], "environment variable 'NO_SUCH_KEY_SET'"),
    ([f"models=[{REMOTE}" + ', "api": "soap"}]'], "responses or chat"),
    ([f"models=[{REMOTE}" + ', "adapter": "x"}]'], "got 'adapter'"),
    (['models=[{"name": "x", "base_url": "api.example.com", "model": "m"}]'], "as http://"),
    (['models=[{"name": "x", "base_url": "http://[::1/v1", "model": "m"}]'], "as http://"),
    (['models=[{"name": "x", "base_url": "https://api.example.com/v1"}]'], "own name of model"),
    (['tasks={"source_type": "demo_evil"}'], "demo_eval"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_configuration_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.replace("{place}", str(tmp_path)) for text in arguments]

    status = main([*filled, f"log_path={tmp_path}/new"])

    stderr = capsys.readouterr().err
    assert status == 2, stderr
    assert message in stderr.replace("\n    ", ", ")
    assert "Traceback" not in stderr
    assert not (tmp_path / "new").exists()


def test_a_dry_run_shows_what_would_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "000048")

    status = main([f'models=[{{"name": "trained", "adapter": "{adapter}"}}]', "dry_run=true"])

    settings = json.loads(capsys.readouterr().out)
    assert status == 0
    assert settings["models"][0]["adapter"] == str(adapter)
    assert (settings["temperature"], settings["max_tokens"]) == (0.5, 48)


def test_an_adapter_is_not_evaluated_with_other_settings_than_its_training_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = write_adapter(tmp_path / "run" / "sampler_weights" / "000048")
    trained = {"max_turns": 7, "max_tokens": 48, "server": {"max_pixels": None}, "devices": {"screen_scale": 2}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(trained))

    assert main([f'models=[{{"name": "mine", "adapter": "{adapter}"}}]', "dry_run=true"]) == 0

    assert [record.getMessage() for record in caplog.records] == [
        "mine was trained with max_turns=7 and is evaluated with 20",
        "mine was trained with devices.screen_scale=2 and is evaluated with 1",
    ]


async def test_an_evaluation_that_began_before_settings_had_groups_can_be_resumed(tmp_path: Path) -> None:
    config = EvaluateConfig(log_path=str(tmp_path / "out"), base_url=None)
    now = (await prepare_evaluation(config)).settings()
    groups = {name: now.pop(name) for name in ("devices", "agent", "server", "gateway", "judge")}
    earlier = now | {"coordinate_mode": "direct", "screen_scale": 1, "browser_scale": None, "judge_model": None}

    require_same_evaluation(earlier, now | groups)
    with pytest.raises(ConfigError, match=r"got other devices\.screen_scale"):
        require_same_evaluation(earlier | {"screen_scale": 2}, now | groups)


async def test_an_evaluation_that_began_before_there_were_formats_can_be_resumed() -> None:
    now = (await prepare_evaluation(EvaluateConfig(base_url=None))).settings()
    agent = {name: value for name, value in mapping(now["agent"]).items() if name != "action_format"}

    require_same_evaluation({**now, "agent": agent}, now)
    with pytest.raises(ConfigError, match=r"got other agent\.history;"):
        require_same_evaluation({**now, "agent": {**agent, "history": "last_n"}}, now)


async def test_pixels_are_refused_for_models_whose_image_processor_is_unknown() -> None:
    config = EvaluateConfig(
        models=[{"name": "theirs", "base_url": "https://a.example/v1", "model": "m"}],
        agent=AgentSettings(action_format="ui_tars"),
    )
    with pytest.raises(ConfigError, match=r"agent\.action_format: expected one without pixels .* got 'ui_tars'"):
        await prepare_evaluation(config)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (
            EvaluateConfig(agent=AgentSettings(history="last_n", history_images=1)),
            r"agent\.history, agent\.history_images",
        ),
        (EvaluateConfig(agent=AgentSettings(action_format="holo3")), r"agent\.action_format"),
        (EvaluateConfig(server=ServerConfig(max_pixels=8192)), r"server\.max_pixels"),
    ],
    ids=["history", "format", "max_pixels"],
)
async def test_attempts_with_other_screenshots_are_not_mixed_when_an_evaluation_is_resumed(
    other: EvaluateConfig, name: str
) -> None:
    before = (await prepare_evaluation(EvaluateConfig())).settings()

    require_same_evaluation(before, before)
    with pytest.raises(ConfigError, match=f"got other {name}; use its settings"):
        require_same_evaluation(before, (await prepare_evaluation(other)).settings())
