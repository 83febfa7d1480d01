"""Why published model families are refused, by `model_type`: the first thing that neither trainer nor planner describes. The line is shown
to the user, so it names what the family has, as its class in transformers or SGLang has it."""

_KDA = "has Kimi delta attention (a decay for each channel)"
_IMAGES = "is a model of text and images"
_MULTIPLIERS = "multiplies embeddings, residuals, attention scores, and logits by factors"
_HYPER = "joins several residual streams (hyper-connections)"

REASONS = {
    "deepseek_v2": "has experts chosen by a softmax beside latent attention",
    "deepseek_v4": f"compresses keys and values of past tokens, and {_HYPER}",
    "ernie4_5": "rotates queries and keys in FP32",
    "ernie4_5_moe": "has experts chosen by a softmax with a correction bias",
    "exaone4": "has windows, and norms after attention and MLP alone",
    "gemma": "has GeGLU and scaled embeddings",
    "gemma2": "has GeGLU, scaled embeddings, windows, and soft caps of scores and logits",
    "gemma3": f"{_IMAGES}; its text has GeGLU, scaled embeddings, and windows",
    "gemma3_text": "has GeGLU, scaled embeddings, windows, and two bases of rotary positions",
    "gemma4": f"{_IMAGES}; its text has GeGLU, windows, and heads of two widths",
    "gemma4_text": "has GeGLU, windows, and heads of two widths",
    "glm5_next": f"{_KDA}, and {_HYPER}",
    "granite": _MULTIPLIERS,
    "granitemoehybrid": f"has Mamba-2 layers, and {_MULTIPLIERS}",
    "hunyuan_v1_dense": "normalizes queries and keys after the rotary positions",
    "hunyuan_v1_moe": "normalizes queries and keys after the rotary positions",
    "hy_v3": "has experts chosen by sigmoids, whose weighted sum is FP32",
    "hy_v4": f"has sparse attention with sinks, and {_HYPER}",
    "kimi_k25": f"{_IMAGES}, whose checkpoints are INT4",
    "kimi_k3": _KDA,
    "kimi_linear": f"{_KDA}, and latent attention without rotary positions",
    "lfm2": "has short convolutions in place of attention",
    "lfm2_moe": "has short convolutions in place of attention",
    "llama4": f"{_IMAGES}; its text has chunked attention and layers without rotary positions",
    "llama4_text": "has chunked attention, and weights that multiply the inputs of experts",
    "mimo": "has layers for multi-token prediction under names of its own",
    "minimax_m3_vl": f"{_IMAGES}; its text has attention to selected blocks, and clamped SwiGLU",
    "ministral3": "scales queries by their position",
    "mistral3": f"{_IMAGES}; the text of Ministral-3 scales queries by their position",
    "mistral4": "has latent attention with experts chosen by a softmax, and SGLang has no class for it",
    "muse_glimmer": "has windows, a soft cap of logits, and norms before and after each part",
    "nemotron-nas": "has layers of different widths",
    "nemotron_h": "has Mamba-2 layers, and experts with ReLU squared",
    "olmo2": "has no norms before attention and MLP",
    "olmo3": "has no norms before attention and MLP, windows, and other rotary positions in windows",
    "phi3": "stores queries, keys, and values in one tensor",
    "qwen2_5_vl": _IMAGES,
    "qwen2_moe": "has biases of queries, keys, and values beside a gated shared expert",
    "qwen3_vl": _IMAGES,
    "qwen4_exp": f"has sparse attention, a table of n-grams, and {_HYPER}",
    "step3p5": "has windows, heads of two counts, and SwiGLU clamped by layer",
    "step3p7": f"{_IMAGES}; its text has windows, heads of two counts, and SwiGLU clamped by layer",
}
