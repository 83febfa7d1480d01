"""The parts of tools/gpu_check.sh: the tests and time limit of each part, and the total time limit.

Each part is a separate pytest run. A warm-up, whose result does not count, first compiles kernels into a cache folder that all later
processes share.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from megatron_rl.versions import put_programs_on_path

ROOT = Path(__file__).resolve().parents[1]
BUDGET, QUICK_BUDGET = 25 * 60, 5 * 60
"""Seconds for all requested parts together."""
TIME_IS_UP, NO_TEST = 124, 5
"""Exit codes of `timeout`, and of pytest if it collects no test."""
_GRACE = 18
"""Seconds that pytest has to write its report after an interrupt."""
_CACHES = {
    "SGLANG_CACHE_DIR": "",
    "SGLANG_JIT_CACHE_DIR": "jit",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "",
    "CUDA_CACHE_PATH": "nv",
}
"""Environment variables of libraries that compile at run time -> subfolder of the cache folder, as SGLang 0.5.23 sets them in an engine
(`sglang.srt.environ`)."""


@dataclass(frozen=True)
class Part:
    name: str
    tests: tuple[str, ...]
    """Test ids, relative to tests/gpu."""
    seconds: int
    """Time limit with full caches."""
    quick: bool = False


def _run_part(name: str, run: str, seconds: int) -> Part:
    return Part(name, (f"test_runs.py::test_a_run_proves_every_tensor_it_syncs[{run}]",), seconds)


WARM_UP = Part("warm-up", ("test_warm_up.py",), 260)
KERNEL_TESTS = ("quantizers", "backends", "engine_quantizer", "device_digest", "tree_products", "flash_attention", "cache_units")
LAYER_TESTS = ("log_probs_and_gradients_are_close_to_emulated", "megatrons_own_bf16_computes_the_same")
EXACT_TESTS = ("casts", "rows", "products", "attention")
PARTS = (
    Part("kernels", tuple(f"test_{name}.py" for name in KERNEL_TESTS), 170, quick=True),
    Part("layers", tuple(f"test_layers.py::test_{name}" for name in LAYER_TESTS), 120, quick=True),
    Part("exact", tuple(f"test_exact_{name}.py" for name in EXACT_TESTS), 100),
    _run_part("run-ipc", "sync by CUDA IPC", 120),
    _run_part("run-quickstart", "quickstart in fp8_unified", 125),
    _run_part("run-tree", "quickstart with sums by the tree", 110),
    Part("speed-products", ("test_speed_linears.py",), 90),
    Part("speed-models", ("test_layers.py::test_speed_of_a_model",), 125),
    Part("speed-sync", ("test_sync.py",), 60),
    Part("speed-decoding", ("test_engines.py::test_speed_of_decoding",), 110),
    Part("speed-steps", ("test_engines.py::test_speed_of_rl_steps",), 110),
)

Run = Callable[[Sequence[str], Mapping[str, str]], int]
"""Runs a command in an environment and returns its exit code."""


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def check(
    parts: Sequence[Part],
    folder: Path,
    budget: float,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    run: Run = run_command,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the parts in order. Return 1 if a part fails, else 124 if a part was not started or not finished in time, else 0.

    A part is started only if its time limit fits into the remaining time of `budget` seconds. `options` go to pytest.
    """
    outcomes, end = dict[str, str](), clock() + budget
    for part in parts:
        if end - clock() < part.seconds:
            outcomes[part.name] = "not started: no time left; name the part in another call"
        else:
            outcomes[part.name] = _run(part, folder / part.name, environment, options, run, clock)
        print(f"gpu_check: {part.name}: {outcomes[part.name]}", flush=True)
    judged = [outcome for name, outcome in outcomes.items() if name != WARM_UP.name]
    if any(outcome.startswith("failed") for outcome in judged):
        return 1
    return 0 if all(outcome.startswith(("passed", "no test")) for outcome in judged) else TIME_IS_UP


def _run(part: Part, report: Path, environment: Mapping[str, str], options: Sequence[str], run: Run, clock: Callable[[], float]) -> str:
    report.parent.mkdir(parents=True, exist_ok=True)
    start = clock()
    command = ["timeout", "--signal=INT", f"--kill-after={_GRACE}", str(part.seconds), sys.executable, "-m", "pytest"]
    command += [f"tests/gpu/{test}" for test in part.tests]
    command += ["-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "--benchmark-enable", "--benchmark-quiet", *options]
    code = run([*command, f"--junitxml={report}.xml", f"--benchmark-json={report}.json"], environment)
    seconds = f"{clock() - start:.0f} s"
    if code == TIME_IS_UP:
        return f"not finished in {part.seconds} s; results so far: {report}.xml"
    if code == NO_TEST:
        return "no test"
    return f"failed with exit code {code} in {seconds}: {report}.xml" if code else f"passed in {seconds}: {report}.xml"


def choose_parts(names: Sequence[str], quick: bool) -> list[Part]:
    """Return the parts to run, preceded by the warm-up unless all parts are quick. Raise ValueError for an unknown name."""
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no such part; the parts are {', '.join(known)}")
    chosen = [part for part in PARTS if (part.name in names if names else part.quick or not quick)]
    return chosen if all(part.quick for part in chosen) else [WARM_UP, *chosen]


def fill_environment(caches: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of all parts. Variables that the user has set are kept."""
    return {**{name: str(caches / folder) for name, folder in _CACHES.items()}, **environment}


def find_unused_folder(out: Path, gpu: str, day: str) -> Path:
    """Return the path of a folder that does not exist yet, such as benchmarks/h100-80gb-hbm3-2026-11-23-2."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-") + f"-{day}"
    numbered = (out / (name + (f"-{number}" if number > 1 else "")) for number in range(1, 1000))
    return next(folder for folder in numbered if not folder.exists())


def main(arguments: Sequence[str], gpu: str, run: Run = run_command) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check and measure the GPU tier in parts.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--quick", action="store_true", help="only parts that need no engine, in 5 minutes")
    parser.add_argument("--results", type=Path, default=Path("benchmarks"), metavar="DIR", help="folder for results; default: benchmarks")
    parser.add_argument("--list", action="store_true", help="print the parts without running them")
    options = list(arguments)
    own, for_pytest = (options[: options.index("--")], options[options.index("--") + 1 :]) if "--" in options else (options, [])
    given = parser.parse_args(own)
    try:
        parts = choose_parts(given.parts, given.quick)
    except ValueError as error:
        parser.error(str(error))
    caches = Path(os.environ.get("SGLANG_CACHE_DIR") or Path.home() / ".cache" / "megatron-rl-kernels")
    if given.list:
        for part in parts:
            print(f"{part.name:16} {part.seconds:4} s  {' '.join(part.tests)}")
        return 0
    put_programs_on_path()
    folder = find_unused_folder(given.results, gpu, date.today().isoformat())
    budget = QUICK_BUDGET if given.quick else BUDGET
    return check(parts, folder, budget, fill_environment(caches, os.environ), for_pytest, run)


if __name__ == "__main__":
    # The shell script asks for the GPU's name, since a process that has opened the GPU keeps some of its memory.
    sys.exit(main(sys.argv[2:], gpu=sys.argv[1]))
