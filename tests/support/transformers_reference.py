"""Reference computations by Hugging Face transformers, to compare Megatron and the engine with."""

import math
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from megatron_rl.config import PrecisionConfig
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.kernels.linear.reference import fprop
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import FP8
from support.models import masters, served


def logits(folder, ids):
    """Return float32 `[b, s, vocab]` of the checkpoint, computed in float32."""
    with torch.no_grad():
        return _load(folder)(torch.tensor(ids)).logits


def text_logprobs(folder, documents, high):
    """Return the log-probs of every token but the first of each document, computed in "fp32" or "bf16"."""
    model = _load(folder, torch.bfloat16 if high == "bf16" else torch.float32)
    with torch.no_grad():
        return torch.cat([_answer(model, ids[:1], ids[1:]) for ids in documents])


def grpo(folder, sequences, kl_coef):
    """Compute PPO's clipped loss with a k3 term, the mean over sampled tokens, token by token. Return the metrics of a step of
    `train_grpo`, and `logprobs`, float32 `[tokens]`, of all sampled tokens.

    `sequences` are fields of `TrainingSample`.
    """
    model = _load(folder)
    model.get_input_embeddings().padding_idx = None  # transformers gives the padding token, which is the end token too, no gradient
    policy, kl, entropies, logprobs = [], [], [], []
    for sample in sequences:
        ids = sample["prompt_ids"].tolist() + sample["response_ids"].tolist()
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        count = 0
        response = zip(sample["response_ids"].tolist(), sample["response_mask"].tolist(), strict=True)
        for position, (token, sampled) in enumerate(response, len(sample["prompt_ids"])):
            if not sampled:
                continue
            row, old, reference = rows[position - 1], float(sample["old_logprobs"][count]), float(sample["reference_logprobs"][count])
            ratio = (row[token] - old).exp()
            policy.append(-torch.minimum(ratio * sample["advantage"], ratio.clamp(0.8, 1.2) * sample["advantage"]))
            kl.append((reference - row[token]).exp() - (reference - row[token]) - 1)
            entropies.append(-(row.exp() * row).sum())
            logprobs.append(row[token])
            count += 1
    means = [torch.stack(values).mean() for values in (policy, kl, entropies)]
    loss = means[0] + kl_coef * means[1]
    loss.backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
    names = "loss/policy", "loss/kl", "entropy", "loss/total", "grad_norm"
    metrics = dict(zip(names, map(float, [*means, loss, norm]), strict=True))
    return {**metrics, "logprobs": torch.stack(logprobs).detach()}


def fp8_logprobs(hf_config, seed, precision, sequences):
    """Return the log-probs of all responses' tokens, concatenated, for `support.models.masters` with the contract's precision flow.

    The model is transformers', in float32, with dequantized blocks as weights. Only `F.linear` quantizes its input if its weight is one of
    those. kv_b_proj is left out, because an engine with absorbed MLA multiplies its blocks with inputs that are not quantized. `sequences`
    are (prompt, response) pairs.
    """
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate(precision))
    tensors = served(hf_config, masters(hf_config, seed), contract)
    fp8 = [name for name in tensors if FP8.scale_name(name) in tensors]
    values = {
        name: dequantize_weight(QuantizedWeight(tensor, tensors[FP8.scale_name(name)])) if name in fp8 else tensor.float()
        for name, tensor in tensors.items()
    }
    values = {name: value for name, value in values.items() if not name.endswith("_scale_inv")}
    with tempfile.TemporaryDirectory() as folder:
        config = {key: value for key, value in hf_config.items() if key != "quantization_config"}
        write_checkpoint(Path(folder), {**config, "torch_dtype": "float32"}, values, None)
        model = _load(Path(folder))
    linear = functional.linear
    quantized = _weight_addresses(model) if fp8 else set()

    def flow(x, weight, bias=None):
        if weight.data_ptr() not in quantized:
            return linear(x, weight, bias)
        y = fprop(x, weight, contract.scale_format)
        return y if bias is None else y + bias

    functional.linear = flow
    try:
        with torch.no_grad():
            return torch.cat([_answer(model, prompt, answer) for prompt, answer in sequences])
    finally:
        functional.linear = linear


