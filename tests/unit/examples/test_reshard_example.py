"""The example of `parallel/` as a library gives every engine rank what a direct cut of the checkpoint gives, without importing torch."""

import subprocess
import sys

import numpy as np
import pytest
from support.families import ARCHITECTURES
from support.golden import slow_cut

from examples.reshard import format_of, reshard_model
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_engine_shards


@pytest.mark.parametrize("family, layout, tp", [
    ("qwen3", Layout(tp=2, pp=2, dp=2), 1), ("qwen3_moe", Layout(dp=2, ep=2), 2), ("deepseek_v3", Layout(), 2),
])  # fmt: skip
def test_an_engine_layout_is_filled(family, layout, tp):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512}
    sizes |= {"moe_intermediate_size": 256, "mlp_only_layers": []} if family != "qwen3" else {}
    if family == "deepseek_v3":
        sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "qk_nope_head_dim": 64, "v_head_dim": 64}
    config = ARCHITECTURES[family] | sizes | {"num_hidden_layers": 2}
    model = ModelGeometry.from_hf_config(config)
    whole = slow_cut.checkpoint(model)
    sources = slow_cut.cut_all(build_trainer_shards(model, layout, format_of=format_of), whole)
    wanted = slow_cut.cut_all(build_engine_shards(model, tp), whole)
    got = reshard_model(config, layout, tp, view_floats(sources))
    slow_cut.assert_same(view_floats(got), view_floats(wanted))


def view_floats(ranks):
    """Return the arrays of all ranks, with 32-bit integers viewed as the floats that they stand for, and NaN as 0."""
    views = {rank: {name: x.view(np.float32) if x.dtype == np.uint32 else x for name, x in each.items()} for rank, each in ranks.items()}
    return {rank: {name: np.nan_to_num(x) if x.dtype == np.float32 else x for name, x in each.items()} for rank, each in views.items()}


def test_no_torch():
    code = "import sys, examples.reshard; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
