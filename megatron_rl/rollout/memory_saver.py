"""What SGLang's torch_memory_saver, which frees a colocated engine's memory on a GPU, needs of the processes that it is preloaded into.

It is a library in LD_PRELOAD, and the loader only warns where it cannot resolve it: then every release is answered and nothing is freed.
Read from torch_memory_saver 0.0.10 and SGLang 0.5.23; not run on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.errors import UserError

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GRAPHS = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
"""Without it SGLang captures CUDA graphs outside of the library, and releasing "cuda_graph" frees nothing."""


def check(environment: Mapping[str, str], cuda: str | None) -> None:
    """Raise UserError where an engine's memory would not be released. `cuda`: what torch is built for; None for a CPU build."""
    for variable in _ALLOCATOR_VARIABLES:
        setting = environment.get(variable, "")
        if "expandable_segments:true" in setting.replace(" ", "").lower():
            rule = "keeps a colocated engine from releasing its memory: torch_memory_saver does not work with expandable segments"
            raise UserError(variable, setting, rule, 'unset it, or set placement.kind to "disaggregated"')
    if cuda is not None and find_cuda_runtime(cuda) is None:
        rule = f"releases an engine's memory by a library that needs {_name_runtime(cuda)}, and torch has loaded none"
        raise UserError(
            "placement.kind", "colocated", rule, 'install torch\'s pinned build (bash launch/install_gpu.sh), or set "disaggregated"'
        )


def make_environment(environment: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Return the variables of a colocated engine's process: the loader's path leads to the CUDA runtime that torch itself uses, which
    lies in a package's folder that the loader does not search, and CUDA graphs are released too."""
    variables = {_GRAPHS: environment.get(_GRAPHS, "true")}
    if cuda is not None and (runtime := find_cuda_runtime(cuda)):
        folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        variables["LD_LIBRARY_PATH"] = os.pathsep.join([str(runtime.parent), *filter(None, folders)])
    return variables


def find_cuda_runtime(cuda: str, maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the file of the CUDA runtime that this process has loaded with torch, None where it has none. `maps`: what it has mapped."""
    files = (Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if "/" in line)
    return next((file for file in files if file.name.startswith(_name_runtime(cuda))), None)


def _name_runtime(cuda: str) -> str:
    return f"libcudart.so.{cuda.partition('.')[0]}"
