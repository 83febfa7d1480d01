"""Engines that break the contract or do not start end in one RunError with the log's tail, and leave no process."""

import shutil

import pytest
from support import trainer_engine
from support.models import FP8, edit_config, make_checkpoint, random_sequences
from support.processes import family, until

from megatron_rl.config import Config
from megatron_rl.errors import RunError
from megatron_rl.mcore.checkpoint.export import convert
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(4, seed=1)]


def fail_to_start(model, folder, start_timeout, *arguments):
    """Start an engine that cannot start, with extra server `arguments`. Return the error message and its log tail."""
    config = Config.model_validate({"model": {"path": model}, "rollout": {"max_total_tokens": 4096, "start_timeout": start_timeout}})
    with pytest.raises(RunError) as caught:
        SGLangEngine(EngineLaunchSpec(config, model, folder, arguments=arguments)).wait_until_ready()
    return str(caught.value), caught.value.log_tail


@pytest.mark.long
def test_engines_that_cannot_start(new_world, checkpoint, tmp_path):
    """Invalid weights, an unknown argument, and a short timeout, all at once because each imports SGLang."""
    no_model = tmp_path / "no_model"
    shutil.copytree(checkpoint, no_model)
    (no_model / "model.safetensors").write_bytes(b"no tensors")
    cases = {
        "model": ((no_model, 800.0), "did not start", "safetensors"),
        "time-out": ((checkpoint, 2.0), "was not healthy after 2 s", ""),
        "argument": ((checkpoint, 800.0, "--no-such-thing"), "did not start", "unrecognized arguments: --no-such-thing"),
    }
    worlds = {name: new_world() for name in cases}
    for name, ((model, *rest), _, _) in cases.items():
        (tmp_path / f"log_{name}").mkdir()
        worlds[name].send(fail_to_start, model, tmp_path / f"log_{name}", *rest)
    for name, (_, line, log) in cases.items():
        message, tail = worlds[name].receive(seconds=900)[0]
        assert line in message and f"log_{name}" in message, f"{name}: {message}"
        assert log.lower() in tail.lower(), f"{name}: {tail}"
        until(lambda name=name: len(family(worlds[name].pid())) == 1, 60, f"{name}: the engine's processes end")


@pytest.mark.long
def test_an_engine_with_other_activation_scales_is_refused_and_its_graph_says_where_it_differs(new_world, tmp_path):
    """Its checkpoint has no "scale_fmt": the bytes are the same, but activations have fp32 scales."""
    world, trained = new_world(), make_checkpoint(tmp_path / "trained")
    convert(trained, model := tmp_path / "model", FP8)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(model, {"quantization_config": {**quantization, "modules_to_not_convert": ["lm_head"]}})
    world.call(trainer_engine.start, trained, tmp_path, FP8, None, None, model)
    world.call(trainer_engine.prove)  # the weights alone do not show it
    line = r"breaks the precision contract: .*_proj quantizes activations as fp8 fp32; precision.mode fp8_unified says fp8 pow2"
    with pytest.raises(RunError, match=line):
        world.call(trainer_engine.check_live)
    generated = world.call(trainer_engine.generate, PROMPTS)[0]
    assert (generated["engine"] - generated["trainer"]).abs().mean() > 1e-4  # it is another policy
    lines, *_ = world.call(trainer_engine.compare_graphs)[0]
    readers = ["input_norm -> attention.qkv", "attention.core -> attention.output", "post_attention_norm -> mlp.gate_up"]
    readers += ["mlp.swiglu -> mlp.down"]
    weights = [f"{name}.weight -> {name}" for _, name in (reader.split(" -> ") for reader in readers)]
    expected = [f"layer 0: {name} (x) is e4m3 1x128 fp32 in the rollout, e4m3 1x128 pow2 in training" for name in readers]
    expected += [f"layer 0: {name} (weight) is e4m3 128x128 fp32 in the rollout, e4m3 128x128 pow2 in training" for name in weights]
    assert sorted(lines) == sorted(expected)
