"""The engine's process with faults that keep correct weights from being served: `python -m planted_server`.

The file that `FILE_VARIABLE` names holds the name of the current fault; without the file there is none.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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


def keep_cache(original, *args, **named):
    """Claim that the KV cache was flushed."""
    return _is_planted("cache") or _is_planted("hidden cache") or original(*args, **named)


def hide_cache(original, handler, runner):
    """Claim also that the cache is empty."""
    empty = SimpleNamespace(size=0, available_size=int)
    hidden = SimpleNamespace(model=runner.model, token_to_kv_pool_allocator=empty)
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


def plant():
    """Install the faults in this process, which SGLang's processes are forked from."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    from rollout_sglang.hooks import dequant_cache, registry
    from rollout_sglang.rank_handler import RankHandler

    registry.verify()
    for owner, name, fault in (
        (DeepseekV2WeightLoaderMixin, "post_load_weights", skip_post_load),
        (dequant_cache, "clear_cache", keep_float_values),
        (Scheduler, "flush_cache", keep_cache),
        (RankHandler, "_account", hide_cache),
        (ModelRunner, "forward", decode_with_old_weights),
    ):
        setattr(owner, name, _wrap(getattr(owner, name), fault))


def _wrap(original, fault):
    return lambda *args, **named: fault(original, *args, **named)


if __name__ == "__main__":
    plant()
    server.main([argument for argument in sys.argv[1:] if argument != "--disable-radix-cache"])
