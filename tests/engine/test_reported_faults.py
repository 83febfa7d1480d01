"""The kinds of faults that users of RL stacks have reported, each planted in a live engine: which check finds it, and after how long.
`docs/reference/reported_faults.md` has the reports and these figures; `pytest -s` prints them."""

import os
import re
import time
from functools import partial

import planted_tensors
import pytest
from support import train_command, trainer_engine
from support.models import FP8
from support.processes import ROOT, World
from support.train_command import latest, read_json, train

from megatron_rl.errors import RunError
from parallel.layout import Layout

CHECKS = {
    "byte proof": r"^the sync is not proved: [\w.]+ of engine rank 0 differs from ",
    "coverage": r"^the sync is not proved: engine rank 0: lm_head\.weight",
    "account of tensors": r"^the sync is not proved: engine rank 0: model\.[\w.]+ (\(.*\) is neither filled by the sync nor known to|has "
    r"moved in memory)",
    "values of scales": r"^the sync is not proved: engine rank 0: [\w.]+k_scale_float is 2\.0, not 1",
    "canary": r"^the canary fails: engine 0, prompt 0 of 48 tokens, position 48 \(prefill\)",
    "none": r"^nothing$",
}
L0, L1 = "model.layers.0.", "model.layers.1."
EXPERT = L1 + "mlp.experts."


def update(path, change, **where):
    """A fault between the bytes of a sync and its proof."""
    return {"path": path, "change": change, "when": "update", **where}


def serve(path, change, **where):
    """A fault after the proof, before the first token."""
    return {"path": path, "change": change, **where}


DENSE = {  # kind: (fault, check)
    "scales of the old version": (update(L0 + "mlp.down_proj.weight_scale_inv", "keep", rows=[0, None]), "byte proof"),
    "a kernel's copy of old scales": (update(L0 + "mlp.gate_up_proj.weight_scale_inv", "copy"), "account of tensors"),
    "scales in another format": (update(L1 + "mlp.down_proj.weight_scale_inv", "round scales"), "byte proof"),
    "a row of the old version": (update(L1 + "self_attn.qkv_proj.weight", "keep", rows=[600, 601]), "byte proof"),
    "q and k exchanged": (update(L1 + "self_attn.qkv_proj.weight", "swap", first=0, second=256, count=128), "byte proof"),
    "gate and up exchanged": (update(L0 + "mlp.gate_up_proj.weight", "swap", first=0, second=256, count=256), "byte proof"),
    "a quantized norm": (update("model.norm.weight", "requantize"), "byte proof"),
    "an output layer no longer tied": (update("model.embed_tokens.weight", "untie"), "coverage"),
    "a weight at another address": (update(L0 + "self_attn.o_proj.weight", "move"), "account of tensors"),
    "memory lost after the proof": (serve(L0 + "mlp.gate_up_proj.weight_scale_inv", "multiply", at=[0], by=0.0), "canary"),
}
EXPERTS = {
    "experts exchanged": (
        update(
            "+".join(f"{L1}mlp.experts.{name}" for name in ("w13_weight", "w13_weight_scale_inv", "w2_weight")), "swap", first=0, second=1
        ),
        "byte proof",
    ),
    "second layers of experts exchanged": (update(EXPERT + "w2_weight", "swap", first=2, second=3), "byte proof"),
    "router bias of the old version": (update(L1 + "mlp.gate.e_score_correction_bias", "keep", rows=[0, None]), "byte proof"),
    "a quantized router": (update(L1 + "mlp.gate.weight", "requantize"), "byte proof"),
    "absorbed weights of another version": (serve(L0 + "self_attn.w_kc", "multiply", at=[0], by=-1.0), "canary"),
}
CACHE = {
    "another KV scale": (update(L1 + "self_attn.attn.kv_scales", "multiply", at=[0], by=2.0), "byte proof"),
    "a second KV scale": (update(L0 + "self_attn.attn.k_scale_float", "set", value=2.0), "values of scales"),
    "twice a KV scale after the proof": (serve(L1 + "self_attn.attn.kv_scales", "multiply", at=[0], by=2.0), "none"),  # the same bits
    "1.5 times a KV scale after the proof": (serve(L1 + "self_attn.attn.kv_scales", "multiply", at=[0], by=1.5), "canary"),
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "kind, precision, faults",
    [
        ("qwen3", {"scale_format": "fp32"}, DENSE),
        pytest.param("deepseek_v3", {}, EXPERTS, marks=pytest.mark.long),
        pytest.param("qwen3", {"kv": "e4m3_per_layer"}, CACHE, marks=pytest.mark.long),
    ],
    ids=["dense", "experts", "cache"],
)
def test_every_kind_is_found_by_its_check_and_mended_by_the_next_sync(kind, precision, faults, tmp_path):
    file, settings = tmp_path / "fault", {"canary": 2, "proof": "streamed"}  # which rereads all bytes of a first sync before it serves
    start = partial(trainer_engine.start_architecture, tie_word_embeddings=kind == "qwen3")
    with World(1, tmp_path / "world") as world:
        world.call(planted_tensors.launch_planted, file)
        world.call(start, kind, tmp_path, FP8 | precision, Layout(), {}, True)
        world.call(trainer_engine.sync, 0, 1 << 20, settings)
        found = {}
        for version, (name, (fault, _)) in enumerate(faults.items(), 1):
            world.call(trainer_engine.change_weights, kind, version)
            planted_tensors.set_fault(file, fault)
            began = time.monotonic()
            try:
                world.call(trainer_engine.sync, version, 1 << 20, settings)
                found[name] = "nothing"
            except RunError as refusal:
                found[name] = str(refusal)
            seconds = time.monotonic() - began
            planted_tensors.set_fault(file)
            report = world.call(trainer_engine.sync, version, 1 << 20, settings)[0]
            assert report["canary"] == 0.0, "the next sync mends it"
            print(f"\n{seconds:.2f} s, without the fault {report['seconds']:.2f} s: {name}: {found[name]}", end="")
    wrong = {name: found[name] for name, (_, check) in faults.items() if not re.match(CHECKS[check], found[name])}
    assert wrong == {}


ADAPTERS = {
    "an adapter applied twice": (update(L0 + "self_attn.qkv_proj.lora_B", "multiply", at=[], by=2.0), "byte proof"),
    "all adapters applied twice, with right bytes": (update(L0 + "self_attn.qkv_proj.lora_B", "twice"), "canary"),
}
LORA = {
    "lora.rank": 8, "train.learning_rate": 1e-2, "algorithm.entropy_coef": 0.01, "train.steps": 500, "data.eval_every": 1000,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_run_whose_engine_applies_an_adapter_twice_ends(name, tmp_path, monkeypatch):
    file, (fault, check) = tmp_path / "fault", ADAPTERS[name]
    monkeypatch.setenv(planted_tensors.FILE_VARIABLE, str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    with train(tmp_path, LORA, module="planted_run") as command:
        train_command.wait_for_rows(command, tmp_path, 3)
        planted_tensors.set_fault(file, fault)
        began = time.monotonic()
        done = command.wait(train_command.LONG)
    assert done.code == 3, done.err
    reason = read_json(latest(tmp_path) / "run.json")["reason"]
    print(f"\n{time.monotonic() - began:.2f} s to the end of the run: {name}: {reason}", end="")
    assert re.match(CHECKS[check], reason), reason
