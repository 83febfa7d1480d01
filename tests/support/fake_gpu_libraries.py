"""Stand-ins for DeepGEMM and Transformer Engine that check every shape, dtype and stride that the real libraries check, then multiply
slowly.

`install` puts them, and references of the Triton kernels, where the back ends import the real ones. They test what is passed to the
kernels. The kernels themselves are tested by tests/gpu.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.experts.reference import weigh
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.precision.fp8 import quantize_1x128
from megatron_rl.precision.ue8m0 import pack_scales
from support.fp8_reference import quantize_128x1, unpack_scales
from support.tree_sums import dequantize

_TENSOR, _EXTENSION = "transformer_engine.pytorch.tensor", "transformer_engine_torch"


def install(monkeypatch):
    def module(name, **members):
        fake = ModuleType(name)
        vars(fake).update(members)
        monkeypatch.setitem(sys.modules, name, fake)

    module("megatron_rl.kernels.quantize.triton", quantize_activation=quantize_activation, quantize_into=quantize_into)
    module("megatron_rl.kernels.swiglu.triton", quantize_swiglu=quantize_swiglu, multiply_and_quantize=multiply_and_quantize)
    module("megatron_rl.kernels.experts.triton", pack=pack, quantize_weighed=quantize_weighed, spread_packed=spread_packed)
    module("megatron_rl.kernels.norm.triton", quantize_norm=quantize_norm)
    module("megatron_rl.kernels.sums.triton", multiply_nodes=multiply_nodes)
    module(
        "deep_gemm",
        fp8_gemm_nt=fp8_gemm_nt,
        bf16_gemm_nt=bf16_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
        k_grouped_fp8_gemm_nt_contiguous=k_grouped_fp8_gemm_nt_contiguous,
        k_grouped_fp8_gemm_tn_contiguous=k_grouped_fp8_gemm_tn_contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: 128,
    )
    packages = ("transformer_engine", "transformer_engine.pytorch", _TENSOR, f"{_TENSOR}.storage")
    members = {
        **{name: {"__path__": []} for name in packages},
        f"{_TENSOR}.float8_blockwise_tensor": {"Float8BlockQuantizer": Quantizer},
        f"{_TENSOR}.storage.float8_blockwise_tensor_storage": {"Float8BlockwiseQTensorStorage": Quantized},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
    }
    for name in (*members, _EXTENSION):
        module(name)  # what is imported in its place goes with it after the test
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [TransformerEngineFinder(members), *sys.meta_path])


class TransformerEngineFinder:
    """A finder of the stand-in's modules. As with the real package, `transformer_engine_torch` cannot be found: importing
    `transformer_engine.pytorch` loads the extension from its own folder and puts it into sys.modules."""

    def __init__(self, members):
        self._members = members

    def find_spec(self, name, *_):
        if name == _EXTENSION:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        loader = self
        return ModuleSpec(name, loader, is_package="__path__" in self._members[name]) if name in self._members else None

    def create_module(self, spec): ...

    def exec_module(self, module):
        vars(module).update(self._members[module.__name__])
        if module.__name__ == "transformer_engine.pytorch":
            sys.modules[_EXTENSION] = extension = ModuleType(_EXTENSION)
            extension.DType = SimpleNamespace(kFloat8E4M3="e4m3")


def quantize_activation(x, scale_format, *, rows, columns, groups=None, by_token=False):
    """Return the kernel's results and layouts, from the reference quantizer."""
    x = x if groups is None else spread(x, groups)
    return _quantize_rows(x, scale_format, rows=rows, columns=columns, groups=groups, by_token=by_token)


