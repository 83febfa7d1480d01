"""launch/quickstart.sh runs two commands; setup.sh counts each package, and setup.sh and install_gpu.sh refuse an unfit machine in one line
before they write anything; tools/test.sh installs the packages of tests once; the pins of launch/requirements*.txt are those of
pyproject.toml's extras."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_rl.versions import WITHOUT_DEPENDENCIES

ROOT = Path(__file__).resolve().parents[3]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)$", re.MULTILINE)


@pytest.fixture
def clone(tmp_path):
    """The files that both scripts read, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_script(script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(script), *arguments]
    return subprocess.run(command, cwd="/", env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def setup(clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run_script(clone / "launch" / "setup.sh", **env)


def install(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_script(clone / "launch" / "install_gpu.sh", *arguments, **env)


def finish(clone: Path, written_in: Path) -> None:
    """Make `clone` look installed, with the stamp of an installation in `written_in`."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    pins = [f"launch/requirements{kind}.txt" for kind in ("", "-nodeps")]
    files = (*pins, "launch/setup.sh", "launch/common.sh", "launch/uv_settings.py", "pyproject.toml")
    hashes = subprocess.run(["sha256sum", *files], cwd=clone, capture_output=True, text=True, check=True).stdout
    (clone / ".venv" / ".megatron-rl-installed").write_text(f"{hashes}{written_in}\n")


def assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert reason in done.stderr


def test_an_unfit_machine_is_refused(clone, tmp_path):
    assert_refused(setup(clone, PYTHON=sys.executable, MEGATRON_RL_MIN_DISK_MB="999999999"), "an installation needs 999999999 MB")
    tools = tmp_path / "tools"  # a PATH without a usable Python
    tools.mkdir()
    for tool in ("dirname", "sha256sum", "cat", "flock"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    assert_refused(setup(clone, PATH=str(tools), PYTHON=""), "no Python 3.11 or 3.12 with the venv module on PATH")
    assert_refused(setup(clone, PYTHON="/bin/false"), "PYTHON = '/bin/false': is not Python 3.11 or 3.12")
    assert_refused(install(clone, "--dry-run"), "--dry-run: there are no options")
    assert_refused(install(clone, PYTHON="/bin/false"), "PYTHON = '/bin/false': is not Python 3.11 or 3.12")
    assert_refused(install(clone, PYTHON=sys.executable, CXX="no-such-compiler"), "no C++ compiler")
    assert not (clone / ".venv").exists() and not (clone / ".venv-gpu").exists()
    (tmp_path / "other").mkdir()
    (clone / ".venv").symlink_to(tmp_path / "other")
    assert_refused(setup(clone, PYTHON=sys.executable, MEGATRON_RL_MIN_DISK_MB="1"), "is a link")


def test_a_finished_installation_is_left_alone(clone):
    finish(clone, written_in=clone)
    done = setup(clone, MEGATRON_RL_MIN_DISK_MB="999999999")  # would be refused if it were to install
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments, name", [
    ((), "quickstart"), (("--train.steps=5",), "quickstart"), (("gsm8k", "--a.b=1"), "gsm8k"), (("--make-model", "--a.b=1"), "quickstart"),
    (("quickstart_hybrid", "--make-model"), "quickstart_hybrid"),
])  # fmt: skip
def test_the_quickstart_makes_the_model_and_then_trains_it(clone, arguments, name):
    finish(clone, written_in=clone)
    (clone / ".venv" / "bin" / "python").unlink()
    (clone / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    done = run_script(clone / "launch" / "quickstart.sh", *arguments)
    overrides = [f"--model.path=runs/{name}-model" if word == "--make-model" else word for word in arguments if word.startswith("--")]
    commands = ("examples.arithmetic.warm_start", "megatron_rl train")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join([f"{clone} -m {words} configs/{name}.toml", *overrides]) for words in commands]


FAKE_PYTHON = """#!/bin/bash
# A Python whose pip prints what pip prints for a package of an index, for one in a local file, and for one that is installed already.
[[ " $* " = *" --no-compile "* ]] || exit 0
while [ $# -gt 0 ]; do
  case $1 in -r) shift; grep == "$1" ;; *==*) echo "$1" ;; esac
  shift
done | while read -r pin; do
  case $((number++ % 3)) in
    0) echo "Collecting $pin (from -r pins.txt (line 1))"; echo "  Downloading $pin.whl (4 kB)" ;;
    1) echo "Processing ./wheels/${pin/==/-}-py3-none-any.whl (from -r pins.txt (line 1))" ;;
    2) echo "Requirement already satisfied: $pin in /somewhere" ;;
  esac
