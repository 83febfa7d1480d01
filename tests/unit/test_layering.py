"""Imports flow one way, and only the files that may import a heavy library do so."""

import ast
import functools
import os
import subprocess
import sys
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from megatron_rl.mcore import wandb_hidden

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {  # launch, tools -> examples -> rollout_sglang -> megatron_rl -> parallel
    "parallel": {"parallel"},
    "megatron_rl": {"megatron_rl", "parallel"},
    "rollout_sglang": {"rollout_sglang", "megatron_rl", "parallel"},
    "tools": {"examples", "rollout_sglang", "megatron_rl", "parallel"},
    "launch": {"rollout_sglang", "megatron_rl", "parallel"},
    "examples": {"examples", "rollout_sglang", "megatron_rl", "parallel"},  # and only tools import them
}
OWN_PACKAGES = set(MAY_IMPORT)
ORDER = [  # of what lies in megatron_rl: each imports only what stands before it
    *("redaction", "errors", "types", "versions", "metrics", "plugs", "config", "precision", "kernels", "batch"),
    *("hf", "workers", "rewards", "data", "algorithm", "distributed", "observability", "rollout", "sync", "mcore"),
    *("preflight", "evaluation", "reporting", "diagnosis", "training", "cost", "planner", "rehearsal", "cli", "__main__"),
]
IN_CIRCLES = {"parallel", "rollout_sglang", *(f"megatron_rl.{name}" for name in ("rehearsal", "rollout"))}
"""Packages with folders that import from each other. None may be added."""
ROOT_MODULES = 10
PACKAGES_CHECK = ("tools/gpu_packages.py", "tools/compile_kernels.py", "tools/kernel_counts.py")
"""Tools that check the libraries themselves."""
ONLY_IN = {
    "sglang": ("rollout_sglang/*", *PACKAGES_CHECK),
    "megatron": ("megatron_rl/mcore/*", "megatron_rl/rehearsal/*", *PACKAGES_CHECK),
    "triton": ("megatron_rl/kernels/*/triton*.py", "parallel/digest_triton.py", "tools/kernel_counts.py", *PACKAGES_CHECK),
    "deep_gemm": ("megatron_rl/kernels/*/deep_gemm.py", "megatron_rl/kernels/plain.py", *PACKAGES_CHECK),
    "transformer_engine": ("megatron_rl/kernels/linear/transformer_engine.py",),
    "transformer_engine_torch": ("megatron_rl/kernels/linear/transformer_engine.py",),
}
MAY_PICKLE = {
    "megatron_rl/rollout/environments/pool.py": "in a worker: the state of an environment, which only workers read",
}
"""Shipped files that may use pickles. Whoever writes a pickle runs code in the process that reads it, so no trainer rank reads any."""
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"),
    *("_tensor_to_object", "_object_to_tensor", "broadcast_pyobj"),
}
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
TORCH_FREE = (
    "megatron_rl.config",
    "megatron_rl.cli",
    "megatron_rl.precision.graph.graph",
    "megatron_rl.precision.graph.decoder",
    "megatron_rl.observability.hang_watchdog",
    "megatron_rl.reporting.report",
    "megatron_rl.cli.plan",
    "megatron_rl.preflight",
    "megatron_rl.rollout.engine_placement",
    "parallel.layout",
    "rollout_sglang",
)


def imported_names(file: Path) -> set[str]:
    """Return the full names that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def find_unpickling(source: str) -> set[str]:
    """Return what in a file's source reads pickles: modules, loads of torch and numpy that allow them, collectives of objects."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found |= {name for name in names if name.partition(".")[0] in PICKLING}
            found |= {alias.name for alias in node.names} & OBJECT_COLLECTIVES
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        is_open = options.get("weights_only") != "True" if name == "torch.load" else options.get("allow_pickle", "False") != "False"
        if is_open and name in ("torch.load", "np.load", "numpy.load"):
            found.add(name)
        if name.rpartition(".")[2] in {*OBJECT_COLLECTIVES, "read_pickle", "__import__"}:
            found.add(name)
    return found


