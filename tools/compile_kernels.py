"""Compile every Triton kernel of this project for Hopper or Blackwell, as its own function launches it, without a GPU.

    PYTHONPATH=.:.venv/triton python tools/compile_kernels.py 100             # or 90; 103 for B300
    PYTHONPATH=.:.venv/triton python tools/compile_kernels.py 90 --orders    # compare the orders of sums (kernel_orders.py)
    PYTHONPATH=.:.venv/triton python tools/compile_kernels.py 90 --counts    # count instructions and registers (kernel_counts.py)

Triton gets a driver that only names the target. A launch compiles the kernel for the actual arguments and does not run it.
"""

import ast
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.kernels import blackwell

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron_rl", "parallel", "rollout_sglang")


def compile_all(architecture: int) -> str:
    """Compile every kernel for sm_90, sm_100, or sm_103, and return a summary. Raise AssertionError for a kernel that is never launched or
    spills registers."""
    compiled = intercept_launches(architecture)
    launch_all()
    missing = find_kernels() - compiled.keys()
    assert not missing, f"launch them in {Path(__file__).name}: {missing}"
    spills = sorted({spill for kernel in itertools.chain(*compiled.values()) if (spill := find_spill(kernel, architecture))})
    assert not spills, spills
    return ", ".join(f"{name} in {len(kernels)} kinds" for name, kernels in sorted(compiled.items()))


