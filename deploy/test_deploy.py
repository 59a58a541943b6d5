"""Files for containers and clusters are valid for the validators of their formats: `make test-ship`.

Every validator is also shown to fail on a file that was broken on purpose, in a way in which such files break.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv-ship" / "bin"
MANIFESTS = sorted(path for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml") if path.stem != "kustomization")
JOBS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))
SKYPILOT = "import sky, sys; sky.Task.from_yaml(sys.argv[1])"


Validator = Callable[[Path], Sequence[str | Path]]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)


def hadolint(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "hadolint", path)


def compose(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def kubernetes(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "kubernetes-validate", "--strict", path)


def skypilot(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "python", "-c", SKYPILOT, path)


def shell(path: Path) -> Sequence[str | Path]:
    return ("bash", "-n", path)


VALIDATED: Sequence[tuple[Validator, Path]] = [
    (hadolint, ROOT / "Dockerfile"),
    (compose, ROOT / "compose.yaml"),
    *((kubernetes, path) for path in MANIFESTS),
    (skypilot, ROOT / "deploy" / "skypilot.yaml"),
    *((shell, path) for path in JOBS),
]
BROKEN: Sequence[tuple[Validator, str, str, str, str]] = [
    (hadolint, "Dockerfile", "USER 1000:1000", "USER root", "DL3002"),
    (hadolint, "Dockerfile", "--no-install-recommends ", "", "DL3015"),
    (compose, "compose.yaml", "interval: 5s", "intervall: 5s", "intervall"),
    (compose, "compose.yaml", "condition: service_healthy", "condition: service_well", "service_well"),
    (kubernetes, "deploy/kubernetes/trainer.yaml", "backoffLimit: 3", "backofLimit: 3", "backofLimit"),
    (kubernetes, "deploy/kubernetes/vllm.yaml", "containerPort: 8000", "containerPort: eight", "eight"),
    (skypilot, "deploy/skypilot.yaml", "accelerators: H100:2", "acelerators: H100:2", "acelerators"),
    (skypilot, "deploy/skypilot.yaml", "disk_size: 300", "disk_size: much", "much"),
    (shell, "deploy/slurm/two_nodes.sbatch", "done\n", "\n", "syntax error"),
]
"""Validator, file, what is in it, what breaks it, and what the validator says then."""


@pytest.mark.parametrize(("validator", "path"), VALIDATED, ids=[path.name for _, path in VALIDATED])
def test_the_file_is_valid(validator: Validator, path: Path) -> None:
    done = run(*validator(path))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("validator", "name", "good", "bad", "says"), BROKEN, ids=[f"{one[1]}: {one[3]}" for one in BROKEN]
)
def test_a_file_broken_on_purpose_is_not(
    validator: Validator, name: str, good: str, bad: str, says: str, tmp_path: Path
) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert good in text
    broken = tmp_path / Path(name).name
    broken.write_text(text.replace(good, bad), encoding="utf-8")

    done = run(*validator(broken))

    assert done.returncode != 0
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["monitor", "postgres", "trainer", "vllm"])
def test_a_pod_writes_only_into_volumes_under_the_seccomp_profile_of_the_runtime(name: str) -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8"))
    (pod,) = [one["spec"]["template"]["spec"] for one in documents if "template" in one["spec"]]

    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts.values()
        claims = {"data"} if name == "postgres" else set()
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]} | claims


def test_every_pod_may_reach_only_what_the_network_policies_name() -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "network.yaml").read_text(encoding="utf-8"))
    policies = {one["metadata"]["name"]: one["spec"] for one in documents}
    everyone = {"matchLabels": {"app.kubernetes.io/name": "cua-rl"}}
    inside, names = policies["cua-rl-leaves"]["egress"]
    (outside,) = policies["cua-rl-fetches"]["egress"]

    assert policies["cua-rl-leaves"]["podSelector"] == everyone
    assert policies["cua-rl-leaves"]["policyTypes"] == ["Egress"]
    assert inside == {"to": [{"podSelector": everyone}]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert outside["ports"] == [{"protocol": "TCP", "port": 443}]
    assert "169.254.0.0/16" in outside["to"][0]["ipBlock"]["except"]  # where clouds hand out a machine's credentials


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose: apt-get install docker-compose")
def test_compose_starts_no_profile_without_its_secrets(tmp_path: Path) -> None:
    secrets = {"POSTGRES_PASSWORD": "a-password", "MONITOR_READ_TOKEN": "a-token-to-read-with"}
    profiles = [f"--profile={name}" for name in ("demo", "single", "multi", "server")]
    environ = {name: value for name, value in os.environ.items() if name not in secrets}
    for left_out in (None, *secrets):
        file = tmp_path / ".env"
        file.write_text("".join(f"{name}={value}\n" for name, value in secrets.items() if name != left_out))
        command = ["docker-compose", "--env-file", str(file), *profiles, "config", "--quiet"]

        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)

        assert (done.returncode == 0) == (left_out is None), done.stderr
        assert left_out is None or f"set {left_out} in .env" in done.stderr
