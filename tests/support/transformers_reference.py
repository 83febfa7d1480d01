"""Reference computations by Hugging Face transformers, to compare Megatron and the engine with."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager" if "gpt_oss" in (folder / "config.json").read_text() else "sdpa",
        experts_implementation="eager",
        local_files_only=True,
    )


def logits(folder, ids):
    """Return float32 `[b, s, vocab]` of the checkpoint, computed in float32."""
    with torch.no_grad():
        return load(folder)(torch.tensor(ids)).logits


class _InFloat64(TorchDispatchMode):
    """Context manager in which no tensor is made or cast to float32, which transformers' norms and gated delta nets do in any model."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else kwargs))


def float64_logits(folder, ids):
    """Return `logits` computed in float64, `[b, s, vocab]`. Frequencies of rotary positions are the float32 numbers."""
    model = load(folder).double()
    model.set_attn_implementation("eager")
    with torch.no_grad(), _InFloat64():
        found = model(torch.tensor(ids)).logits
    assert found.dtype is torch.float64
    return found


def response_logprobs(model, sequences):
    """Return the float32 log-probs of all responses' tokens, concatenated. `sequences` are (prompt, response) pairs."""

    def score(prompt, response):
        rows = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        return rows.gather(1, torch.tensor(response)[:, None])[:, 0]

    with torch.no_grad():
        return torch.cat([score(*sequence) for sequence in sequences])
