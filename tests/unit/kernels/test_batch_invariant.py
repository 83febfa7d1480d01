"""A token's result does not depend on the other tokens of its batch, bit for bit, and it is correct."""

import pytest
import torch
import torch.nn.functional as F
from support.causal_attention import causal_attention
from support.kernel_tests import random
from support.largest_tensor import LargestTensor

from megatron_rl.kernels import batch_invariant

SHAPES = [(2, 2, 128, 128), (4, 2, 64, 64), (8, 1, 96, 64)]  # heads, key-value heads, width of q and k, width of v


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attention_inputs(heads: int, groups: int, width: int, values: int, batch: int = 3, tokens: int = 150):
    shapes = ((heads, width), (groups, width), (groups, values))
    return [random(batch, count, tokens, size, seed=seed) for seed, (count, size) in enumerate(shapes)]


@pytest.mark.parametrize("dtype, columns, rows", [
    *((torch.float32, *shape) for shape in [(256, 768), (512, 256), (1024, 384), (2048, 64), (256, 4)]),
    *((torch.bfloat16, *shape) for shape in [(480, 256), (512, 256), (1024, 768), (2048, 512), (4096, 1024)]),
])  # fmt: skip
def test_a_row_of_a_product_is_the_same_in_any_batch_and_order_of_columns(threads, dtype, columns, rows):
    x, weight = random(420, columns, seed=0).to(dtype), (0.05 * random(rows, columns, seed=1)).to(dtype)
    whole = batch_invariant.invariant_matmul(x, weight)
    bounds = {"rtol": 1e-5, "atol": 5e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), **bounds)
    for count in (1, 2, 3, 7, 15, 16, 17, 32, 33, 37, 64, 100, 140, 300):
        for part in (slice(count), slice(40, 40 + count), slice(-count, None)):
            assert torch.equal(batch_invariant.invariant_matmul(x[part], weight), whole[part])
    other = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    assert torch.equal(batch_invariant.invariant_matmul(x[None, :5], weight[other])[0], whole[:5, other])
    with batch_invariant.InvariantMatmuls():
        assert torch.equal(torch.matmul(x[:, None], weight.t())[:, 0], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [128, 256, 1024])
def test_a_product_with_few_columns_has_the_bits_of_one_with_many(threads, dtype, columns):
    """Tensor-parallel ranks hold equal parts of a few rows, such as the gates of their heads."""
    x, weight = random(100, columns, seed=0).to(dtype), (0.05 * random(64, columns, seed=1)).to(dtype)
    whole = batch_invariant.invariant_matmul(x, weight)
    for count in (1, 2, 3, 4, 8, 12, 16, 32):
        part = batch_invariant.invariant_matmul(x, weight[-count:])
        assert torch.equal(part, whole[:, -count:])
        assert torch.equal(batch_invariant.invariant_matmul(x[:1], weight[-count:]), part[:1])


@pytest.mark.parametrize("columns, rows", [(128, 256), (256, 768), (512, 128), (768, 384), (1536, 768), (4096, 256), (768, 32), (768, 4)])
def test_a_row_of_an_fp32_product_of_bf16_numbers_is_the_same_in_any_batch_and_order_of_columns(threads, columns, rows):
    x, weight = random(420, columns, seed=0).bfloat16().float(), random(rows, columns, seed=1).bfloat16().float()
    with batch_invariant.bf16_operands(rows):
        whole = batch_invariant.invariant_matmul(x, weight)
        torch.testing.assert_close(whole, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-3)
        for count in (1, 2, 15, 16, 17, 31, 33, 64, 100, 129, 300):
            assert torch.equal(batch_invariant.invariant_matmul(x[:count], weight), whole[:count])
            assert torch.equal(batch_invariant.invariant_matmul(x[-count:], weight), whole[-count:])
        other = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
        assert torch.equal(batch_invariant.invariant_matmul(x[:40], weight[other]), whole[:40, other])
        with batch_invariant.single_threaded():
            assert torch.equal(batch_invariant.invariant_matmul(x, weight), whole)
            with batch_invariant.all_threads():
                assert torch.get_num_threads() == threads
        half = rows // 2
        if half >= batch_invariant.MIN_AMX_COLUMNS:  # of two tensor-parallel ranks
            assert torch.equal(batch_invariant.invariant_matmul(x, weight[half:]), whole[:, half:])
    exact = torch.tensor([[1 + 2**-20]])
    assert torch.equal(exact @ torch.eye(1), exact), "the setting does not outlive the context"


