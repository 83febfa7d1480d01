"""Both branches of the cast to E4M3 (`kernels.quantize.triton._e4m3_bytes`) against torch's cast, for given bits of float32 values.

Only processes that have Triton can import this module.
"""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from megatron_rl.kernels.quantize import triton as quantize

_COUNT = 4096  # values of a program
_LARGEST = 448 * (1 + 2**-23)  # of the values that are rounded in software


@triton.jit
def cast_values(values, data, HARDWARE: tl.constexpr, COUNT: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    tl.store(data + place, quantize._e4m3_bytes(tl.load(values + place), HARDWARE))


def count_wrong(bits, hardware):
    """Return how many of the values with these bits, int32 `[n]`, become another byte than in torch. Of larger values, which no quantizer
    has, the hardware makes 448, and software is not asked. Infinities become NaN."""
    values = bits.view(torch.float32)
    data = torch.empty(len(bits), dtype=torch.uint8, device=bits.device)
    cast_values[(triton.cdiv(len(bits), _COUNT),)](values, data, HARDWARE=hardware, COUNT=_COUNT, **quantize.LAUNCH)
    finite = values.isfinite()
    wanted = torch.where(finite, values.clamp(-448, 448), values).to(torch.float8_e4m3fn).view(torch.uint8)
    wrong = torch.where(finite, data != wanted, (data & 0x7F) != 0x7F)
    return int((wrong if hardware else wrong & (~finite | (values.abs() <= _LARGEST))).sum())


@contextmanager
def hardware_cast():
    """Let the interpreter cast like `cvt.rn.satfinite.e4m3x2.f32` of PTX, and kernels take the branch for the hardware. Triton's own
    interpreter neither rounds to even nor saturates, and makes numbers of NaN."""
    convert = interpreter._convert_float

    def saturate(values, source, target, rounding):
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        data = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(numbers.isnan(), 0x7F, data).numpy().reshape(values.shape)

    branch = mock.patch.object(quantize._e4m3_bytes.fn, "__defaults__", (tl.constexpr(True),))
    with mock.patch.object(interpreter, "_convert_float", saturate), branch:
        yield