def intercept_launches(architecture: int) -> dict[str, list[Any]]:
    """Make launches in this process compile only, with the options for this architecture. Return a dictionary that collects the compiled
    kernels by name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", architecture, 32)
    first: Any = lambda *_: 0  # noqa: E731 - device and stream
    driver.set_active(SimpleNamespace(get_current_device=first, get_current_stream=first, get_current_target=lambda: target))
    blackwell.is_blackwell = lambda: architecture >= 100
    compiled: dict[str, list[Any]] = {}

    def launch(kernel: Any, grid: Any) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            compiled.setdefault(kernel.__name__, []).append(kernel.run(*arguments, grid=grid, warmup=True, **options))

        return compile_only

    JITFunction.__getitem__ = launch
    return compiled


def launch_all() -> None:
    """Call the functions that launch kernels, for every variant of each kernel."""
    from megatron_rl.kernels.cache_units.triton import enter_units
    from megatron_rl.kernels.embedding.triton import add_token_rows
    from megatron_rl.kernels.experts import triton as token_rows_triton
    from megatron_rl.kernels.experts.triton import pack, quantize_weighed, spread_packed
    from megatron_rl.kernels.heads import Heads
    from megatron_rl.kernels.heads import triton as heads_triton
    from megatron_rl.kernels.norm import triton as norm_triton
    from megatron_rl.kernels.norm.triton import quantize_norm
    from megatron_rl.kernels.quantize.token_groups import TokenGroups
    from megatron_rl.kernels.quantize.triton import quantize_activation, quantize_into
    from megatron_rl.kernels.rope.reference import Rotation
    from megatron_rl.kernels.rope.triton import rotate
    from megatron_rl.kernels.sums.triton import add_ranks, multiply_nodes
    from megatron_rl.kernels.swiglu import triton as swiglu_triton
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu
    from megatron_rl.kernels.vocabulary import triton as vocabulary_triton
    from parallel.digest_triton import run_sums

    x, halves = torch.zeros(256, 512, dtype=torch.bfloat16), TokenGroups.from_counts([128, 128], "cpu")
    for scale_format in ("pow2", "fp32"):
        for rows, columns, groups in ((True, True, None), (True, False, None), (False, True, None), (True, True, halves)):
            quantize_activation(x, scale_format, rows=rows, columns=columns, groups=groups)
        quantize_activation(x, scale_format, rows=True, columns=True, groups=halves, by_token=True)
        for columns, by_token in ((True, False), (True, True), (False, False)):
            quantize_weighed(x, x, torch.zeros(256), halves, scale_format, columns=columns, by_token=by_token)
        for tokens in (x, torch.zeros(384, 512, dtype=torch.bfloat16)):  # as parts of a token, and in tiles
            quantize_into(tokens, torch.zeros_like(tokens, dtype=torch.float8_e4m3fn), torch.zeros(4, len(tokens)).t(), scale_format)
        swiglu_triton.multiply_and_quantize(x, scale_format)
        if scale_format == "pow2":
            quantize_into(x, torch.zeros(256, 512, dtype=torch.float8_e4m3fn), torch.zeros(1, 256, dtype=torch.int32).t(), scale_format)
        for rows, columns, groups in ((True, True, None), (True, False, None), (True, True, halves)):
            for gradient in (None, x[:, :256].contiguous()):
                quantize_swiglu(x, gradient, scale_format, rows=rows, columns=columns, groups=groups)
        for gradient in (None, x[:, :256].contiguous()):
            quantize_swiglu(x, gradient, scale_format, rows=True, columns=True, groups=halves, by_token=True)
    for width in (2048, 4096, 7168):
        for scale_format in ("pow2", "fp32"):
            pack(torch.zeros(32, width, dtype=torch.bfloat16), torch.zeros(32, 8, dtype=torch.int64), scale_format)
        spread_packed(torch.zeros(256, width // 4 + width // 128, dtype=torch.int32), halves)
    for width in (2048, 4096, 5120, 8192):
        stream, weight = torch.zeros(32, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        for scale_format, residual in (("pow2", stream), ("fp32", stream), ("pow2", None)):
            quantize_norm(stream, residual, weight, 1e-6, scale_format, columns=True)
            quantize_norm(stream, residual, weight, 1e-6, scale_format, columns=False, result=stream)
            norm_triton.differentiate(stream, stream, torch.zeros(32), weight, residual)
            norm_triton.normalize(stream, residual, weight.float(), 1e-6)
        order, places = torch.zeros(32, 8, dtype=torch.int64), torch.zeros(256, dtype=torch.int64)
        token_rows_triton.collect(token_rows_triton.scatter(stream, order), places, None)
        token_rows_triton.collect(stream, places, torch.zeros(256))
        token_rows_triton.sum_rows(torch.zeros(256, width, dtype=torch.bfloat16), order)
    for parts, experts in ((8, 16), (1, 128), (64, 4)):
        counts, sizes, weights = torch.zeros(parts, experts, dtype=torch.int64), places[:parts], torch.zeros(parts * experts * 32)
        token_rows_triton.tabulate_parts(counts, 2016)
        token_rows_triton.place_tokens(places, weights, counts.flatten(), sizes, torch.zeros(parts + 1), 256)
    for count, queries, interleaved, normed in ((8, 4, False, True), (1, 8, False, True), (8, 5, False, False), (2, 16, True, False)):
        rotation = Rotation(torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(96, dtype=torch.int64), interleaved)
        layout, mixed = Heads(count, queries, rotation, 1e-6), torch.zeros(96, count * (queries + 2) * 128, dtype=torch.bfloat16)
        norms = (mixed[0, :128], mixed[1, :128]) if normed else None
        query, key = heads_triton.rotate_heads(mixed, layout, norms)
        heads_triton.turn_heads(query, key, rotation)
        if norms is not None:
            heads_triton.normalize_heads(query, key, norms, 1e-6)
        heads_triton.differentiate_heads((query, key, key), mixed, layout, norms)
    enter_units(query, key, key, torch.zeros(2))
    slices, scale = torch.zeros(32, 6, 256, dtype=torch.bfloat16)[:, 1:5], torch.zeros(256)
    norm_triton.differentiate(slices, *norm_triton.normalize(slices, None, scale, 1e-6)[:2], scale, None)
    for width in (256, 4096, 32768):  # 32768 gives the deepest tree: 32B models have 25,600 at tp 1
        for dtype, block in ((torch.float8_e4m3fn, 128), (torch.bfloat16, 0), (torch.float32, 0)):
            left, weight = torch.zeros(64, width, dtype=dtype), torch.zeros(128, width, dtype=dtype)
            scales = (torch.zeros(64, width // block), torch.zeros(1, width // block)) if block else ()
            multiply_nodes(left, weight, *scales)
    add_ranks(torch.zeros(4, 64, 4096, dtype=torch.bfloat16))
    for heads, width, interleaved in ((32, 128, False), (8, 128, False), (16, 64, True)):
        rotation = Rotation(torch.zeros(64, width // 2), torch.zeros(64, width // 2), torch.zeros(4, dtype=torch.int64), interleaved)
        rotate(torch.zeros(4, heads, width, dtype=torch.bfloat16), rotation, 1.0)
    for dtype in (torch.bfloat16, torch.float32):
        halves_of_x = torch.zeros(4, 2 * 12288, dtype=dtype)
        swiglu_triton.differentiate(halves_of_x, swiglu_triton.multiply(halves_of_x))
        logits, targets, sums = torch.zeros(4, 37984, dtype=dtype), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
        for temperature in (1.0, 0.7):
            vocabulary_triton.summarize(logits, targets, temperature)
            vocabulary_triton.differentiate_(logits, targets, sums, sums, temperature)
        add_token_rows(torch.zeros(512, 4096), targets, torch.zeros(4, 4096, dtype=dtype))
    run_sums(torch.zeros(1 << 20, dtype=torch.uint8))
    launch_weights()
    launch_attention()
    launch_gated_delta()


def launch_weights() -> None:
    """Launch what quantizes slices of weights, with and without an order of rows, and what transposes weights and stacks of experts."""
    from megatron_rl.kernels.slices import WeightSlice
    from megatron_rl.kernels.slices import triton as slices_triton
    from megatron_rl.kernels.transpose.triton import transpose_bytes
    from parallel.formats import FP8

    values, data = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=torch.float8_e4m3fn)
    for start, order in ((1 << 12, None), (1 << 12, torch.arange(64)), (3, None)):
        place = WeightSlice(64, 4096, start, FP8, order)
        slices_triton.quantize_slice(values, place, slices_triton.find_maxima(values, place), data)
    for shape, padding in (((256, 512), 0), ((576, 512), 64), ((4, 256, 512), 0)):
        transpose_bytes(torch.zeros(shape, dtype=torch.uint8), padding)


def launch_attention() -> None:
    """Launch attention in splits, for packed sequences and decoded tokens of models with several groupings of heads."""
    from megatron_rl.kernels.split_attention import Sequences, pack
    from megatron_rl.kernels.split_attention.triton import attend

    numbers, slots = torch.zeros(4, dtype=torch.int64), torch.zeros(3, 5000, dtype=torch.int32)
    for per_group, width, sinks, window in (
        (7, 64, False, 0), (4, 64, True, 128), (1, 128, False, 0), (4, 128, False, 0), (8, 128, True, 128), (8, 256, True, 0),
    ):  # fmt: skip
        if width > 128 and blackwell.is_blackwell():
            continue  # registers spill, but trainer and engine share no attention there
        query, key = torch.zeros(3, 2 * per_group, width, dtype=torch.bfloat16), torch.zeros(5000, 2, width, dtype=torch.bfloat16)
        kind = 1.0, query[0, :, 0] if sinks else None, window
        attend(query, key[:3], key[:3], pack(torch.zeros(2, dtype=torch.int32), 3, 3), *kind)
        for longest, splits in ((3, 0), (1, 3)):
            attend(query, key, key, Sequences(numbers, numbers[:3], numbers[:3], slots, 5000, longest, splits), *kind)


def launch_gated_delta() -> None:
    """Launch the kernels of gated delta nets, forward and backward, for the widths of published models and a share of their heads."""
    from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
    from megatron_rl.kernels.gated_delta import triton as gated_delta_triton
    from megatron_rl.kernels.gates import triton as gates_triton

    for dtype, heads in itertools.product((torch.bfloat16, torch.float32), (DeltaHeads(16, 32, 128, 128), DeltaHeads(4, 16, 128, 128))):
        channels, row = sum(heads.widths), torch.zeros(70, sum(heads.widths), dtype=dtype)
        vectors = torch.zeros(heads.v).requires_grad_(), torch.zeros(heads.v)
        weights, gates = DeltaWeights(torch.zeros(channels, 4, dtype=dtype), *vectors, heads), torch.zeros(70, heads.v, dtype=dtype)
        gated_delta_triton.attend(weights, row, gates, gates, [69, 1]).sum().backward()
        states = torch.zeros(70, heads.v, heads.k_dim, heads.v_dim)
        windows, slots = torch.zeros(70, channels, 3, dtype=dtype), torch.zeros(70, dtype=torch.int32)
        gated_delta_triton.advance(weights, row, gates, gates, [1] * 70, slots, windows, states)
        x, weight = torch.zeros(70, heads.v, heads.v_dim, dtype=dtype).requires_grad_(), torch.zeros(heads.v_dim, dtype=dtype)
        gates_triton.gate_norm(x, x, weight, 1e-6).sum().backward()
        for width in (4096, 1):
            x = torch.zeros(70, 4096, dtype=dtype).requires_grad_()
            gates_triton.gate(x, x[:, :width].detach()).sum().backward()


def find_kernels(root: Path = ROOT) -> set[str]:
    """Return the names of all kernels in the sources: functions with `@triton.jit` that no other such function calls."""
    texts = [
        text for package in PACKAGES for file in (root / package).rglob("*.py") if "@triton." in (text := file.read_text(encoding="utf-8"))
    ]
    functions = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    jitted = [node for node in functions if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)]
    called = {ast.unparse(call.func) for node in jitted for call in ast.walk(node) if isinstance(call, ast.Call)}
    return {node.name for node in jitted} - called


def assemble(kernel: Any, architecture: int) -> str:
    """Return the report of Triton's assembler on a compiled kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(architecture).path, "-v", f"--gpu-name=sm_{architecture}a", "-", "-o", os.devnull]
    return subprocess.run(command, input=kernel.asm["ptx"], capture_output=True, encoding="utf-8", check=True).stderr