def peft_logprobs(base, adapters, sequences):
    """Return the float32 log-probs of all responses' tokens of a checkpoint, without and with adapters that PEFT loads. Fail if an
    adapter has no place, or a place has no adapter. `sequences` are (prompt, response) pairs."""
    sys.path.append(f"{sys.prefix}/peft")  # launch/requirements-peft.txt
    from peft import PeftModel

    model = _load(base)
    with torch.no_grad():
        plain = torch.cat([_answer(model, *sequence) for sequence in sequences])
        with warnings.catch_warnings(action="error"):
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # PEFT's own, which it does use
            model = PeftModel.from_pretrained(model, adapters)
        return plain, torch.cat([_answer(model, *sequence) for sequence in sequences])


def _load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager", local_files_only=True
    )


def _weight_addresses(model):
    """Return the addresses of the weights of FP8 linear layers, including each expert's."""
    addresses = set()
    for name, weight in model.named_parameters():
        if "_proj" in name and "kv_b_proj" not in name and weight.dim() > 1:
            addresses |= {expert.data_ptr() for expert in weight} if weight.dim() == 3 else {weight.data_ptr()}
    return addresses


def _answer(model, prompt, answer):
    logprobs = model(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]


def value_step(folder, sequences, cliprange):
    """Compute the first step of a critic token by token. Return its values float32 `[tokens]`, its loss and the norm of its gradient.
    `sequences` are fields of `TrainingSample` with `values` and `returns`; the checkpoint has a `score.weight`."""
    model, head = _load(folder).model, load_file(folder / "model.safetensors")["score.weight"].requires_grad_()
    model.get_input_embeddings().padding_idx = None
    values, losses = [], []
    for sample in sequences:
        ids = sample["prompt_ids"].tolist() + sample["response_ids"].tolist()
        of_tokens = (model(torch.tensor([ids])).last_hidden_state[0] @ head.t())[:, 0]
        mask = sample["response_mask"].tolist() or [True] * len(sample["response_ids"])
        own = of_tokens[len(sample["prompt_ids"]) - 1 : -1][torch.tensor(mask)]
        values.append(own)
        bounded = sample["values"] + (own - sample["values"]).clamp(-cliprange, cliprange)
        losses.append(torch.maximum((own - sample["returns"]) ** 2, (bounded - sample["returns"]) ** 2) / 2)
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in (*model.parameters(), head)]).sum().sqrt()
    return {"values": torch.cat(values).detach(), "loss": float(loss), "grad_norm": float(norm)}


def mtp_loss(folder, sequences):
    """Return the cross-entropy of the first layer for multi-token prediction per response token, computed as a model of one layer.

    `sequences` are fields of `TrainingSample`.
    """
    tensors, hf_config, model = load_file(folder / "model.safetensors"), read_config(folder), _load(folder)
    prefix = f"model.layers.{hf_config['num_hidden_layers']}."
    own = {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
    renamed = {f"model.layers.0.{name}": tensor for name, tensor in own.items() if re.match("self_attn|mlp|input|post", name)}
    renamed |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    with tempfile.TemporaryDirectory() as other:
        changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "torch_dtype": "float32"}
        write_checkpoint(Path(other), {**hf_config, **changes}, renamed | {"model.norm.weight": own["shared_head.norm.weight"]}, None)
        layer = _load(Path(other))
    eps, losses, answers = hf_config["rms_norm_eps"], [], 0
    for sample in sequences:
        ids = torch.tensor([sample["prompt_ids"].tolist() + sample["response_ids"].tolist()])
        start, mask = len(sample["prompt_ids"]), sample["response_mask"]
        sampled = start + torch.arange(len(sample["response_ids"]))[mask if len(mask) else slice(None)]
        answers += len(sampled)
        with torch.no_grad():
            hidden, embedded = model.model(ids[:, :-1]).last_hidden_state, model.get_input_embeddings()(ids[:, 1:])
            width = hidden.shape[-1:]
            parts = (
                functional.rms_norm(embedded, width, own["enorm.weight"], eps),
                functional.rms_norm(hidden, width, own["hnorm.weight"], eps),
            )
            logits = layer(inputs_embeds=torch.cat(parts, -1) @ own["eh_proj.weight"].t()).logits[0].log_softmax(-1)
        losses += [-float(logits[place - 2, ids[0, place]]) for place in sampled.tolist() if place >= 2]
    return math.fsum(losses) / answers
