"""Requirements of SGLang's torch_memory_saver, which frees a colocated engine's memory on a GPU. It is a library in LD_PRELOAD: if it
cannot be loaded, releasing memory has no effect. Derived from torch_memory_saver 0.0.10 and SGLang 0.5.23; not yet run on a GPU."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.errors import UserError

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""SGLang captures CUDA graphs outside of the library unless this variable is set, and releasing "cuda_graph" then frees nothing."""


def check(environment: Mapping[str, str], cuda: str | None) -> None:
    """Raise UserError if an engine's memory would not be released. `cuda`: CUDA version of the torch build, or None for a CPU build."""
    for variable in _ALLOCATOR_VARIABLES:
        setting = environment.get(variable, "")
        if "expandable_segments:true" in setting.replace(" ", "").lower():
            rule = "keeps a colocated engine from releasing its memory: torch_memory_saver does not work with expandable segments"
            raise UserError(variable, setting, rule, 'unset it, or set placement.kind to "disaggregated"')
    if cuda is not None and find_cuda_runtime(cuda) is None:
        rule = f"releases an engine's memory with a library that needs libcudart.so.{cuda.partition('.')[0]}, which torch has not loaded"
        fix = 'install the pinned torch build (bash launch/install_gpu.sh), or set "disaggregated"'
        raise UserError("placement.kind", "colocated", rule, fix)


def make_environment(environment: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Return the environment variables of a colocated engine, with the folder of torch's CUDA runtime in the library path."""
    variables = {_GRAPHS: environment.get(_GRAPHS, "true")}
    if cuda is not None and (runtime := find_cuda_runtime(cuda)):
        folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        variables["LD_LIBRARY_PATH"] = os.pathsep.join([str(runtime.parent), *filter(None, folders)])
    return variables


def find_cuda_runtime(cuda: str, maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the CUDA runtime file that torch has loaded into this process, or None. `maps`: memory mappings of the process."""
    files = (Path(line.split(maxsplit=5)[5]) for line in maps.read_text(encoding="utf-8").splitlines() if "/" in line)
    return next((file for file in files if file.name.startswith(f"libcudart.so.{cuda.partition('.')[0]}")), None)