def disassemble(kernel: Any) -> str:
    """Return the machine code of a compiled kernel as text."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, encoding="utf-8", check=True).stdout


def find_spill(kernel: Any, architecture: int) -> str:
    """Return the line of Triton's assembler about spilled registers, with the kernel's name, or "" if none were spilled."""
    line = next(line for line in assemble(kernel, architecture).splitlines() if "bytes spill stores" in line)
    return "" if "0 bytes spill stores, 0 bytes spill loads" in line else f"{kernel.name}: {line.strip()}"


def compare_orders(architecture: int) -> str:
    """Return a summary of the operators whose variants all add in one order. Raise AssertionError with those that do not."""
    import kernel_orders

    differences = kernel_orders.find_differences(intercept_launches(architecture))
    assert not differences, "\n".join(differences)
    return f"one order for any number of rows and alignment: {', '.join(kernel_orders.list_operators())}"


def count_instructions(architecture: int) -> str:
    """Return a table of the counts of the kernels that quantize."""
    import kernel_counts

    return kernel_counts.tabulate(kernel_counts.count_all(intercept_launches(architecture)))


if __name__ == "__main__":
    chosen = compare_orders if "--orders" in sys.argv else count_instructions if "--counts" in sys.argv else compile_all
    print(chosen(int(sys.argv[1])))
