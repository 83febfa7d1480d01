"""Layers of pipeline stages, compared with Megatron-Core's functions, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.transformer_config import layout_options
from parallel.layout import Layout
from parallel.shards import GeometryError
from parallel.stages import balance_stages, check_stages, count_stage_layers, list_stage_layers


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, Layout]:
    """Return a number of layers, and a layout that can share them."""
    pp, vpp = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    first, last = (draw(st.sampled_from([0, 0, vpp, 2 * vpp, 5 * vpp])) for _ in range(2))
    assume(pp > 2 or not (first and last))
    share = vpp * draw(st.integers(1, 4))
    return first + last + share * (pp - (first > 0) - (last > 0)), Layout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)


@given(layouts())
def test_stages_match_megatron(case):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layers, layout = case
    options = {
        name: value for name, value in layout_options(layout, TrainConfig()).items() if name != "overlap_tp_reduce"
    }  # not an option of Megatron's
    options |= {"pipeline_dtype": torch.float32, "moe_token_dispatcher_type": "alltoall"}
    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=1, **options)
    check_stages(layers, layout)
    for stage in range(layout.pp):
        expected = []
        for part in range(layout.vpp) if layout.vpp > 1 else [None]:
            start = get_transformer_layer_offset(config, part, stage)
            expected += range(start, start + get_num_layers_to_build(config, part, stage))
        assert list_stage_layers(layers, layout, stage) == expected
    assert sorted(layer for stage in range(layout.pp) for layer in list_stage_layers(layers, layout, stage)) == list(range(layers))


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 3), st.floats(0, 5))
def test_balanced_stages_minimize_the_slowest_stage(layers, pp, vpp, output_layer):
    assume(pp > 1 or vpp == 1)

    def sizes_of(split: tuple[int, int]) -> list[int]:
        layout = Layout(pp=pp, vpp=vpp, first_stage_layers=split[0], last_stage_layers=split[1])
        check_stages(layers, layout)
        return count_stage_layers(layers, layout)

    def pace(sizes: list[int]) -> float:
        return max(*sizes, sizes[-1] + output_layer)

    balanced = balance_stages(layers, pp, vpp, output_layer)
    if layers % (pp * vpp) == 0:
        assert balanced is not None and pace(sizes_of(balanced)) <= pace([layers // pp] * pp)
        assert output_layer > 1 or balanced == (0, 0)
    if balanced is not None:
        assert sum(sizes_of(balanced)) == layers and min(sizes_of(balanced)) > 0


@pytest.mark.parametrize(
    "layers, pp, output_layer, sizes",
    [
        (94, 8, 1, [11, *[12] * 6, 11]),
        (94, 8, 2.3, [*[12] * 7, 10]),
        (94, 4, 1, [23, 24, 24, 23]),
        (64, 4, 3.4, [17, 17, 17, 13]),
        (61, 16, 1, [2, *[4] * 14, 3]),
        (61, 2, 1, [31, 30]),
        (5, 3, 1, [2, 2, 1]),
    ],
)
def test_the_first_and_the_last_stage_are_smaller(layers, pp, output_layer, sizes):
    first, last = balance_stages(layers, pp, 1, output_layer) or (0, 0)
    assert count_stage_layers(layers, Layout(pp=pp, first_stage_layers=first, last_stage_layers=last)) == sizes


BALANCED = "use train.layout.first_stage_layers = 11 and train.layout.last_stage_layers = 11"


@pytest.mark.parametrize(
    "sizes, line",
    [
        ({"pp": 8}, f"train.layout.pp = 8: must divide num_hidden_layers (94); use a divisor of 94, or {BALANCED[4:]}"),
        ({"pp": 100}, "train.layout.pp = 100: must divide num_hidden_layers (94); use a divisor of 94"),
        (
            {"pp": 8, "first_stage_layers": 12},
            f"train.layout.first_stage_layers = 12: leaves 82 of 94 layers, which 7 other stages cannot share equally; {BALANCED}",
        ),
        (
            {"pp": 8, "first_stage_layers": 4, "last_stage_layers": 90},
            "train.layout.first_stage_layers = 4: leaves 0 of 94 layers with train.layout.last_stage_layers = 90, which 6 other stages "
            f"cannot share equally; {BALANCED}",
        ),
        (
            {"pp": 2, "last_stage_layers": 94},
            "train.layout.last_stage_layers = 94: leaves 0 of 94 layers, which 1 other stage cannot share equally; "
            "use train.layout.last_stage_layers = 0",
        ),
        (
            {"pp": 8, "vpp": 2, "first_stage_layers": 11, "last_stage_layers": 11},
            "train.layout.vpp = 2: must divide the layers of a pipeline stage (11); use a divisor of 11",
        ),
        (
            {"first_stage_layers": 2},
            "train.layout.first_stage_layers = 2: needs more than one pipeline stage; set train.layout.pp above 1, or "
            "train.layout.first_stage_layers = 0",
        ),
        (
            {"pp": 2, "first_stage_layers": 40, "last_stage_layers": 54},
            "train.layout.last_stage_layers = 54: is determined by train.layout.first_stage_layers if there are two stages; leave one out",
        ),
        ({"pp": 2, "last_stage_layers": -1}, "train.layout.last_stage_layers = -1: must be a positive integer, or 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(sizes, line):
    with pytest.raises(GeometryError) as caught:
        check_stages(94, Layout(**sizes))
    assert str(caught.value) == line
