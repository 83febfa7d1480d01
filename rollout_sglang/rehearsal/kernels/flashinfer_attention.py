"""FlashInfer's attention as SGLang calls it for `precision.kv = "e4m3_per_layer"`: a wrapper plans on the host what the kernels of a batch
do, and runs them for each layer. The checks of `flashinfer/{decode,prefill}.py` and of `csrc/batch_prefill.cu`, of the back ends fa2 and
fa3, whose kernels read keys and values in E4M3 and multiply in the queries' dtype.

What a wrapper keeps on the host, and what splits of a long context add up in the workspace, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.rehearsal.device import value_of
from rollout_sglang.rehearsal.kernels.match import HALF, Call

_WIDTHS = (64, 128, 256)
_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads for one of keys, of the decoding kernels without tensor cores."""
_INT_WORKSPACE, _LENGTHS = 8 << 20, 32768
_LARGEST_BLOCK = 1024
"""Threads."""


class _Wrapper:
    """What a plan leaves to the layers' calls."""

    kernel = ""
    tokens: int | None = None
    """Queries of all requests; None where nobody knows them."""
    keys: torch.Tensor | None = None
    """Of each request, on the host."""
    new: torch.Tensor | int = 1
    """Queries of each request, on the host."""
    types: tuple[torch.dtype, torch.dtype]
    """Of queries, and of keys and values."""
    heads: tuple[int, int]

    def _start(self, workspace: Any, kv_layout: str, backend: str, graph: bool, **buffers: Any) -> None:
        call = Call(self.kernel)
        call.check("float_workspace_buffer", workspace, "*", torch.uint8)
        call.require(workspace.data_ptr() % 16 == 0, "its workspace does not begin at a multiple of 16 bytes")
        call.require(kv_layout == "NHD" and backend in ("auto", "fa2"), f"layout {kv_layout} on {backend} is not known to the rehearsal")
        self._int_workspace = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=workspace.device)
        self.is_cuda_graph_enabled, self._fixed, self.device = graph, None, workspace.device
        if not graph:
            return
        for name, buffer in buffers.items():
            call.require(isinstance(buffer, torch.Tensor), f"{name} is {type(buffer).__name__}, not a tensor, with CUDA graphs")
            call.check(name, buffer, "*", torch.int32)
        self._fixed = len(buffers["paged_kv_last_page_len"])
        fits = len(buffers["paged_kv_indptr"]) == self._fixed + 1
        call.require(fits, f"buffers of {len(buffers['paged_kv_indptr'])} starts and {self._fixed} lengths of last pages")
        self._paged_kv_indices_buf = buffers["paged_kv_indices"]

    def _plan(self, starts: dict[str, torch.Tensor], heads: tuple[int, int], width: int, q: torch.dtype, kv: torch.dtype) -> Call:
        call = Call(self.kernel)
        for name, tensor in starts.items():
            call.check(name, tensor, "S", torch.int32)
        call.require(heads[0] % heads[1] == 0, f"{heads[0]} query heads, {heads[1]} of keys")
        call.require(width in _WIDTHS, f"heads of {width} numbers")
        call.require(q in HALF and kv in (q, torch.float8_e4m3fn), f"queries in {q}, keys in {kv}")
        self.types, self.heads = (q, kv), heads
        return call

    def _check_pages(self, call: Call, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int, option: Any) -> None:
        call.require(page_size == 1 and option is None, f"pages of {page_size} tokens, or masks, are not known to the rehearsal")
        call.check("indices", indices, "*", torch.int32)
        batch = call.sizes["S"] - 1
        call.check("last_page_len", last_page_len, str(batch), torch.int32)
        if self._fixed is not None:
            call.require(batch == self._fixed, f"{batch} requests in a CUDA graph of {self._fixed}")
            call.require(len(indices) <= len(self._paged_kv_indices_buf), f"{len(indices)} pages in a buffer of fewer")

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paged: bool, causal: bool, scale: Any = None) -> Any:
        """Return values and their log-sum-exp. `k`, `v`: of new tokens, or of all slots of a cache."""
        call = Call(self.kernel)
        call.require(hasattr(self, "types"), "it runs without a plan")
        call.check("q", q, "T H D", self.types[0], "* * 1")
        call.check("k", k, "P K D", self.types[1], "* * 1")
        call.check("v", v, "P K D", self.types[1], "* * 1")
        call.require((call.sizes["H"], call.sizes["K"]) == self.heads, f"{call.sizes} of a plan for {self.heads} heads")
        call.require(self.tokens in (None, q.shape[0]), f"{q.shape[0]} queries of a plan for {self.tokens}")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        logsumexp = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        pairs, read = q.shape[0] ** 2, [k, v]
        if self.keys is not None:
            pairs = int((self.keys * self.new).sum())
            if causal:
                pairs -= int((self.new * (self.new - 1)).sum()) // 2  # type: ignore[union-attr]
            if paged:
                read = [torch.empty(2 * int(self.keys.sum()) * self.heads[1] * call.sizes["D"], dtype=k.dtype, device="meta")]
        call.multiplied("bf16", 4 * pairs * self.heads[0] * call.sizes["D"], q, out, *read)
        if scale is not None and scale != 1.0:
            out *= scale
        return out, logsumexp


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    kernel = "flashinfer.BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
    ) -> None:
        buffers = {"paged_kv_indptr": paged_kv_indptr_buffer, "paged_kv_indices": paged_kv_indices_buffer}
        buffers["paged_kv_last_page_len"] = paged_kv_last_page_len_buffer
        self._start(float_workspace_buffer, kv_layout, backend, use_cuda_graph, **buffers)
        self._use_tensor_cores = use_tensor_cores

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
        q_data_type: Any = None,
        data_type: Any = None,
        fixed_split_size: Any = None,
        **_: Any,
    ) -> None:
        """The host waits for starts and lengths."""
        self._note(indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, q_data_type, data_type)
        Call(self.kernel).require(fixed_split_size is None or self._use_tensor_cores, "a fixed split needs tensor cores")
        self.keys = indptr.to("cpu").diff()
        last_page_len.to("cpu")

    begin_forward = plan

    def _note(self, indptr: Any, indices: Any, last: Any, heads: tuple[int, int], width: int, page: int, q: Any, kv: Any) -> None:
        q = q or kv or torch.float16
        call = self._plan({"indptr": indptr}, heads, width, q, kv or q)
        self._check_pages(call, indices, last, page, None)
        group = heads[0] // heads[1]
        call.require(self._use_tensor_cores or group in _GROUPS, f"{group} query heads for one of keys, without tensor cores")
        self.tokens = len(last)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        v_scale: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = self._attend(q, *paged_kv_cache, paged=True, causal=False, scale=v_scale)[0]
        return out


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
    **_: Any,
) -> None:
    """A plan that waits for nothing where the host has the starts."""
    self._note(indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, q_data_type, data_type)
    self.keys = (indptr.cpu() if global_override_indptr_cpu is None else global_override_indptr_cpu).diff()


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    kernel = "flashinfer.BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
    ) -> None:
        buffers = {"qo_indptr": qo_indptr_buf, "paged_kv_indptr": paged_kv_indptr_buf, "paged_kv_indices": paged_kv_indices_buf}
        buffers["paged_kv_last_page_len"] = paged_kv_last_page_len_buf
        self._start(float_workspace_buffer, kv_layout, backend, use_cuda_graph, **buffers)
        self._custom_mask_buf = custom_mask_buf
        self._kv_lens_buffer = torch.empty(_LENGTHS, dtype=torch.int32, device=self.device)

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
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        custom_mask: Any = None,
        **_: Any,
    ) -> None:
        """The host waits for starts and lengths."""
        starts = {"qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr}
        call = self._plan(starts, (num_qo_heads, num_kv_heads), head_dim_qk, q_data_type, kv_data_type or q_data_type)
        self._check_pages(call, paged_kv_indices, paged_kv_last_page_len, page_size, custom_mask)
        _note_queries(self, qo_indptr)
        self.keys = paged_kv_indptr.to("cpu").diff()
        paged_kv_last_page_len.to("cpu")

    begin_forward = plan

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        *,
        v_scale: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._attend(q, *paged_kv_cache, paged=True, causal=causal, scale=v_scale)
        return found

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        return self.forward_return_lse(q, paged_kv_cache, causal, **options)[0]


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    kernel = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, *, backend: str = "auto"
    ) -> None:
        Call(self.kernel).require(not use_cuda_graph, "a CUDA graph is not known to the rehearsal")
        self._start(float_workspace_buffer, kv_layout, backend, False)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
        custom_mask: Any = None,
        **_: Any,
    ) -> None:
        """The host waits for starts."""
        starts = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
        call = self._plan(starts, (num_qo_heads, num_kv_heads), head_dim_qk, q_data_type, kv_data_type or q_data_type)
        call.require(custom_mask is None, "a mask is not known to the rehearsal")
        _note_queries(self, qo_indptr)
        self.keys = kv_indptr.to("cpu").diff()

    begin_forward = plan

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._attend(q, k, v, paged=False, causal=causal)
        return found

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, **_: Any) -> torch.Tensor:
        return self.forward_return_lse(q, k, v, causal)[0]


