"""FlashInfer's attention, which engines use whose KV cache has a scale per layer (`precision.kv = "e4m3_per_layer"`): the wrappers of
`flashinfer/prefill.py` and `decode.py` in 0.7, with the checks of `csrc/batch_prefill*.cu` and `fmha_cutlass_sm100.cu`.

A wrapper is planned once per pass, on the host, and runs in each layer. The tokens of prompts attend to each other in BF16 ("ragged"): by
CUTLASS on Blackwell, by FlashAttention 3 on Hopper, and by FlashAttention 2 for heads of 256 on Blackwell. All other queries attend to the
cache by FlashAttention 2, which multiplies in BF16: E4M3 becomes BF16 in registers. It splits contexts among blocks, whose results a second
kernel joins. Windows, masks, soft caps, and prompts that attend to both their own tokens and a cached prefix are refused.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.kernels.match import Call
from rollout_sglang.rehearsal.kernels.flash_attention import count_pairs

_TABLE_BYTES = 8 << 20  # of each wrapper: which block computes what
_CUTLASS_BYTES, _CUTLASS_TILES = 32 << 20, 131072
_CUTLASS_HEADS = ((64, 64), (128, 128), (192, 128))
_SHORTEST_SPLIT = 128  # tokens


class _Plan(NamedTuple):
    """What the host has planned for the layers of a pass."""

    starts: torch.Tensor
    """int32 `[requests + 1]`, the first query of each request; `key_starts` of their keys. On the host."""
    key_starts: torch.Tensor
    sizes: dict[str, int]
    """T queries, B requests, H heads, K heads of keys, D and V their widths."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """of queries, and of keys and values"""
    partial_rows: int
    """Rows that blocks write for the second kernel, or 0 if no context is split."""


class _Wrapper:
    """What all wrappers share. SGLang replaces `begin_forward` and reads `_paged_kv_indices_buf` and `_custom_mask_buf`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **others: Any) -> None:
        self.kernel = f"flashinfer.{type(self).__name__}"
        Call(self.kernel).require(kv_layout == "NHD", f"layout {kv_layout} is not known to the rehearsal")
        self.is_cuda_graph_enabled, self._workspace = use_cuda_graph, float_workspace_buffer
        self.tables = torch.empty(_TABLE_BYTES, dtype=torch.uint8, device=float_workspace_buffer.device)
        self._custom_mask_buf, self.backend = others.get("custom_mask_buf"), others.get("backend", "auto")
        self._plan: _Plan | None = None
        Call(self.kernel).require(self._custom_mask_buf is None, "masks are not known to the rehearsal")

    def _set_plan(self, starts: torch.Tensor, key_starts: torch.Tensor, heads: int, kv_heads: int, width: int, *dtypes: Any) -> None:
        """Plan for host tensors `starts` and `key_starts`; heads of keys and of values have `width` numbers."""
        call, requests, rows = Call(self.kernel), len(starts) - 1, int(starts[-1])
        call.require(heads % kv_heads == 0, f"{heads} query heads, {kv_heads} key heads")
        sizes = {"T": rows, "B": requests, "H": heads, "K": kv_heads, "D": width, "V": width}
        partial = self._count_partial_rows(call, starts.diff().long(), key_starts.diff().long(), sizes) if self.backend == "fa2" else 0
        queries, cache = (getattr(torch, each) if isinstance(each, str) else each for each in dtypes)
        self._plan = _Plan(starts, key_starts, sizes, (queries, cache), partial)

    def _count_partial_rows(self, call: Call, queries: torch.Tensor, keys: torch.Tensor, sizes: dict[str, int]) -> int:
        """Split contexts so far that two blocks per multiprocessor have work (`scheduler.cuh`, `PrefillSplitQOKVIndptr`). In a graph, the
        second kernel always runs. Refuse splits for which the workspace is too small."""
        rows, requests, heads, kv_heads, width = (sizes[name] for name in "TBHKV")
        group, graph, keys = heads // kv_heads, self.is_cuda_graph_enabled, keys.clamp(min=1)
        long = (rows - requests + 1) * group if graph else rows * group // requests
        tile = 128 if long > 64 and width < 256 else 64 if long > 16 else 16
        blocks = 2 * torch.cuda.get_device_properties(self._workspace.device).multi_processor_count // kv_heads
        tiles = -(queries * group // -tile)

        def count_blocks(split: int) -> int:
            return int((tiles * -(keys // -split)).sum())

        longest = int(keys.max())
        split = _SHORTEST_SPLIT + bisect_left(range(_SHORTEST_SPLIT, longest), True, key=lambda split: count_blocks(split) <= blocks)
        if not graph and split >= longest:
            return 0
        room = max(blocks, -(rows * group // -tile) + requests - 1) if graph else count_blocks(split)
        needed = -(room * tile // -group) * heads * (width + 1) * 4
        call.require(needed <= self._workspace.nbytes, f"{needed} bytes for parts of contexts, {self._workspace.nbytes} in the workspace")
        return int((queries * -(keys // -split)).sum())

    def _attend(self, q: torch.Tensor, keys: Any, values: Any, options: dict[str, Any]) -> torch.Tensor:
        """q `[tokens, heads, d]`; keys and values `[tokens or slots, heads, d]`."""
        plan, window, cap = self._plan, options.get("window_left", -1), options.get("logits_soft_cap")
        if plan is None:
            raise RefusedKernelError(f"{self.kernel}: plan info is not initialized")
        call = Call(self.kernel, **plan.sizes)
        call.require(window < 0 and not cap, f"a window of {window} or a soft cap of {cap} is not known to the rehearsal")
        for name in ("q_scale", "k_scale", "v_scale"):
            call.require(options.get(name) in (None, 1.0), f"{name} {options.get(name)} is not known to the rehearsal")
        given = {"q": q, "k": keys, "v": values}
        call.require((q.dtype, keys.dtype) == plan.dtypes, f"q is {q.dtype} and k {keys.dtype}, and {plan.dtypes} were planned")
        call.check_all(given, "q [T H D] half (* * 1); k [S K D] half|float8_e4m3fn (X Y 1); v [S K V] =k (X Y 1)")
        out = torch.empty(*q.shape[:2], plan.sizes["V"], dtype=q.dtype, device=q.device)
        tokens = int(plan.key_starts[-1])
        read = torch.empty(tokens, plan.sizes["K"], plan.sizes["D"] + plan.sizes["V"], dtype=keys.dtype, device="meta")
        parts = torch.empty(plan.partial_rows, plan.sizes["H"], 2 * plan.sizes["V"] + 4, dtype=torch.uint8, device="meta")
        pairs = count_pairs(plan.starts, plan.key_starts, plan.sizes["T"], tokens, options.get("causal", False))
        call.multiplied("bf16", 2 * pairs * plan.sizes["H"] * (plan.sizes["D"] + plan.sizes["V"]), q, read, parts, parts, out)
        return out


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Queries attend to keys and values beside them, of the same requests."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **others: Any) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, **others)
        if self.backend == "auto":
            self.backend = "fa3" if torch.cuda.get_device_capability()[0] == 9 else "fa2"
        self._scratch: tuple[torch.Tensor, ...] = ()

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        q_data_type: Any = "float16",
        **others: Any,
    ) -> None:
        """Read the lengths from the device. CUTLASS's plan is made on the device, and the host waits for its longest request."""
        call = Call(self.kernel)
        call.require(not others, f"{sorted(others)} are not known to the rehearsal")
        call.check_all({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, "qo_indptr [B1] int32; kv_indptr [B1] int32")
        starts, key_starts = qo_indptr.to("cpu"), kv_indptr.to("cpu")
        self._set_plan(starts, key_starts, num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, q_data_type)
        if self.backend == "cutlass":
            call.require((head_dim_qk, head_dim_qk) in _CUTLASS_HEADS, f"heads of {head_dim_qk} numbers")
            kept = self._scratch[:1] or (torch.empty(_CUTLASS_BYTES, dtype=torch.uint8, device="cuda"),)
            self._scratch = (*kept, *(torch.empty(_CUTLASS_TILES, dtype=torch.int32, device="cuda") for _ in range(3)))
            qo_indptr.diff().max().item()

    begin_forward = plan

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._attend(q, k, v, options)


class _Paged(_Wrapper):
    """Queries attend to the cache `[slots, heads, d]`, in pages of one token."""

    _paged_kv_indices_buf: Any

    def _keep(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
        call = Call(self.kernel, B=len(last_page_len))
        call.require(page_size == 1, f"pages of {page_size} tokens are not known to the rehearsal")
        call.check_all({"n": last_page_len, "indptr": indptr, "indices": indices}, "n [B] int32; indptr [*] int32; indices [*] int32")
        call.require(len(indptr) == len(last_page_len) + 1, f"{len(indptr)} starts for {len(last_page_len)} requests")
        if self.is_cuda_graph_enabled:
            call.require(len(indices) <= len(self._paged_kv_indices_buf), f"{len(indices)} slots for {len(self._paged_kv_indices_buf)}")
            call.moved(indices, indices)  # into that buffer
        else:
            self._paged_kv_indices_buf = indices

    def forward(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> torch.Tensor:
        keys, values = paged_kv_cache
        return self._attend(q, keys, values, options)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        paged_kv_indices_buf: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, **others)
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._lengths = torch.empty(32768, dtype=torch.int32, device=float_workspace_buffer.device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        window_left: int = -1,
        **others: Any,
    ) -> None:
        call, known = Call(self.kernel), {"non_blocking": True, "causal": others.get("causal"), "token_pos_in_items_len": 0}
        unknown = [name for name, value in others.items() if value is not None and value != known.get(name)]
        call.require(not unknown and window_left < 0, f"{sorted(unknown)} and window {window_left} are not known to the rehearsal")
        starts, key_starts, _ = qo_indptr.to("cpu"), paged_kv_indptr.to("cpu"), paged_kv_last_page_len.to("cpu")
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._set_plan(starts, key_starts, num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type or q_data_type)

    begin_forward = plan


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        *,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, **others)
        Call(self.kernel).require(use_tensor_cores, "products without tensor cores are not known to the rehearsal")
        self._paged_kv_indices_buf, self._batch = paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any = "float16",
        data_type: Any = None,
        **others: Any,
    ) -> None:
        self._keep(indptr, indices, last_page_len, page_size)
        last_page_len.to("cpu")
        self._plan_tokens(indptr.to("cpu"), num_qo_heads, num_kv_heads, head_dim, q_data_type, data_type, others)

    begin_forward = plan

    def _plan_tokens(
        self, key_starts: torch.Tensor, heads: int, kv_heads: int, width: int, q_data_type: Any, data_type: Any, others: dict[str, Any]
    ) -> None:
        """Plan one query of each request."""
        call, requests = Call(self.kernel), len(key_starts) - 1
        unknown = [name for name, value in others.items() if value and name != "non_blocking"]
        call.require(not unknown, f"{sorted(unknown)} are not known to the rehearsal")
        if self.is_cuda_graph_enabled:
            call.require(requests == len(self._batch), f"{requests} requests in a graph of {len(self._batch)}")
        starts = torch.arange(requests + 1, dtype=torch.int32)
        self._set_plan(starts, key_starts, heads, kv_heads, width, q_data_type, data_type or q_data_type)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    q_data_type: Any = None,
    data_type: Any = None,
    global_override_indptr_cpu: Any = None,
    **others: Any,
) -> None:
    """Plan a replay. The host does not wait if it knows the lengths."""
    Call("flashinfer.fast_decode_plan").require(page_size == 1, f"pages of {page_size} tokens are not known to the rehearsal")
    key_starts = indptr.to("cpu") if global_override_indptr_cpu is None else global_override_indptr_cpu
    self._plan_tokens(key_starts, num_qo_heads, num_kv_heads, head_dim, q_data_type, data_type, others)


def count_bytes_per_graph(backend: Any) -> int:
    """Return the bytes that each captured batch size adds to those in graphs' shared memory: the tables of its wrapper."""
    captured = getattr(backend, "decode_cuda_graph_metadata", {}).values()
    wrappers = [each for found in captured if isinstance(found, list) for each in found if isinstance(each, _Wrapper)]
    return sum(each.tables.nbytes for each in wrappers) // max(len(captured), 1)


_WRAPPERS = (BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper)
STANDS_FOR: dict[str, Callable[..., Any]] = {"flashinfer.fast_decode_plan": fast_decode_plan} | {
    f"flashinfer.{wrapper.__name__}.{name}": getattr(wrapper, name) for wrapper in _WRAPPERS for name in ("__init__", "plan", "forward")
}


def install() -> None:
    """Replace the stubs, from which SGLang imports these names."""
    import flashinfer

    for each in (*_WRAPPERS, fast_decode_plan):
        setattr(flashinfer, each.__name__, each)
