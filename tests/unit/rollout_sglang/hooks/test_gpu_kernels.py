"""SGLang's own modules with the hooks of an engine on a GPU, on CPU tensors, for which the kernels' references run. Rehearsals
(tests/rehearsal) run the hooks in whole passes of SGLang's models."""

from types import SimpleNamespace

import pytest
import torch
from support.kernel_tests import random
from support.processes import call_in_fresh_process

from megatron_rl.kernels.heads import Heads
from megatron_rl.kernels.heads.reference import rotate_heads
from megatron_rl.kernels.rope.reference import Rotation
from megatron_rl.mcore.passes import logprobs
from megatron_rl.mcore.passes.logprobs import Targets, token_logprobs
from rollout_sglang.hooks import gpu_kernels, rank_kernels
from rollout_sglang.platform import stub_modules

VOCABULARY = 48


def refuse(*_, **__):
    raise AssertionError("SGLang's own kernel is called")


def norms_round_the_sum_first():
    from sglang.srt.layers.layernorm import RMSNorm

    norm, x, residual = RMSNorm(64).bfloat16(), *(random(5, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    norm.weight.data.copy_(random(64, seed=2))
    normed, total = gpu_kernels.apply_rms_norm(refuse, norm, x, residual)
    wanted = torch.nn.functional.rms_norm((x + residual).float(), (64,), norm.weight.float(), norm.variance_epsilon)
    assert torch.equal(total, x + residual) and torch.equal(normed, wanted.bfloat16())
    assert torch.equal(gpu_kernels.apply_rms_norm(refuse, norm, total), normed), "the norm of the sum"
    for other in (RMSNorm(64, cast_x_before_out_mul=True), RMSNorm(64, fp32_residual=True), RMSNorm(64, var_hidden_size=32)):
        assert gpu_kernels.apply_rms_norm(lambda *_: "SGLang's", other, x) == "SGLang's"
    assert gpu_kernels.apply_rms_norm(lambda *_: "SGLang's", norm, x.float(), residual) == "SGLang's"


def queries_and_keys_are_the_trainers(interleaved):
    """In two steps, from SGLang's tables, against the trainer's one pass over groups."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    embedding = RotaryEmbedding(32, 32, 64, 10000, not interleaved, torch.float32)
    norms = [RMSNorm(32, eps=1e-6) for _ in range(2)]
    for number, norm in enumerate(norms):
        norm.weight.data.copy_(random(32, seed=number))
    groups, queries, positions = 2, 3, torch.tensor([0, 5, 63, 1])
    mixed = random(4, groups * (queries + 2) * 32, seed=3)
    by_group = mixed.view(4, groups, queries + 2, 32)
    row = torch.cat([part.reshape(4, -1) for part in by_group.split([queries, 1, 1], 2)], 1)
    q, k, _ = row.split([groups * queries * 32, groups * 32, groups * 32], 1)
    found = gpu_kernels.rotate(refuse, embedding, positions, *gpu_kernels.apply_head_norms(refuse, q, k, *norms, 32))
    attention = SimpleNamespace(rotary_emb=embedding, head_dim=32, q_norm=norms[0], k_norm=norms[1])
    vars(attention).update(q_size=q.shape[1], kv_size=k.shape[1], qkv_proj=lambda hidden: (hidden, None))
    for at_once in (
        gpu_kernels.prepare_heads(refuse, attention, positions, row),
        gpu_kernels.prepare_expert_heads(attention, row, positions, 0),
    ):
        assert all(torch.equal(a, b) for a, b in zip(at_once, (*found, row[:, -k.shape[1] :]), strict=True))
    attention.head_dim = 64
    assert gpu_kernels.prepare_heads(lambda *_: "SGLang's", attention, positions, row) == "SGLang's"
    assert attention._used_fused_qk_norm_rope_last_call, "the attention writes the cache"
    angles = torch.outer(torch.arange(64.0), embedding._compute_inv_freq(10000))
    weights = norms[0].weight.data, norms[1].weight.data
    wanted = rotate_heads(mixed, Heads(groups, queries, Rotation.from_angles(angles, positions, interleaved), 1e-6), weights)
    assert all(torch.equal(a, b.flatten(1)) for a, b in zip(found, wanted, strict=True))
    theirs = (norm.forward_native(x.unflatten(1, (-1, 32))).flatten(1) for norm, x in zip(norms, (q, k), strict=True))
    theirs = embedding.forward_native(positions, *theirs)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, theirs, strict=True))


def heads_are_rotated_in_part_and_tables_grow():
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    embedding, positions = RotaryEmbedding(32, 16, 64, 10000, True, torch.float32), torch.tensor([3, 70])
    q, k = random(2, 96, seed=0), random(2, 32, seed=1)
    short = gpu_kernels.rotate(refuse, embedding, positions.clamp(max=5), q, k)
    embedding._ensure_cos_sin_cache_length(80)
    for found, wanted in (
        (gpu_kernels.rotate(refuse, embedding, positions, q, k), embedding.forward_native(positions, q, k)),
        (short, embedding.forward_native(positions.clamp(max=5), q, k)),
    ):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert gpu_kernels.rotate(lambda *_: "SGLang's", embedding, positions, q, k, None, "a cache") == "SGLang's"


def compare_tables():
    """Megatron's angles against SGLang's table, both on this device."""
    stub_modules.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding as Megatrons
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for dim, base in ((64, 10000.0), (128, 1000000.0), (128, 5000000.0)):
        angles = Megatrons(dim, 1.0, rotary_base=base, use_cpu_initialization=True).get_freqs_non_repeated(512)
        embedding = RotaryEmbedding(dim, dim, 512, base, True, torch.float32)
        table = torch.cat(Rotation.from_angles(angles, None, False)[:2], -1)
        assert torch.equal(table, embedding.cos_sin_cache) and torch.equal(table, rank_kernels.make_cos_sin(embedding))


def swiglu_is_rounded_once():
    from sglang.srt.layers.activation import SiluAndMul

    x = random(3, 64, seed=0, dtype=torch.bfloat16)
    gate, up = x.float().chunk(2, -1)
    found = gpu_kernels.multiply_by_gate(SiluAndMul(), x)
    assert torch.allclose(found.float(), torch.nn.functional.silu(gate) * up, rtol=2**-8) and found.dtype == torch.bfloat16


def check_sglangs_modules():
    """SGLang is imported with stubs of packages that a CPU's environment may lack."""
    stub_modules.install()
    with torch.no_grad():
        norms_round_the_sum_first()
        for interleaved in (False, True):
            queries_and_keys_are_the_trainers(interleaved)
        heads_are_rotated_in_part_and_tables_grow()
        swiglu_is_rounded_once()


def test_modules_of_sglang_compute_what_the_trainer_computes():
    call_in_fresh_process(check_sglangs_modules, OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1")


def test_the_trainers_rotary_tables_are_the_engines():
    call_in_fresh_process(compare_tables, OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_sampled_tokens_are_the_trainers(monkeypatch, temperature):
    """Over all tokens, and for the second and third request over those that a filter kept. The trainer has the same logits."""
    monkeypatch.setattr(logprobs, "_runs_kernels", lambda _: True)
    for name, value in (("world_size", 1), ("rank", 0)):
        monkeypatch.setattr(logprobs.parallel_state, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    hidden, weight = random(3, 16, seed=0, dtype=torch.bfloat16), random(VOCABULARY, 16, seed=1, dtype=torch.bfloat16)
    tokens, rows = torch.tensor([7, 0, 47], dtype=torch.int32), torch.tensor([1, 2])
    kept, lengths = torch.tensor([[0, 9, 3], [47, 1, 2]], dtype=torch.int32), torch.tensor([3, 1])
    mask = SimpleNamespace(token_ids=kept, lengths=lengths, selected_logprobs=None)
    output = SimpleNamespace(next_token_logits=(hidden @ weight.t()).float(), next_token_logprobs=None, sampling_mask_output=None)
    sampling = SimpleNamespace(temperatures=torch.full((3, 1), temperature), sampling_mask_batch_indices=rows)

    def sglangs(self, output, *_, **__):
        output.next_token_logits.div_(sampling.temperatures).softmax(-1)
        output.next_token_logits.zero_()
        output.sampling_mask_output = mask
        return tokens

    assert gpu_kernels.sample(sglangs, None, output, sampling, True, [], [], None) is tokens
    allowed = torch.cat([torch.full((1, 3), -1), kept.masked_fill(torch.arange(3) >= lengths[:, None], -1)]).int()
    for found, targets in (
        (output.next_token_logprobs, Targets(tokens.long(), temperature)),
        (torch.cat([output.next_token_logprobs[:1], mask.selected_logprobs]), Targets(tokens.long(), temperature, allowed)),
    ):
        assert torch.equal(found, token_logprobs(hidden, weight, targets))
    assert mask.selected_logprobs[1] == 0, "the only kept token"
    assert gpu_kernels.sample(lambda *_, **__: "tokens", None, output, sampling, False, [], [], None) == "tokens"