def find_locale_text(source: str) -> set[str]:
    """Return the calls in a file's source that read or write text in the encoding of the locale."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        texts = [each.value for each in (*node.args, *options.values()) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        binary = any("b" in text and not set(text) - set("rwaxb+") for text in texts)
        opens = (name == "open" and not owner) or (name in ("open", "fdopen") and any(not set(text) - set("rwaxt+") for text in texts))
        if {"text", "universal_newlines"} & options.keys() and name in ("run", "Popen", "check_output"):
            found.add(ast.unparse(node))
        if (opens and not binary and owner != "os") or (owner and name in ("read_text", "write_text")):
            found.add(ast.unparse(node))
    return found


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return module -> modules of the three packages that it imports."""
    packages = ("parallel", "megatron_rl", "rollout_sglang")
    files = {module_name(file): file for package in packages for file in (ROOT / package).rglob("*.py")}

    def resolve(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {module: {resolve(name) for name in imported_names(file)} - {module, ""} for module, file in files.items()}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_and_libraries_are_only_imported_where_allowed(package):
    for file in sorted((ROOT / package).rglob("*.py")):
        path, names = str(file.relative_to(ROOT)), {name.partition(".")[0] for name in imported_names(file)}
        assert names & OWN_PACKAGES <= MAY_IMPORT[package], f"{path} imports {names & OWN_PACKAGES - MAY_IMPORT[package]}"
        for library, places in ONLY_IN.items():
            assert library not in names or any(fnmatch(path, place) for place in places), f"{path} imports {library}"


def test_no_import_runs_back_up_or_in_a_circle_and_few_modules_lie_at_the_root():
    level = {f"megatron_rl.{name}": number for number, name in enumerate(ORDER)}
    graph = {module: targets for module, targets in import_graph().items() if module.startswith("megatron_rl.")}
    places = {module: ".".join(module.split(".")[:2]) for targets in (graph, *graph.values()) for module in targets}
    missing = {place for place in places.values() if place.startswith("megatron_rl.")} - level.keys()
    assert not missing, f"add to ORDER: {missing}"
    for module, targets in graph.items():
        above = [target for target in targets if level.get(places[target], -1) > level[places[module]]]
        assert not above, f"{module} imports {above}, which stand above it in ORDER"
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    modules = sorted(file.name for file in (ROOT / "megatron_rl").glob("*.py"))
    assert len(modules) <= ROOT_MODULES, modules


def test_folders_within_a_package_are_in_an_order():
    """No folder of a package imports from one that imports from it, directly or by others, but those in `IN_CIRCLES`."""
    found = set()
    for package in ("parallel", "rollout_sglang", *(f"megatron_rl.{name}" for name in ORDER)):
        folders = {module: module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0] for module in import_graph()}
        graph: dict[str, set[str]] = {}
        for module, targets in import_graph().items():
            if f"{module}.".startswith(f"{package}."):
                inside = {folders[target] for target in targets if f"{target}.".startswith(f"{package}.")}
                graph.setdefault(folders[module], set()).update(inside - {folders[module]})
        try:
            TopologicalSorter(graph).prepare()
        except CycleError:
            found.add(package)
    assert found == IN_CIRCLES, "a package with folders in an order leaves IN_CIRCLES"


