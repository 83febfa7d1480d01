"""The activation that models have on a GPU is a part of the MLP that a checkpoint can be made of."""

from megatron.core.transformer import TransformerConfig

from megatron_rl.mcore.layers.spec import SwiGLU


def test_a_checkpoint_finds_no_tensors_in_it():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    layer = SwiGLU(config=config)
    layer.tp_group = group = object()  # nothing here is split: no group is asked
    assert layer.sharded_state_dict("mlp.activation_func.", (), {"dp_cp_group": group}) == {}
