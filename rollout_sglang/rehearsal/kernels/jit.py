"""SGLang's kernels that are compiled at first use, with the checks of `sglang/kernels/jit/csrc`."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.rehearsal.device import set_value, value_of
from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.kernels.match import Call, Kernel


class _Module:
    """Stands in for the result of `load_jit`, the functions of a compiled file."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> None:
            key = f"{self._words[0]}.run" if name == "run" else name
            if key == "tiny_n_gemm.run":
                _multiply_few_rows(self._words, *args)
            elif (kernel := _KERNELS.get(key)) is not None:
                kernel.run(f"SGLang {key}", dict(zip(kernel.parameters.split(), args, strict=True)))
            else:
                raise RefusedKernelError(f"SGLang's JIT kernel {name} ({', '.join(self._words)}) is not known to the rehearsal")

        return call


def install() -> None:
    import sglang.kernels.jit.utils as utils

    utils.load_jit = lambda *words, **_: _Module(tuple(map(str, words)))


def _check_normed_width(call: Call, given: Mapping[str, Any]) -> None:
    width = call.sizes["D"]
    call.require(width in (64, 128, 256) or (width > 256 and width % 256 == 0 and width <= 8192), f"heads of {width} numbers")


def _check_caches(call: Call, given: Mapping[str, Any]) -> None:
    row = call.sizes["K"] * call.sizes["D"]
    call.check_all(given, f"k_cache [* {row}] =q (C 1); v_cache [* {row}] =q (C 1)")


def _check_activation(call: Call, given: Mapping[str, Any]) -> None:
    out = given["out"]
    call.check_all(given, f"input [N {2 * out.shape[-1]}] =out")
    call.require(out.shape[-1] % (16 // out.itemsize) == 0, f"rows of {out.shape[-1]} numbers")


def _clamp(call: Call, given: Mapping[str, Any]) -> None:
    known = value_of(given["seq_lens"])
    set_value(given["positions"], None if known is None else (known - 1).clamp(0))


def _check_latent_row(call: Call, given: Mapping[str, Any]) -> None:
    """A row holds a latent and its rotated positions."""
    call.check_all(given, f"kv_buffer [* {given['k_nope'].shape[-1] + given['k_rope'].shape[-1]}] =k_nope (* 1)")


def _multiply_few_rows(words: tuple[str, ...], x: Any, w: Any, out: Any) -> None:
    """gemm/tiny_gemm.cuh, TinyNGemmKernel: a router's few rows of x [M, K] times w [N, K]^T. A block computes N_SPLIT columns."""
    call, (n, k, rows, split) = Call("SGLang tiny_n_gemm"), map(int, words[1:5])
    specs = f"x [M {k}] bfloat16 (X 1); w [{n} {k}] bfloat16|float32; out [M {n}] float"
    call.check_all({"x": x, "w": w, "out": out}, specs)
    call.require(x.shape[0] <= rows, f"{x.shape[0]} rows, compiled for {rows}")
    call.require(x.stride(0) * x.itemsize % 16 == 0, f"rows of x lie {x.stride(0)} numbers apart")
    threads = k // 16
    fits = k % 16 == 0 and threads % 32 == 0 and threads <= 1024 and n % split == 0 and rows * split <= threads
    call.require(fits, f"{[rows, k]} x {[k, n]} in blocks of {split} columns and {threads} threads")
    call.multiplied("bf16" if w.itemsize == 2 else "fp32", 2 * x.shape[0] * n * k, x, w, out)


_ROPE = "q [N Q D] half (* * 1); k [N K D] =q (* * 1); cos_sin_cache [* D] float32; positions [N] index"
_KERNELS: dict[str, Kernel] = {
    "qknorm": Kernel(
        "q [N Q D] half (* D 1); k [N K D] =q (* D 1); q_weight [D] =q; k_weight [D] =q",
        "q k q_weight k_weight q k",
        "q k q_weight k_weight eps",
        _check_normed_width,
    ),
    "rmsnorm": Kernel(
        "input [N D] half (* 1); weight [D] =input; out [N D] =input (* 1)",
        "input weight out",
        "input weight out eps",
    ),
    "run_rope": Kernel(_ROPE, "q k q k positions cos_sin_cache:N", "q k cos_sin_cache positions"),
    "run_rope_store": Kernel(
        f"{_ROPE}; v [N K D] =q (* D 1); out_loc [N] =positions",
        "q k v q k v positions cos_sin_cache:N",
        "q k v k_cache v_cache cos_sin_cache positions out_loc",
        _check_caches,
    ),
    "store_cache": Kernel(
        "k [B K] any (* 1); v [B V] =k (* 1); k_cache [* K] =k (* 1); v_cache [* V] =k (* 1); indices [B] index (*)",
        "k v k v indices",
        "k v k_cache v_cache indices size_limit skipped",
    ),
    "run_activation": Kernel("out [N D] float", "input out", "input out kind", _check_activation),
    "run_activation_filtered": Kernel(
        "out [N D] float; expert_ids [*] int32", "input out", "input out expert_ids step kind", _check_activation
    ),
    "set_mla_kv_buffer": Kernel(
        "k_nope [B N] any (* 1); k_rope [B R] =k_nope (* 1); loc [B] index (*)",
        "k_nope k_rope k_nope k_rope loc",
        "kv_buffer loc k_nope k_rope warps skipped",
        _check_latent_row,
    ),
    "clamp_position": Kernel("positions [B] index; seq_lens [B] =positions", "positions seq_lens", "positions seq_lens", _clamp),
    "dpsk_v4_mask_topk.run": Kernel("topk_ids [T K] int32", "topk_ids", "topk_ids num_token_non_padded"),
}
"""Kernels by function name, or by file for functions named `run`."""
