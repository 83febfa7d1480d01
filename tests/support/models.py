"""Small random checkpoints of every architecture, and random samples for them."""

import json

import torch
from safetensors.torch import load_file, save_file

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS, make_byte_tokenizer
from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config, make_random_tensors
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from parallel.model_geometry import ModelGeometry
from support.families import ENGINE_ARCHITECTURES, VOCABULARY

FP32 = {"mode": "bf16", "high": "fp32"}
"""`precision` of a run without FP8, in float32: what remains is the order of sums."""
TENSORS = 3 + 4 + 4 * 2
"""What a sync of one layer proves: embedding, last norm, lm_head; four norms; four FP8 weights with their scales."""
FP8 = {"mode": "fp8_unified", "high": "fp32"}


def make_model(folder, config, seed=0):
    """Write a checkpoint of any architecture: FP32 weights, no tokenizer. Norms scale by about one, biases are near zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors, model = {}, ModelGeometry.from_hf_config(config)
    for tensor in (model.tensors() | model.list_kept()).values():
        values = torch.randn(tensor.shape, generator=generator)
        middle = 0 if model.zero_centered_norms and not tensor.name.endswith("linear_attn.norm.weight") else 1
        tensors[tensor.name] = middle + 0.2 * values if tensor.role == "norm" else 0.1 * values if tensor.vector else 0.05 * values
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, {"torch_dtype": "float32", **config}, tensors, None)
    return folder


def make_checkpoint(folder, seed=0, **widths):
    """Write a checkpoint of FP32 weights with two heads of 128 and two key-value heads, so that it fits tensor parallelism of 2."""
    make_byte_tokenizer(folder)
    architecture = ArchitectureConfig(**{"num_hidden_layers": 1, "initializer_range": 0.05, "rope_theta": 100.0, **widths})
    config = make_hf_config(architecture, load_tokenizer(folder).eos_token_id, "fp32")
    write_checkpoint(folder, config, masters(config, seed), None)
    return folder


def make_slow_tokenizer(folder):
    """Replace a folder's byte tokenizer by one of four files, as older checkpoints have it. Its end token, 258, is an added one."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for file in folder.glob("tokenizer*.json"):
        file.unlink()
    added = {token: 256 + number for number, token in enumerate((*SPECIAL_TOKENS, "<|more|>"))}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0]}
    for name, content in {"vocab.json": vocabulary, "added_tokens.json": added, "tokenizer_config.json": settings}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def make_bf16_checkpoint(folder, **widths):
    """Write a checkpoint of `make_checkpoint` in BF16."""
    tensors = {name: tensor.bfloat16() for name, tensor in read_weights(make_checkpoint(folder, **widths)).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_weights(folder):
    return load_file(folder / "model.safetensors")


def edit_config(folder, change):
    """Overwrite fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def random_sequences(count, seed, longest=24):
    """Return random samples of different lengths. Their old and reference log-probs vary around a uniform guess, so widely that some
    tokens are clipped on either side."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = VOCABULARY - len(SPECIAL_TOKENS)

    def ids(length):
        return torch.randint(0, ordinary, (length,), generator=generator).tolist()

    sequences = []
    for _ in range(count):
        prompt, answer = (int(torch.randint(2, longest, (), generator=generator)) for _ in range(2))
        sequence = TrainingSample(ids(prompt), ids(answer), advantage=float(torch.randn((), generator=generator)))
        uniform = -torch.log(torch.tensor(float(VOCABULARY)))
        sequence.old_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        sequence.reference_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        sequences.append(sequence)
    return sequences


def config_of(kind, contract, **changes):
    """Return config.json of a tiny model; `changes` overwrite fields."""
    config = {**ENGINE_ARCHITECTURES[kind], "torch_dtype": contract.high_format.dtype}
    kept = ModelGeometry.from_hf_config(config).unquantized_modules
    if quantization := contract.engine_format.quantization_config(kept):
        config["quantization_config"] = quantization
    return {**config, **changes}


def masters(config, seed=0):
    """Return random FP32 tensors by Hugging Face name. Norms scale by about one, so that a forgotten norm is noticed. Half of the recurrent
    states remember hundreds of tokens."""
    tensors, centered = make_random_tensors(config, seed), ModelGeometry.from_hf_config(config).zero_centered_norms
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = 3 * torch.randn(tensor.shape, generator=generator) - 5
        elif name.endswith("conv1d.weight"):
            tensors[name] = 0.5 * torch.randn(tensor.shape, generator=generator)
        elif tensor.dim() == 1:
            middle = 0.0 if name.endswith("bias") or (centered and not name.endswith("linear_attn.norm.weight")) else 1.0
            tensors[name] = middle + 0.2 * torch.randn(tensor.shape, generator=generator)
    return tensors


def served(config, tensors, contract):
    """Return an engine's checkpoint of these masters: FP8 roles as bytes and scales, the rest in the contract's dtypes."""
    checkpoint = {}
    model = ModelGeometry.from_hf_config(config)
    for tensor in (model.tensors() | model.list_kept()).values():
        value, format = tensors[tensor.name], contract.format_of(tensor.role)
        if format.quantized:
            checkpoint[tensor.name], checkpoint[format.scale_name(tensor.name)] = quantize(value, format)
        else:
            checkpoint[tensor.name] = value.to(getattr(torch, format.dtype))
    return checkpoint


def write_model(folder, kind, precision, seed=0, **changes):
    """Write an engine's checkpoint with a byte tokenizer. Return its config.json. `precision` is the section of a run's configuration."""
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate(precision))
    folder.mkdir(parents=True, exist_ok=True)
    make_byte_tokenizer(folder)
    eos = load_tokenizer(folder).eos_token_id
    config = config_of(kind, contract, eos_token_id=eos, pad_token_id=eos, bos_token_id=None, **changes)
    write_checkpoint(folder, config, served(config, masters(config, seed), contract), None)
    return config
