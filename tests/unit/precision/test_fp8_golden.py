"""Golden bytes: a change of FP8 numerics must be meant. `python -m tests.unit.precision.test_fp8_golden` writes the file anew.

The file holds bytes and scales of a weight and round trips of activations in both scale formats; the inputs come from integer
arithmetic alone, so no library's random numbers are behind it.
"""

import numpy as np
import torch
from support.processes import ROOT

from megatron_rl.precision.fp8 import quantize_weight, round_trip_1x128, round_trip_128x1

FILE = ROOT / "tests" / "support" / "golden" / "fp8.npz"


def values(rows: int, cols: int, seed: int) -> torch.Tensor:
    """float32 [rows, cols]: 24-bit integers of a linear congruential generator, scaled by powers of two between 2^-24 and 2^-8."""
    state, array = np.uint64(seed), np.empty(rows * cols, np.float32)
    with np.errstate(over="ignore"):  # the generator counts modulo 2^64
        for index in range(array.size):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            array[index] = (int(state >> np.uint64(40)) - 2**23) * 2.0 ** -(32 - int(state >> np.uint64(28)) % 17 // 2)
    return torch.from_numpy(array.reshape(rows, cols))


def results() -> dict[str, np.ndarray]:
    """What the file should hold: name -> uint8 bytes or uint32 bit patterns of float32."""
    arrays = {}
    for scale_format in ("pow2", "fp32"):
        blocks = quantize_weight(values(140, 200, seed=1), scale_format)
        arrays[f"{scale_format}.weight"] = blocks.data.view(torch.uint8).numpy()
        arrays[f"{scale_format}.weight_scale_inv"] = blocks.scale.numpy().view(np.uint32)
        arrays[f"{scale_format}.activations_1x128"] = round_trip_1x128(values(4, 200, seed=2), scale_format).numpy().view(np.uint32)
        columns = round_trip_128x1(values(200, 4, seed=3), scale_format).contiguous()
        arrays[f"{scale_format}.activations_128x1"] = columns.numpy().view(np.uint32)
    return arrays


def test_bytes_and_scales_are_the_golden_ones():
    with np.load(FILE) as golden:
        expected, computed = dict(golden), results()
    assert expected.keys() == computed.keys()
    assert len(np.unique(expected["pow2.weight"])) > 100 and len(np.unique(expected["fp32.weight_scale_inv"])) > 1, "trivial inputs"
    for name, array in expected.items():
        message = f"FP8 numerics of {name} changed; if meant: python -m tests.unit.precision.test_fp8_golden"
        np.testing.assert_array_equal(computed[name], array, err_msg=message, strict=True)


if __name__ == "__main__":
    np.savez_compressed(FILE, **results())
    print(f"{FILE}: {FILE.stat().st_size} bytes")
