"""GLM-4.5 and 4.6: grouped-query attention with rotary positions on half of each head, and DeepSeek's experts after a few dense layers.
config.json says whether q, k and v have biases, and whether q and k heads are normalized (GLM-4.5: yes, GLM-4.5-Air: no)."""

from parallel import mtp_layers
from parallel.attention.softmax import read_softmax
from parallel.families.deepseek_v3 import read_experts
from parallel.hf_config import MOST_LAYERS, HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer, list_mtp_copies = pre_norm_layer, mtp_layers.list_mtp_layer, mtp_layers.list_copies

_DEFAULTS = {  # as in transformers
    **{"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
}
ARCHITECTURE = "Glm4MoeForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(**_DEFAULTS).require(hidden_act="silu", mlp_bias=False, moe_layer_freq=1)
    biases, norms = config.flag("attention_bias"), config.flag("use_qk_norm")
    return ModelGeometry(
        **config.widths(),
        attention=read_softmax(config, config.head_dim(), config.rope("yarn", share=0.5), qkv_bias=biases, qk_norm=norms),
        experts=read_experts(config),
        tied_in_engine=False,
        mtp_layers=config.size("num_nextn_predict_layers", least=0, most=MOST_LAYERS),
    )
