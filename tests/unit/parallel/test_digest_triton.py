"""The digest of bytes on a GPU: its kernel, run in Triton's interpreter, matches a plain loop, and every change changes the digest."""

import sys
from types import ModuleType

import torch
from support.fp8_reference import run_sums
from support.kernel_tests import call_with_triton, compile_for_hopper, in_interpreter, needs_triton

from parallel.digest import Hash


@in_interpreter
def test_the_kernel_matches_a_plain_loop():
    from parallel.digest_triton import run_sums as kernel_sums

    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 3, 4, 4096, 4097, 256 << 10, (256 << 10) + 4, 600_001):
        flat = torch.randint(0, 256, (size + 4,), dtype=torch.uint8, generator=generator)
        for start in (0, 1, 4):  # including unaligned starts
            part = flat[start : start + size]
            assert torch.equal(kernel_sums(part), run_sums(part)), (size, start)


def compile_kernel() -> str:
    from parallel.digest_triton import COLUMNS, RUN, sum_runs

    types = {"words": "*i32", "sums": "*i64"}
    return compile_for_hopper(sum_runs, {"num_warps": 8}, types, {"COLUMNS": COLUMNS, "RUN": RUN}, ("count",))[0]


@needs_triton
def test_it_compiles_for_hopper_with_wide_loads():
    assert "ld.global.v4.b32" in call_with_triton(compile_kernel), "loads word by word"


def hashed(*matrices: torch.Tensor) -> str:
    hasher = Hash()
    for matrix in matrices:
        hasher.update(matrix)
    return hasher.hexdigest()


def test_every_change_changes_the_digest_columns_are_hashed_as_their_copy_and_a_digest_is_read_twice(monkeypatch):
    on_device = ModuleType("parallel.digest_triton")  # hashes byte matrices as on a GPU, with the plain loop
    on_device.run_sums = run_sums
    monkeypatch.setitem(sys.modules, "parallel.digest_triton", on_device)
    matrix = torch.randint(0, 256, (150, 2048), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    digests = {"as it is": hashed(matrix)}
    for name, place in {"first": (0, 0), "in between": (77, 1025), "last": (149, 2047)}.items():
        for bit in (0, 7):
            changed = matrix.clone()
            changed[place] ^= 1 << bit
            digests[f"{name} byte, bit {bit}"] = hashed(changed)
    for name, rows in {"rows two apart": [3, 5], "rows far apart": [0, 130]}.items():  # within a run; between runs
        changed = matrix.clone()
        changed[rows] = matrix[rows[::-1]]
        digests[name] = hashed(changed)
    digests["a zero row more"] = hashed(torch.cat([matrix, matrix.new_zeros(1, 2048)]))
    digests["in two pieces"] = hashed(matrix[:75], matrix[75:])
    digests["the pieces swapped"] = hashed(matrix[75:], matrix[:75])
    assert len(set(digests.values())) == len(digests), digests
    assert all(len(value) == 32 for value in digests.values())
    matrix = torch.randint(0, 256, (40, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert hashed(matrix[:, 128:256]) == hashed(matrix[:, 128:256].clone()) != hashed(matrix[:, :128])
    hasher = Hash()
    hasher.update(matrix)
    assert hasher.hexdigest() == hasher.hexdigest() == hashed(matrix)
    assert hashed(torch.empty(0, 128, dtype=torch.uint8)) != hashed()