done
"""


def test_the_installation_counts_each_package(clone, tmp_path):
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(tmp_path / "python", clone / ".venv" / "bin")
    (clone / ".venv" / "pyvenv.cfg").write_text(f"command = python -m venv {clone}/.venv\n")
    done = setup(clone, PYTHON=str(tmp_path / "python"), MEGATRON_RL_MIN_DISK_MB="1")
    assert done.returncode == 0, done.stderr
    counted = re.findall(r"package (\d+) of (\d+), ([a-z]\S+)", done.stdout)
    total = len(read_pins("requirements.txt") | read_pins("requirements-nodeps.txt"))
    assert [(int(number), int(of)) for number, of, _ in counted] == [(n, total) for n in (*range(20, total, 20), total)]
    assert (clone / ".venv" / ".megatron-rl-installed").exists()


FAKE_UV = """#!/bin/bash
# A uv that prints what uv prints, or fails if asked to, and notes how it was called.
printf '%s\\n' "$UV_INDEX_URL" "$@" >"${0%/*}/../uv-was-called"
[ ! -e "${0%/*}/../uv-fails" ] || { echo "error: no net" >&2; exit 2; }
echo "Resolved some packages in 3ms" >&2
sed 's/.*/ + &/' "${@: -1}" >&2
"""


@pytest.mark.parametrize("fails", [False, True])
def test_uv_installs_and_if_it_fails_pip_does(clone, fails):
    """The counted packages are those of torch and of requirements-nodeps.txt by pip, and all others by uv, or by pip if uv fails."""
    venv = clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"command = python -m venv {venv}\n")
    python = venv / "bin" / "python"
    python.write_text(FAKE_PYTHON.replace("[[", f'[[ "$*" != *uv_settings.py ]] || exec {sys.executable} "$@"\n[[', 1))
    python.chmod(0o755)
    (venv / "bin" / "uv").write_text(FAKE_UV)
    (venv / "bin" / "uv").chmod(0o755)
    if fails:
        (venv / "uv-fails").touch()
    done = setup(clone, PYTHON=str(python), MEGATRON_RL_MIN_DISK_MB="1", PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL="https://a.b/simple")
    assert done.returncode == 0, done.stderr
    index, *words = (venv / "uv-was-called").read_text().splitlines()
    assert index == "https://a.b/simple" and "--no-deps" in words
    pins = read_pins("requirements.txt")
    assert f"package {len(pins) + 3} of {len(pins) + 3}" in done.stdout
    said = [line for line in done.stderr.splitlines() if "without uv" in line]
    assert said == ["megatron-rl setup: installing without uv, which takes longer: error: no net"] * fails


@pytest.mark.parametrize("configuration, env, settings", [
    ("", {}, set()),
    ("[global]\nindex-url = https://a.b/s\ntrusted-host = a.b c.d:8\ncert = /g.pem\n", {},
     {"UV_INDEX_URL=https://a.b/s", "UV_INSECURE_HOST=a.b c.d:8", "SSL_CERT_FILE=/g.pem"}),
    ("[global]\nextra-index-url = https://c.d/s\n", {}, "pip's option extra-index-url = 'https://c.d/s' has no counterpart"),
    ("[global]\nfind-links = /a /b\ntimeout = 5\n[install]\ntimeout = 9\nno-compile = true\n[list]\nformat = json\n",
     {"PIP_INDEX_URL": "https://h/s"}, {"UV_FIND_LINKS=/a,/b", "UV_HTTP_TIMEOUT=9", "UV_INDEX_URL=https://h/s"}),
    ("[global]\nindex-url = https://a.b/s\n", {"PIP_INDEX_URL": "https://h/s"}, {"UV_INDEX_URL=https://h/s"}),
    ("[global]\nproxy = http://p:1\n", {}, "pip's option proxy = 'http://p:1' has no counterpart"),
    ("", {"PIP_CONSTRAINT": "c.txt"}, "pip's option constraint = 'c.txt' has no counterpart"),
])  # fmt: skip
def test_uv_downloads_as_pip_is_configured_to(tmp_path, configuration, env, settings):
    (tmp_path / "pip.conf").write_text(configuration)
    # Other HOME and XDG_CONFIG_DIRS hide all files of this machine except /etc/pip.conf.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path), **env}
    command = [sys.executable, str(ROOT / "launch" / "uv_settings.py")]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    if isinstance(settings, str):
        assert done.returncode == 1 and done.stderr.strip() == settings
    else:
        assert done.returncode == 0, done.stderr
        of_the_machine = {
            line for line in done.stdout.splitlines() if Path("/etc/pip.conf").exists() and line.startswith("SSL_CERT_FILE=/etc")
        }
        assert set(done.stdout.splitlines()) - of_the_machine == settings


def test_the_test_command_installs_its_packages_once_and_anew_if_a_pin_changes(clone):
    finish(clone, written_in=clone)
    python = clone / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text('#!/bin/sh\necho "$@"\n[ "$2" != pip ] || [ ! -e no_net ]\n')
    python.chmod(0o755)
    shutil.copytree(ROOT / "tools", clone / "tools", ignore=shutil.ignore_patterns("*.py"))

    def installed() -> list[str]:
        """Return what a test command that succeeds hands to pip."""
        done = run_script(clone / "tools" / "test.sh")
        assert done.returncode == 0, done.stderr
        return [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("-m pip")]

    (clone / "no_net").touch()
    done = run_script(clone / "tools" / "test.sh")
    assert_refused(done, "pip failed")
    assert "-m pytest" not in done.stdout
    (clone / "no_net").unlink()
    pins = clone / "launch" / "requirements-gpu.txt"
    pin = next(line for line in pins.read_text().splitlines() if line.startswith("triton=="))
    files = ["launch/requirements-test.txt", "launch/requirements-peft.txt"]
    assert [installed(), installed()] == [[*files, pin], []]
    pins.write_text(pins.read_text().replace(pin, "triton==99"))
    assert [installed(), installed()] == [[*files, "triton==99"], []]
    (clone / files[0]).write_text("pytest==99\n")
    assert len(installed()) == 3 and not installed()


@pytest.mark.parametrize("change", ["moved", "new pins", "half done"])
def test_an_installation_that_does_not_fit_is_taken_up_again(clone, tmp_path, change):
    finish(clone, written_in=tmp_path if change == "moved" else clone)
    if change == "new pins":
        (clone / "launch" / "requirements.txt").write_text("rich==1.0\n")
    if change == "half done":
        (clone / ".venv" / ".megatron-rl-installed").unlink()
    assert_refused(setup(clone, PYTHON=sys.executable, MEGATRON_RL_MIN_DISK_MB="999999999"), "an installation needs")


def read_pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / "launch" / name).read_text()))


@pytest.mark.parametrize("name, extras", [
    ("requirements.txt", ("cpu",)), ("requirements-test.txt", ("trackers", "test")), ("requirements-gpu.txt", ("gpu", "test")),
    ("requirements-peft.txt", ("lora",)),
])  # fmt: skip
def test_the_pins_are_those_of_the_extras(name, extras):
    """After a change of pyproject.toml: bash launch/lock.sh."""
    project, pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], read_pins(name)
    if name == "requirements-test.txt":  # installed beside the CPU tier
        assert not pins.keys() & read_pins("requirements.txt").keys()
        pins |= read_pins("requirements.txt")
    listed = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    for requirement in map(Requirement, listed + project["dependencies"] * ("lora" not in extras)):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            assert pins[requirement.name] in requirement.specifier, requirement


def test_packages_without_dependencies_have_one_version():
    pins, gpu = read_pins("requirements-nodeps.txt"), read_pins("requirements-gpu.txt")
    assert [f"{name}=={version}" for name, version in pins.items()] == list(WITHOUT_DEPENDENCIES)
    assert {name: gpu.get(name, version) for name, version in pins.items()} == pins
    assert not pins.keys() & read_pins("requirements.txt").keys()


def test_the_gpu_pins_have_one_cuda_version():
    """CUDA toolkit, torch, and the container image must have the same minor version of CUDA."""
    toolkit = r"nvidia-(cuda-(nvcc|nvrtc|runtime|crt|cccl|cupti)|nvjitlink|nvvm)|cuda-bindings"
    of_toolkit = [version for name, version in read_pins("requirements-gpu.txt").items() if re.fullmatch(toolkit, name)]
    assert len(of_toolkit) >= 8 and all(version.startswith("13.0.") for version in of_toolkit)
    assert "FROM nvidia/cuda:13.0." in (ROOT / "docker" / "Dockerfile").read_text()


def test_an_installation_says_that_it_waits_for_another_one_and_not_for_ever(clone):
    script = clone / "launch" / "setup.sh"
    with script.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = setup(clone, PYTHON="/bin/false", MEGATRON_RL_LOCK_SECONDS="1")
    waits, ends = done.stderr.splitlines()
    assert done.returncode == 2 and waits == f"megatron-rl setup: waiting until another installation releases {script}"
    assert ends.startswith(f"megatron-rl setup: another process has held {script} for 1 s; end it")
    assert_refused(setup(clone, PYTHON="/bin/false"), "PYTHON = '/bin/false'")