def _note_queries(wrapper: _Wrapper, starts: torch.Tensor) -> None:
    known, host = value_of(starts), starts.to("cpu")
    wrapper.new, wrapper.tokens = host.diff(), None if known is None else int(host[-1])


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """include/flashinfer/attention/cascade.cuh: a block has all heads of a token."""
    call = Call("flashinfer.merge_state")
    for name, values, sums in (("a", v_a, s_a), ("b", v_b, s_b)):
        call.check(f"v_{name}", values, "T H D", HALF)
        call.check(f"s_{name}", sums, "T H", torch.float32)
    width = call.sizes["D"]
    threads = call.sizes["H"] * width // max(16 // v_a.itemsize, width // 32)
    call.require(threads <= _LARGEST_BLOCK, f"blocks of {threads} threads")
    merged, summed = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (v_a, s_a))
    call.moved(v_a, s_a, v_b, s_b, merged, summed)
    return merged, summed


WRAPPERS = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper)
STANDS_FOR: dict[str, Callable[..., Any]] = {
    "flashinfer.fast_decode_plan": fast_decode_plan,
    "flashinfer.cascade.merge_state": merge_state,
    **{
        f"flashinfer.{wrapper.__name__}.{name}": getattr(wrapper, name)
        for wrapper in WRAPPERS
        for name in ("__init__", "plan", "forward", "forward_return_lse")
        if hasattr(wrapper, name)
    },
}