def _quantize_rows(x, scale_format, *, rows, columns, groups, by_token=False):
    tokens, width = x.shape
    of_rows, of_columns = None, None
    if rows:
        data, scale = quantize_1x128(x, scale_format)
        memory = torch.zeros(width // 128, -(-tokens // 4) * 4)
        memory[:, :tokens] = scale.t()
        of_rows = data, memory.t()[:tokens]
    if columns:
        padded = torch.cat([x, x.new_zeros(-tokens % 128, width)])
        data, scale = quantize_128x1(padded, scale_format)
        parts = [part.t().contiguous() for part in torch.split(data.view(torch.uint8), groups.lengths if groups else [len(padded)])]
        flat = torch.cat([part.flatten() for part in parts])
        of_columns = (flat if groups else parts[0]).view(torch.float8_e4m3fn), torch.empty(scale.shape).copy_(scale).t()
        if by_token:
            of_columns = data, of_columns[1]
    return of_rows, of_columns


def spread(x, groups):
    """Spread `[n, h]` to `[T, h]`; padding is zero."""
    return x[groups.sources.long().clamp(min=0)].masked_fill((groups.sources < 0).unsqueeze(1), 0)


def quantize_weighed(gradient, outputs, weights, groups, scale_format, *, columns, by_token=False):
    """Return the kernel's results and layouts, from separate operators."""
    options = {"columns": columns, "groups": groups, "by_token": by_token}
    of_rows, of_columns = quantize_activation(weigh(gradient, weights), scale_format, rows=True, **options)
    return of_rows, of_columns, (gradient.float() * outputs[groups.places]).sum(-1)


def pack(x, order, scale_format, rows=None):
    """Rows without a token, which nothing may read, are NaN and -NaN with the scale NaN."""
    data, scale = quantize_1x128(x, scale_format)
    packed = torch.cat([data.view(torch.int32), scale.contiguous().view(torch.int32)], 1)
    result = packed.new_full((rows or order.numel(), packed.shape[1]), -1)
    return result.index_copy_(0, order.flatten(), packed.repeat_interleave(order.shape[1], 0))


def spread_packed(packed, groups):
    width = packed.shape[1] * 32 // 33
    scale = spread(packed[:, width:], groups).t().contiguous().t()
    return spread(packed[:, :width], groups).view(torch.float8_e4m3fn), scale.view(torch.float32)


def quantize_swiglu(gate_up, gradient, scale_format, *, rows, columns, groups=None, by_token=False, row_multiple=1, column_multiple=128):
    """Return the kernel's results and layouts, from the references."""
    result = swiglu.multiply(gate_up) if gradient is None else swiglu.differentiate(gate_up, gradient)
    return _quantize_padded(result, scale_format, rows, columns, groups, row_multiple, column_multiple, by_token)


def multiply_and_quantize(x, scale_format):
    return swiglu.multiply(x), quantize_activation(swiglu.multiply(x), scale_format, rows=True, columns=False)[0]


def quantize_norm(x, residual, weight, eps, scale_format, *, columns, result=None, row_multiple=1, column_multiple=128):
    """Return the kernel's results and layouts, from the CPU operators."""
    total = x if residual is None else x + residual
    normed, statistic = batch_invariant.rms_norm(total, weight, eps), torch.rsqrt(total.float().square().mean(-1) + eps)
    if result is not None:
        result.copy_(normed)
    return total, statistic, *_quantize_padded(normed.flatten(0, -2), scale_format, True, columns, None, row_multiple, column_multiple)


def _quantize_padded(result, scale_format, rows, columns, groups, row_multiple, column_multiple, by_token=False):
    tokens = len(result)
    padded = torch.cat([result, result.new_zeros(-tokens % row_multiple, result.shape[1])])
    of_rows, _ = quantize_activation(padded, scale_format, rows=rows, columns=False)
    _, of_columns = _quantize_rows(result, scale_format, rows=False, columns=columns, groups=groups, by_token=by_token)
    if of_columns is not None and groups is None:
        data = of_columns[0].view(torch.uint8)[:, : tokens + -tokens % column_multiple].contiguous()
        of_columns = data.view(torch.float8_e4m3fn), of_columns[1]
    return of_rows, of_columns


def quantize_into(x, data, scale, scale_format):
    """Write the kernel's bytes and scales into the caller's tensors."""
    bytes_, scales = quantize_1x128(x, scale_format)
    data.copy_(bytes_)
    scale.copy_(pack_scales(scales, len(x)) if scale.dtype == torch.int32 else scales)


def multiply_nodes(x, weight, x_scale=None, weight_scale=None):
    """Return the kernel's sums as one node."""
    assert x.dtype == weight.dtype and weight.is_contiguous()
    if x_scale is not None and weight_scale is not None:
        assert x.dtype == torch.float8_e4m3fn and x_scale.shape[0] == len(x) and weight_scale.shape[0] == -(-len(weight) // 128)
        assert x_scale.shape[1] == weight_scale.shape[1] == x.shape[1] // 128
        x, weight = dequantize((x, x_scale), (weight, weight_scale))
    return tree.multiply(x, weight).unsqueeze(0)


def _values(operand, recipe):
    """Return float32 `[mn, k]` of data `[mn, k]` with scales `[mn / recipe[0], k / 128]`, after DeepGEMM's checks of both."""
    data, scale = operand
    mn, k = data.shape
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and data.stride(1) == 1 and data.stride(0) % 16 == 0
    assert k % 16 == 0 and data.data_ptr() % 16 == 0, "TMA reads rows that are aligned to 16 bytes"
    assert scale.shape == (-(-mn // recipe[0]), -(-k // recipe[1])), (data.shape, scale.shape)
    if recipe[0] == 1:
        assert scale.data_ptr() % 16 == 0 and scale.stride() == (1, -(-mn // 4) * 4), "not aligned for TMA: a copy would be made"
    else:
        assert scale.is_contiguous()
    spread = scale.repeat_interleave(recipe[0], 0)[:mn].repeat_interleave(recipe[1], 1)[:, :k]
    return data.float() * spread


def fp8_gemm_nt(a, b, d, c=None, recipe=None):
    product = _values(a, (recipe[0], recipe[2])) @ _values(b, (recipe[1], recipe[2])).t()
    assert d.shape == product.shape and d.stride(-1) == 1 and d.shape[1] % 8 == 0 and d.data_ptr() % 16 == 0, "TMA writes whole atoms"
    if recipe == (1, 128, 128):
        assert c is None and d.dtype == torch.bfloat16
        d.copy_(product)
    else:
        assert recipe == (1, 1, 128) and c.data_ptr() == d.data_ptr() and d.dtype == torch.float32 and d.data_ptr() % 16 == 0
        d.add_(product)


def bf16_gemm_nt(a, b, d):
    for x in (a, b, d):
        assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.data_ptr() % 16 == 0
        assert len(x) == 1 or x.stride(0) % 8 == 0, "TMA needs strides of whole 16 bytes"
    d.copy_(a.float() @ b.float().t())


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, rows_of, recipe=None):
    assert rows_of.dtype == torch.int32 and len(rows_of) == len(a[0]) and b[0].is_contiguous() and b[1].is_contiguous()
    first = rows_of.view(-1, 128)
    assert (first == first[:, :1]).all(), "a tile of 128 rows holds two experts"
    for expert in range(len(b[0])):
        rows = rows_of == expert
        values = _values(a, (1, 128))[rows] @ _values((b[0][expert], b[1][expert]), (128, 128)).t()
        d[rows] = values.to(d.dtype)


def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c, recipe):
    groups, m, n = d.shape
    assert recipe == (1, 1, 128) and c.data_ptr() == d.data_ptr() and d.is_contiguous() and grouped_layout.dtype == torch.int32
    assert len(ks) == groups and a[0].shape == (sum(ks) * m,) and b[0].shape == (sum(ks) * n,) and not any(k % 128 for k in ks)
    before = 0
    for group, k in enumerate(ks):
        left, right = (
            data[before * rows : (before + k) * rows].view(rows, k).float()
            * scale[:, before // 128 : (before + k) // 128].repeat_interleave(128, 1)
            for (data, scale), rows in ((a, m), (b, n))
        )
        d[group] += left @ right.t()
        before += k


def k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks, grouped_layout, c, recipe):
    """Multiply as on sm_100, where scales are packed first: an int32 has those of four neighboring groups of 128 tokens of one expert."""
    groups, m, n = d.shape
    assert recipe == (1, 1, 128) and c.data_ptr() == d.data_ptr() and d.is_contiguous() and d.dtype == torch.float32
    assert grouped_layout.tolist() == ks and grouped_layout.dtype == torch.int32 and len(ks) == groups <= 128
    for (data, scale), width in ((a, m), (b, n)):
        assert data.shape == (sum(ks), width) and data.is_contiguous() and data.dtype == torch.float8_e4m3fn and width % 4 == 0
        assert scale.shape == (sum(ks) // 128, width) and scale.is_contiguous() and scale.dtype == torch.float32
    before = 0
    for group, k in ((group, k) for group, k in enumerate(ks) if k):
        tokens, tiles = slice(before, before + k), slice(before // 128, (before + k) // 128)
        left, right = (
            data[tokens].float().t().contiguous()
            * unpack_scales(pack_scales(scale[tiles].t().contiguous(), scale.shape[1]), k // 128).repeat_interleave(128, 1)
            for data, scale in (a, b)
        )
        d[group] += left @ right.t()
        before += k


class Quantized(SimpleNamespace):
    """A stand-in for Float8BlockwiseQTensorStorage."""

    def get_metadata(self):
        return vars(self)

    def values(self, side):
        """Return one side's matrix as float32, as it is stored: the contraction is innermost."""
        data, scale = vars(self)[f"{side}_data"], vars(self)[f"{side}_scale_inv"]
        mn, k = data.shape
        assert data.dtype == torch.uint8 and data.is_contiguous() and scale.is_contiguous() and k % 16 == 0 and mn % 8 == 0
        if self.is_2D_scaled:
            assert scale.shape == (-(-mn // 128), -(-k // 128 // 4) * 4)
            spread = scale.repeat_interleave(128, 0)[:mn].repeat_interleave(128, 1)[:, :k]
        else:
            assert scale.shape == (-(-k // 128), -(-mn // 4) * 4)
            spread = scale.t()[:mn].repeat_interleave(128, 1)[:, :k]
        return data.view(torch.float8_e4m3fn).float() * spread


class Quantizer:
    """A stand-in for Float8BlockQuantizer."""

    def __init__(self, dtype, *, rowwise, columnwise, amax_epsilon, force_pow_2_scales, block_scaling_dim):
        assert amax_epsilon == 1e-10 and dtype == "e4m3"
        self.dtype, self.block_scaling_dim, self.scale_format = dtype, block_scaling_dim, "pow2" if force_pow_2_scales else "fp32"
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def set_usage(self, *, rowwise, columnwise):
        self.rowwise, self.columnwise = rowwise, columnwise

    def __call__(self, x):
        assert self.block_scaling_dim == 1 and x.is_contiguous()
        sides = dict.fromkeys(("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"))
        pad = lambda scale: torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()  # noqa: E731
        if self.rowwise:
            data, scale = quantize_1x128(x, self.scale_format)
            sides |= {"rowwise_data": data.view(torch.uint8), "rowwise_scale_inv": pad(scale.t())}
        if self.columnwise:
            data, scale = quantize_128x1(x, self.scale_format)
            sides |= {"columnwise_data": data.view(torch.uint8).t().contiguous(), "columnwise_scale_inv": pad(scale)}
        return Quantized(**sides, fp8_dtype=self.dtype, quantizer=self, is_2D_scaled=False)


def general_gemm(A, B, out_dtype, layout, use_split_accumulator, out=None, accumulate=False, grad=False):
    assert use_split_accumulator and not (A.is_2D_scaled and B.is_2D_scaled) and (out is not None or not accumulate)
    a, b = A.values("rowwise" if layout[0] == "T" else "columnwise"), B.values("columnwise" if layout[1] == "T" else "rowwise")
    product = (b @ a.t()).to(out_dtype)
    if out is None:
        return product, None, None, None
    assert out.is_contiguous() and out.dtype == out_dtype and out.shape == product.shape
    return (out.add_(product) if accumulate else out.copy_(product)), None, None, None
