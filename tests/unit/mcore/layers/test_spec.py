from megatron.core.transformer import TransformerConfig

from megatron_rl.mcore.layers.spec import SwiGLU


def test_swiglu_adds_no_tensors_to_a_checkpoint():
    layer = SwiGLU(config=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
    layer.tp_group = group = object()  # nothing is sharded, so the group is not used
    assert layer.sharded_state_dict("mlp.activation_func.", (), {"dp_cp_group": group}) == {}
