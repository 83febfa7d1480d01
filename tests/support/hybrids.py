"""Tiny random checkpoints of models with gated delta nets, made by transformers, and engines that serve them without a trainer."""

import json
import re
import shutil
from contextlib import contextmanager

import torch
import transformers
from safetensors.torch import load_file, save_file

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config import Config
from megatron_rl.types import SamplingParams
from parallel.wrappers import DECODER, VISION
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

_COMMON = {
    "vocab_size": 384, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256, "tie_word_embeddings": False,
    "max_position_embeddings": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "full_attention_interval": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _EXPERTS),
}


def make_hybrid(folder, name, dtype=torch.float32, **changes):
    """Write a checkpoint of random weights. Gates and decays are spread, so that states remember and forget."""
    config_class, model_class, more = MODELS[name]
    fields = {**_COMMON, **more, **changes}
    interval = fields["full_attention_interval"]
    kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(fields["num_hidden_layers"])]
    config = getattr(transformers, config_class)(**{**fields, "layer_types": fields["layer_types"] or kinds})
    config.torch_dtype = dtype
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).float()
    numbers = torch.Generator().manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=numbers)
        if parameter_name.endswith(("A_log", "dt_bias")):
            parameter.data = noise
        elif "conv1d" in parameter_name:
            parameter.data = 0.5 * noise
        elif parameter.dim() == 1:
            parameter.data += 0.2 * noise
        else:
            parameter.data = 0.05 * noise
    model.to(dtype).save_pretrained(folder)
    make_byte_tokenizer(folder)
    config_file = folder / "config.json"  # transformers 5 leaves out fields that SGLang needs
    more = {"rope_theta": fields["rope_parameters"]["rope_theta"]} | (
        {} if fields["layer_types"] else {"full_attention_interval": interval}
    )
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | more))
    return folder


def rename_as_wrapper(folder):
    """Give the tensors of a checkpoint the names that they have beside a vision tower. An engine gets the decoder's config.json."""
    file = folder / "model.safetensors"
    tensors = {re.sub(r"^model\.", DECODER, name): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, VISION + "patch_embed.weight": torch.ones(4)}, file, {"format": "pt"})


def make_whole(folder, name):
    """Write a checkpoint of random weights with a vision tower, as transformers makes it; `name`: qwen3_5 or qwen3_5_moe."""
    text = json.loads((make_hybrid(folder, name) / "config.json").read_text()) | {"tie_word_embeddings": False}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256, "num_position_embeddings": 16}
    kind = MODELS[name][1].removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False, dtype=torch.float32)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    model.save_pretrained(folder / "whole")
    rename_as_wrapper(folder)
    decoder, whole = (load_file(each / "model.safetensors") for each in (folder, folder / "whole"))
    save_file({key: decoder.get(key, value) for key, value in whole.items()}, folder / "model.safetensors", {"format": "pt"})
    shutil.move(folder / "whole" / "config.json", folder / "config.json")
    shutil.rmtree(folder / "whole")
    return folder


@contextmanager
def serve(folder, log_folder, precision, rollout=None):
    """Context manager with a ready engine on a checkpoint. Prompts come in chunks of 40 tokens."""
    rollout = {
        "max_running_requests": 16, "max_total_tokens": 4096, "chunked_prefill_size": 40, "request_timeout": 600.0, "start_timeout": 800.0,
        **(rollout or {}),
    }  # fmt: skip
    config = Config.model_validate({"model": {"path": folder}, "precision": precision, "rollout": rollout})
    log_folder.mkdir(exist_ok=True)
    engine = SGLangEngine(EngineLaunchSpec(config, folder, log_folder))
    try:
        engine.wait_until_ready()
        yield engine
    finally:
        engine.stop()


def generate(engine, prompts, tokens=12, cached=False, seeds=None):
    """Return the completions of the prompts, by default seeded with their index, after emptying the engine's caches unless `cached`."""
    if not cached:
        engine._empty_caches()
    return engine.generate(prompts, [SamplingParams(1.0, tokens, seed=seed) for seed in seeds or range(len(prompts))])


def compute_reference(folder, prompt, tokens):
    """Return transformers' float32 log-probs of the tokens that follow a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
