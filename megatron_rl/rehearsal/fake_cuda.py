"""Makes a process without a GPU behave as if torch, CUDA and NCCL had one Hopper GPU. Call `install` once; it cannot be undone.

Tensors and operators are in `device`, collectives in `collectives`, library kernels in `kernels/`. The project's code and Megatron run
unchanged.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.cost.hardware import Gpu
from megatron_rl.rehearsal import collectives, groups, hopper, kernels
from megatron_rl.rehearsal.device import FakeGpu, plausible_value
from megatron_rl.rehearsal.hopper import PROPERTIES
from megatron_rl.rehearsal.recorder import Recorder

_current: list[FakeGpu] = []
_FOR_INFERENCE = ("flashinfer", "flash_mla")
"""Packages that Megatron imports for inference if they are installed, and whose import needs a driver. Hidden from this process."""


def current_device() -> FakeGpu:
    """Return the device of the current rank."""
    return _current[-1]


def recorder() -> Recorder:
    """Return the recorder of the current rank."""
    return current_device().recorder


@contextlib.contextmanager
def one_rank(rank: int, world: int, gpu: Gpu, recorder: Recorder | None = None) -> Iterator[FakeGpu]:
    """Context manager that makes this process rank `rank` of `world`, with a process group and an empty GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = FakeGpu(recorder or Recorder(), collectives.communicate)
    _current.append(device)
    hopper.become(gpu)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a host tensor, then copies
    try:
        with device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        _current.pop()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Stream:
    """A stream or an event without timing."""

    cuda_stream = stream_id = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        recorder().wait("synchronize")

    def wait(self, *_: Any, **__: Any) -> None: ...

    record = wait_stream = wait_event = wait


def _do_not_compile(function: Any = None, **_: Any) -> Any:
    """Return the function unchanged. Operators that a compiler would fuse are counted one by one."""
    return function if function is not None else lambda function: function


def _ignore(*_: Any, **__: Any) -> None: ...


def install() -> None:
    """Install the device and the libraries of a trainer, whether they are installed or not. Idempotent."""
    if getattr(install, "done", False):
        return
    from megatron_rl.rehearsal.kernels import deep_gemm, flash_attention, torch_cuda, transformer_engine, triton

    install.done = True  # type: ignore[attr-defined]
    install_device()
    sys.modules.update(dict.fromkeys(_FOR_INFERENCE))  # type: ignore[arg-type] # None blocks an import
    for library in (torch_cuda, flash_attention, transformer_engine, deep_gemm, triton):
        library.install()
    _replace_random()
    groups.record_owners()


def install_device() -> None:
    """Install the device, without any library but torch."""
    torch._C._ensureCUDADeviceGuardSet()
    torch_fakes: Any = fake_tensor
    torch_fakes.init_gpu_context = _ignore
    torch_fakes.CONSTANT_NUMEL_LIMIT = -1  # `device` tracks known values itself
    torch.compile = _do_not_compile  # type: ignore[assignment]
    _replace_queries()
    _replace_tensor_methods()
    collectives.install(recorder)
    kernels.set_recorder(recorder)


def _replace_queries() -> None:
    held, peak = (lambda *_: recorder().now), (lambda *_: recorder().phase.peak.nbytes)
    hopper.pretend(
        mem_get_info=lambda *_: (PROPERTIES.total_memory - recorder().now, PROPERTIES.total_memory),
        memory_allocated=held,
        memory_reserved=held,
        max_memory_allocated=peak,
        max_memory_reserved=peak,
        synchronize=lambda *_: recorder().wait("synchronize"),
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
    )
    torch.version.cuda = "13.0"


def _replace_random() -> None:
    import megatron.core.tensor_parallel.random as random

    cuda: Any = torch.cuda
    cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = random._set_cuda_rng_state = _ignore
    cuda.manual_seed = cuda.manual_seed_all = _ignore


def _replace_tensor_methods() -> None:
    fake: Any = FakeTensor
    fake.tolist = lambda self: (self.cpu() if self.device.type == "cuda" else plausible_value(self)).tolist()
    fake.data_ptr = _address
    fake.record_stream = _ignore
    plain_data: Any = torch.Tensor.data
    fake.data = property(plain_data.__get__, _set_data)
    storage: Any = torch.UntypedStorage
    typed: Any = torch.TypedStorage
    plain_resize = storage.resize_

    def resize(self: Any, size: int) -> Any:
        result = plain_resize(self, size)
        if _current:
            recorder().resize(self, size)
        return result

    storage.resize_ = resize
    typed._resize_ = lambda self, size: resize(self._untyped_storage, size * self._element_size())
    module: Any = torch.nn.Module
    module.cuda = _move_module
    tensor: Any = torch.Tensor
    plain_pin = tensor.pin_memory
    tensor.pin_memory = lambda self, *_: self if _current else plain_pin(self)
    group: Any = dist.ProcessGroup
    group.set_timeout = _ignore


def _address(tensor: Any) -> int:
    """Return an address with the allocator's alignment. Views of one storage have consistent addresses."""
    return (tensor.untyped_storage()._cdata << 9) + tensor.storage_offset() * tensor.itemsize


def _set_data(tensor: Any, value: Any) -> None:
    """Give a tensor the storage of another tensor, which may be on another device."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


def _move_module(self: Any, *_: Any) -> Any:
    """Move a module's tensors to the device. Parameters are replaced with their attributes, because a tensor without data cannot replace
    the data of a real one."""
    moved: dict[int, Any] = {}
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type != "cuda":
                if id(parameter) not in moved:
                    new = torch.nn.Parameter(parameter.data.to("cuda"), parameter.requires_grad)
                    vars(new).update(vars(parameter))
                    moved[id(parameter)] = new
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "cuda":
                module._buffers[name] = buffer.to("cuda")
    return self
