"""The engine's process with faults that keep correct weights from being served: `python -m planted_server`.

The file that `FILE_VARIABLE` names holds the name of the current fault; without the file there is none.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from support import faulty_draws

from rollout_sglang import launch_args, server
from rollout_sglang.process import EngineProcess

FILE_VARIABLE = "MEGATRON_RL_TEST_FAULT_FILE"


def set_fault(file, name=""):
    """Let the engine fail in this way from now on; "" ends the fault."""
    file.write_text(name) if name else file.unlink(missing_ok=True)


def launch_planted(file):
    """Let this process start engines that read `file`."""
    os.environ |= {FILE_VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(sys.path)}
    launch_args.EngineProcess = partial(EngineProcess, module="planted_server")


def _is_planted(name):
    file = Path(os.environ[FILE_VARIABLE])
    return file.exists() and file.read_text() == name


def skip_post_load(original, *args, **named):
    """Leave w_kc and w_vc unchanged."""
    if not _is_planted("post-load hook"):
        original(*args, **named)


def keep_float_values(original):
    if not _is_planted("float values"):
        original()


def damage_float_values(original, *args, **named):
    """Change a value that a layer has kept since the sync, behind the canary's back."""
    if _is_planted("kept value"):
        from rollout_sglang.hooks import dequant_cache

        next(iter(dequant_cache._values.values()))[0].view(-1)[0] += 1
    return original(*args, **named)


def write_other_scales(original, *args, **named):
    """Sync scales that are no powers of two, to the engine only."""
    if _is_planted("scales"):
        for name, parameter in args[0].named_parameters():
            if name.endswith("weight_scale_inv"):
                parameter.data.mul_(1.1)
    return original(*args, **named)


def write_padding(original, regions, live):
    """Write a row behind the last token of the vocabulary after a sync has filled it."""
    if _is_planted("padding"):
        name, rect = next(iter(regions._padding.items()))
        live[name].data[rect.row] = 1
    return original(regions, live)


def keep_cache(original, *args, **named):
    """Claim that the KV cache was flushed."""
    return _is_planted("cache") or _is_planted("hidden cache") or original(*args, **named)


def hide_cache(original, handler, runner):
    """Claim also that the cache is empty."""
    empty = SimpleNamespace(size=0, available_size=int)
    hidden = SimpleNamespace(model=runner.model, token_to_kv_pool_allocator=empty, req_to_token_pool=runner.req_to_token_pool)
    return original(handler, hidden if _is_planted("hidden cache") else runner)


def decode_with_old_weights(original, runner, batch, *args, **named):
    """Let prefill compute with the weights that a sync wrote, but decoding with the previous weights of one norm."""
    weight = runner.model.model.norm.weight
    if not _is_planted("decoding"):
        runner.old_norm = weight.detach().clone()
    if not _is_planted("decoding") or not batch.forward_mode.is_decode():
        return original(runner, batch, *args, **named)
    new = weight.detach().clone()
    weight.data.copy_(runner.old_norm)
    try:
        return original(runner, batch, *args, **named)
    finally:
        weight.data.copy_(new)


_FORWARDS_UNTIL_CHANGE = 8  # the canary is answered before
_forwards = [0]  # forward passes since the last account


def count_from_here(original, *args, **named):
    _forwards[0] = 0
    return original(*args, **named)


def change_weight_later(original, runner, *args, **named):
    """Change a weight in every version once its sync is proved, as a faulty write to memory."""
    _forwards[0] += 1
    if _is_planted("changed weight") and _forwards[0] == _FORWARDS_UNTIL_CHANGE:
        runner.model.model.norm.weight.data.mul_(1.5)
    return original(runner, *args, **named)


def draw_otherwise(original, probs, sampling_seed, positions):
    """Draw with the current fault of `faulty_draws`, if it is one."""
    file = Path(os.environ[FILE_VARIABLE])
    return faulty_draws.draw(file.read_text() if file.exists() else "", probs, sampling_seed, positions, original)


def keep_other_tokens(original, probs, top_p, top_k, min_p):
    """Report the tokens of other filters, and draw from them."""
    ids = original(probs, top_p, top_k, 0.0 if _is_planted("min-p ignored") else min_p)
    return ids[:-1] if _is_planted("reported set off by one") and len(ids) > 1 else ids


def load_with_another_norm(original, runner, *args, **named):
    """Let SGLang compute the first norm of the last layer, past the hook."""
    original(runner, *args, **named)
    if _is_planted("another norm"):
        norm = runner.model.model.layers[-1].input_layernorm
        norm._forward_method = type(norm).forward_native.__wrapped__.__get__(norm)


def find_other_version(original, name):
    return "2.0.0" if name == "torch" and _is_planted("another package") else original(name)


def read_other_cpu(original):
    return "Another CPU" if _is_planted("another device") else original()


def plant():
    """Install the faults in this process, which SGLang's processes are forked from."""
    from sglang.srt.layers import sampler
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    from megatron_rl.precision.graph import kernels
    from rollout_sglang import precision_graph
    from rollout_sglang.derived_tensors import ServedTensors
    from rollout_sglang.hooks import dequant_cache, registry, seeded_sampling
    from rollout_sglang.proved_regions import ProvedRegions
    from rollout_sglang.rank_handler import RankHandler

    registry.verify()
    for owner, name, fault in (
        (DeepseekV2WeightLoaderMixin, "post_load_weights", skip_post_load),
        (dequant_cache, "clear_cache", keep_float_values),
        (ServedTensors, "check_copies", damage_float_values),
        (precision_graph, "check_scale_values", write_other_scales),
        (ProvedRegions, "check", write_padding),
        (Scheduler, "flush_cache", keep_cache),
        (RankHandler, "_account", hide_cache),
        (RankHandler, "_account", count_from_here),
        (ModelRunner, "load_model", load_with_another_norm),
        (kernels, "find_version", find_other_version),
        (kernels, "_read_cpu", read_other_cpu),
        (ModelRunner, "forward", decode_with_old_weights),
        (ModelRunner, "forward", change_weight_later),
        (sampler, "sampling_from_probs_torch", draw_otherwise),
        (seeded_sampling, "sample_tokens", draw_otherwise),
        (seeded_sampling, "find_kept_tokens", keep_other_tokens),
    ):
        setattr(owner, name, _wrap(getattr(owner, name), fault))


def _wrap(original, fault):
    return lambda *args, **named: fault(original, *args, **named)


if __name__ == "__main__":
    plant()
    server.main([argument for argument in sys.argv[1:] if argument != "--disable-radix-cache"])
