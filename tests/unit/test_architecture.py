"""What of a config.json the trainer refuses rather than computes wrongly."""

import pytest

from megatron_rl.architecture import rope_theta, traits_of
from megatron_rl.errors import UserError

QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "rope_theta": 1e6}


def test_qwen3_is_built():
    assert traits_of(QWEN3).head_norms and not traits_of(QWEN3).qkv_bias
    assert traits_of(QWEN3 | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}).head_norms


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "llama3"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, named):
    with pytest.raises(UserError, match=named):
        traits_of(QWEN3 | changes)


def test_the_rotary_base_is_found_in_both_places():
    assert rope_theta(QWEN3) == 1e6
    assert rope_theta({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}}) == 5e5
    with pytest.raises(UserError, match="rope_theta"):
        rope_theta({})