def test_heavy_libraries_are_imported_when_needed():
    """In one fresh interpreter: modules that need no torch first, then the GPU back ends, which load without their libraries, and the
    choice of a sampler, which loads no web server."""
    backends = sorted(file.stem for file in (ROOT / "megatron_rl/kernels/linear").glob("*.py"))
    modules = [f"megatron_rl.kernels.linear.{name}" for name in backends if name != "__init__"]
    modules.append("megatron_rl.rollout.generation")
    without = {("torch", "megatron", "sglang", "transformers"): TORCH_FREE}
    without |= {("triton", "deep_gemm", "transformer_engine", "uvicorn"): modules}
    script = f"""
import importlib, sys
for libraries, modules in {without!r}.items():
    for module in modules:
        importlib.import_module(module)
        assert not (loaded := sys.modules.keys() & libraries), f"{{module}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OPTIONAL = ("megatron_rl.batch.replay", "megatron_rl.rollout.agents.endpoint", "megatron_rl.rollout.agents.runner")
"""Imported inside functions alone, so that a run without them does not load them."""
NOT_FOR_ALL = ("aiohttp", "datasets", "fastapi", "mlflow", "openai", "peft", "starlette", "tensorboard", "uvicorn", "wandb")


def imported_at_once(file: Path) -> set[str]:
    """Return the full names that a file imports when it is imported."""
    statements, names = list[ast.AST](ast.parse(file.read_text(encoding="utf-8")).body), set[str]()
    for node in statements:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            statements.extend(ast.iter_child_nodes(node))
    return names


def test_a_run_loads_no_part_that_it_does_not_use():
    waiting, loaded = ["megatron_rl.training.session"], dict[str, str]()
    for module in waiting:
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name in imported_at_once(file) if file.is_file() else ():
            if name not in loaded:
                loaded[name] = module
                waiting += [name] * (name.partition(".")[0] in OWN_PACKAGES)
    used = {name: module for name, module in loaded.items() if name in OPTIONAL or name.partition(".")[0] in NOT_FOR_ALL}
    assert len(loaded) > 300 and not used, f"loaded by {used}"


@pytest.mark.long
def test_a_run_loads_no_library_that_it_does_not_use():
    libraries = {*NOT_FOR_ALL, "sglang"} - {"tensorboard"}  # that is Megatron's own import
    code = "import sys\nfrom megatron_rl.mcore import wandb_hidden\nwith wandb_hidden():\n    import megatron_rl.training.session\n"
    code += f"sys.exit(', '.join({libraries} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wandb_is_hidden_from_megatron_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)  # another test may have loaded it
    with wandb_hidden(), pytest.raises(ImportError):
        import wandb  # noqa: F401
    assert "wandb" not in sys.modules


def test_a_foreign_package_named_parallel_is_refused(tmp_path):
    (tmp_path / "parallel.py").write_text("")
    (tmp_path / "megatron_rl").symlink_to(ROOT / "megatron_rl")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "megatron_rl"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: megatron_rl found a foreign package `parallel` at {tmp_path}/parallel.py")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_shipped_code_reads_no_pickles(package):
    found = {str(file.relative_to(ROOT)): find_unpickling(file.read_text(encoding="utf-8")) for file in (ROOT / package).rglob("*.py")}
    reading = {path: names for path, names in found.items() if names}
    allowed = {path for path in MAY_PICKLE if path.startswith(f"{package}/")}
    assert reading.keys() <= allowed, f"these files read pickles: {reading}"


PICKLES = {
    "import pickle": {"pickle"},
    "def f():\n    import dill as d": {"dill"},
    "from pickle import loads": {"pickle"},
    "from marshal import loads": {"marshal"},
    "import shelve": {"shelve"},
    "torch.load(path)": {"torch.load"},
    "torch.load(path, weights_only=False)": {"torch.load"},
    "torch.load(path, weights_only=given)": {"torch.load"},
    "torch.load(path, map_location='cpu', weights_only=True)": set(),
    "np.load(path)": set(),
    "np.load(path, allow_pickle=True)": {"np.load"},
    "dist.all_gather_object(values, value)": {"dist.all_gather_object"},
    "torch.distributed.broadcast_object_list(values, src=0)": {"torch.distributed.broadcast_object_list"},
    "dist.scatter_object_list(out, values)": {"dist.scatter_object_list"},
    "dist.recv_object_list(values)": {"dist.recv_object_list"},
    "from torch.distributed import gather_object": {"gather_object"},
    "json.loads(text)": set(),
    "dist.all_gather(parts, part)": set(),
}


@pytest.mark.parametrize("source", PICKLES)
def test_what_reads_pickles_is_found(source):
    assert find_unpickling(source) == PICKLES[source]


def test_text_is_utf8_whatever_the_locale():
    folders = ("megatron_rl", "parallel", "rollout_sglang", "examples", "tools", "launch", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {file: calls for file in files if (calls := find_locale_text(file.read_text(encoding="utf-8")))}
    assert not found, "add encoding"
    for text in ("open(p)", "open(p, 'w')", "p.open('a')", "p.read_text()", "p.write_text(x, errors='strict')", "run(x, text=True)"):
        assert find_locale_text(text), text
    for text in (
        "open(p, 'rb')",
        "p.open('wb')",
        "p.open(addresses)",
        "read_text(x, 'rw')",
        "p.read_text(encoding='ascii')",
        "os.open(p, 1)",
    ):
        assert not find_locale_text(text), text