@pytest.mark.parametrize("experts", [6, 8, 160])
def test_routing_scores_of_a_token_are_the_same_in_any_batch(threads, experts):
    x, weight = random(900, 256, seed=0), random(experts, 256, seed=1)
    with batch_invariant.InvariantRouting():
        scores = torch.mm(x, weight.t()).sigmoid()
        torch.testing.assert_close(scores.double(), (x.double() @ weight.double().t()).sigmoid(), rtol=1e-5, atol=1e-5)
        for count in (1, 2, 15, 17, 33, 899):
            assert torch.equal(torch.sigmoid(torch.mm(x[:count], weight.t())), scores[:count])
            assert torch.equal(torch.sigmoid(torch.mm(x[-count:], weight.t())), scores[-count:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns, rows", [(128, 512), (512, 128)])
def test_a_head_of_its_own_weight_is_the_same_in_any_batch_and_with_any_heads(threads, columns, rows, dtype):
    x, weight = random(70, 4, columns, seed=0).to(dtype), (0.05 * random(4, columns, rows, seed=1)).to(dtype).transpose(1, 2)
    whole = batch_invariant.multiply_heads(x, weight)
    torch.testing.assert_close(whole.double(), torch.einsum("thk,hnk->thn", x.double(), weight.double()), rtol=1e-2, atol=1e-2)
    for count in (1, 2, 17, 33):
        assert torch.equal(batch_invariant.multiply_heads(x[:count, None], weight)[:, 0], whole[:count])
    assert torch.equal(batch_invariant.multiply_heads(x[:, 2:], weight[2:].contiguous()), whole[:, 2:])
    learned = [tensor.float().requires_grad_() for tensor in (x, weight)]
    functions = batch_invariant.multiply_heads, lambda *args: torch.einsum("thk,hnk->thn", *args)
    gradients, wanted = (torch.autograd.grad(function(*learned).square().sum(), learned) for function in functions)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)


def test_norm_and_log_softmax_of_a_row_are_the_same_in_any_batch(threads):
    x, weight = random(200, 384, seed=0), random(384, seed=1)
    normed, logprobs = batch_invariant.rms_norm(x, weight, 1e-6), F.log_softmax(x, -1)
    for rows in (slice(0, 1), slice(7, 9), slice(50, 180)):
        assert torch.equal(batch_invariant.rms_norm(x[rows], weight, 1e-6), normed[rows])
        assert torch.equal(F.log_softmax(x[rows], -1), logprobs[rows])
    whole, copied = (batch_invariant.rms_norm(part, weight[128:], 1e-6) for part in (x[:, 128:], x[:, 128:].clone()))
    assert torch.equal(whole, copied)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 1, 576, 512)])  # the last is DeepSeek-V3's attention between latents
def test_a_prompt_and_decoded_tokens_attend_as_in_one_pass(threads, shape):
    query, key, value = attention_inputs(*shape)
    scale = shape[2] ** -0.5
    whole = causal_attention(query, key, value)
    for length in (1, 2, 31, 32, 33, 64, 65, 150):
        prompt = causal_attention(query[1:2, :, :length], key[1:2, :, :length], value[1:2, :, :length])
        assert torch.equal(prompt[0], whole[1, :, :length])
        last = torch.tensor([[length - 1], [max(length - 30, 0)]])  # of a batch of two, the second shorter
        now = torch.stack([query[sequence, :, row] for sequence, row in enumerate(last.flatten().tolist())]).unsqueeze(2)
        decoded = batch_invariant.attention(now, key[:2, :, :length], value[:2, :, :length], last, scale)
        for sequence, row in enumerate(last.flatten().tolist()):
            assert torch.equal(decoded[sequence, :, 0], whole[sequence, :, row])


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tensor_has_the_scores_of_all_tokens(shape):
    inputs = [x.requires_grad_() for x in attention_inputs(*shape, batch=1, tokens=1024)]
    with LargestTensor() as largest:
        causal_attention(*inputs).sum().backward()
    assert largest.numel <= shape[0] * 1024 * 128, "a few queries' scores, or an input"


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradient_match_torch(shape, monkeypatch):
    inputs = [x.requires_grad_() for x in attention_inputs(*shape)]
    wanted = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    output = causal_attention(*inputs)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    found, expected = (torch.autograd.grad(each, inputs, random(*wanted.shape, seed=9)) for each in (output, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(batch_invariant, "MAX_SCORES", 3 * shape[0] * 160 * 7)  # seven queries at a time
    assert torch.equal(causal_attention(*inputs), output)
    narrow = [x.detach().bfloat16() for x in inputs]  # computed in FP32 and rounded once
    wide = causal_attention(*(x.float() for x in narrow))
    assert torch.equal(causal_attention(*narrow), wide.bfloat16())
