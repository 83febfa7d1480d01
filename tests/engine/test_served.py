"""Correct bytes that a real engine does not serve: each fault is named before a request is answered, and fixed by the next sync."""

import time
from functools import partial

import planted_server
import pytest
import torch
from support import trainer_engine
from support.families import VOCABULARY
from support.models import FP8, random_sequences
from support.processes import World

from megatron_rl.errors import RunError
from parallel.layout import Layout

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(6, seed=31)]
CANARY = {"canary": 2}
FAULTS = {
    "post-load hook": r"^the sync is not proved: engine rank 0: model\.layers\.0\.self_attn\.w_kc is stale: \d+ of its 65536 values",
    "float values": r"^the sync is not proved: engine rank 0: the cached float values of a weight \[\d+, \d+\] are stale",
    "kept value": r"^the sync is not proved: engine rank 0: the cached float values of a weight \[\d+, \d+\] are stale",
    "scales": r"^the sync is not proved: engine rank 0: model\.layers\.0\.[\w.]+_scale_inv holds scales that are fp32, but the precision "
    r"graph says pow2$",
    "padding": r"^the sync is not proved: engine rank 0: model\.embed_tokens\.weight: the padding in rows \d+\.\.\d+, columns 0\.\.\d+ is "
    r"not zero$",
    "cache": r"^the sync is not proved: engine rank 0: the KV cache was not flushed: it holds \d+ tokens of the previous weights$",
    "hidden cache": r"^the canary fails: engine 0, prompt 0 of 48 tokens, position 48 \(prefill\): log p is -[\d.]+ in the engine, "
    r"-[\d.]+ in the trainer; bound 0 \(sync\.canary_bound\)$",
    "decoding": r"^the canary fails: engine 0, prompt 0 of 48 tokens, position 49 \(decoding\): log p is",
}


def test_what_keeps_right_weights_from_being_served_is_named(tmp_path):
    fault = tmp_path / "fault"
    with World(1, tmp_path / "world") as world:
        world.call(planted_server.launch_planted, fault)
        start = partial(trainer_engine.start_architecture, vocab_size=VOCABULARY + 6)
        world.call(start, "deepseek_v3", tmp_path, FP8, Layout(), {}, True)
        report = world.call(trainer_engine.sync, 0, 1 << 20, CANARY)[0]
        assert report["derived"] > 4 and report["canary"] == 0.0  # w_kc and w_vc of two layers, and the float values of all their weights
        assert report["proved_bytes"] == report["engine_bytes"] > report["bytes"], "padding counts too"
        for version, (name, line) in enumerate(FAULTS.items(), 1):
            planted_server.set_fault(fault, name)
            world.call(trainer_engine.change_weights, "deepseek_v3", version)
            began = time.monotonic()
            with pytest.raises(RunError, match=line):
                world.call(trainer_engine.sync, version, 1 << 20, CANARY)
            print(f"\n{time.monotonic() - began:.2f} s: {name}", end="")
            planted_server.set_fault(fault)
            assert world.call(trainer_engine.sync, version, 1 << 20, CANARY)[0]["canary"] == 0.0
        generated = world.call(trainer_engine.generate, PROMPTS)[0]
        assert generated["versions"] == {len(FAULTS)} and torch.equal(generated["engine"], generated["trainer"])
