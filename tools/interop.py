"""The parts of tools/interop.sh that run in environments of other programs: generate from an export, and score what others generated.

Imports nothing of this project. A command is a function that takes strings and returns what is printed. Generated samples are JSON: rows of
prompt's ids, response's ids, and the response's log-probs or null.
"""

import json
import os
import random
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[tuple[list[int], list[int], list[float] | None]]
TOKENS = 16


def make_prompts() -> list[str]:
    """Return 16 sums, as in the quickstart's task."""
    numbers = random.Random(0)
    return [f"{numbers.randint(1, 9)}+{numbers.randint(1, 9)}=" for _ in range(16)]


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def save(rows: Rows, file: str) -> str:
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    return f"{len(rows)} responses, {sum(len(row[1]) for row in rows)} tokens"


def generate_by_vllm(model: str, output: str) -> str:
    """Generate greedily in float32."""
    from vllm import LLM, SamplingParams

    tokenizer = load_tokenizer(model)
    llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=8, enforce_eager=True)
    prompts = [tokenizer.encode(prompt) for prompt in make_prompts()]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    rows: Rows = []
    for request in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params):
        response = request.outputs[0]
        logprobs = [row[token].logprob for row, token in zip(response.logprobs, response.token_ids, strict=True)]
        rows.append((request.prompt_token_ids, list(response.token_ids), logprobs))
    return save(rows, output)


def generate_by_server(url: str, model: str, output: str) -> str:
    """Generate greedily through OpenAI's interface."""
    tokenizer = load_tokenizer(model)
    rows: Rows = []
    for prompt in make_prompts():
        body = {"model": Path(model).name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
        headers = {"Authorization": "Bearer interop", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        choice = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]
        response = tokenizer.encode(choice["text"])  # one token per byte; without the end token, whose log-prob comes last
        rows.append((tokenizer.encode(prompt), response, choice["logprobs"]["token_logprobs"][: len(response)]))
    return save(rows, output)


def read_completions(file: str, model: str, output: str) -> str:
    """Read the greedy completions of an evaluation."""
    tokenizer, lines = load_tokenizer(model), [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return save([(tokenizer.encode(line["prompt"]), tokenizer.encode(line["text"]), None) for line in lines], output)


def load_model(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).float().eval()


def score(model: str, generated: str, bound: str, share: str, adapters: str = "") -> str:
    """Score rows by transformers in float32. Fail if too few tokens are its most probable ones, or a log-prob is off by over `bound`."""
    loaded, rows = load_model(model), json.loads(Path(generated).read_text(encoding="utf-8"))
    most_probable, differences = _compare(loaded, rows)
    tokens, without = sum(len(row[1]) for row in rows), ""
    if adapters:
        from peft import PeftModel

        plain = most_probable
        most_probable, differences = _compare(PeftModel.from_pretrained(loaded, adapters).eval(), rows)
        without = f", {plain} without the adapters"
        assert plain < most_probable, f"the adapters change nothing: {plain} tokens are the most probable ones with and without them"
    text = f"{most_probable} of {tokens} tokens are the most probable ones{without}"
    if differences:
        text += f"; log-probs differ by {sum(differences) / len(differences):.1e} on average and at most {max(differences):.1e}"
    assert tokens and most_probable >= float(share) * tokens and all(difference <= float(bound) for difference in differences), text
    return text


def _compare(model: Any, rows: Rows) -> tuple[int, list[float]]:
    """Return how many responses' tokens are the most probable ones, and the absolute differences of log-probs."""
    import torch

    most_probable, differences = 0, []
    for prompt, response, logprobs in rows:
        with torch.inference_mode():
            table = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        tokens = torch.tensor(response)
        most_probable += int((table.argmax(-1) == tokens).sum())
        if logprobs is not None:
            differences += (table.gather(1, tokens[:, None])[:, 0] - torch.tensor(logprobs)).abs().tolist()
    return most_probable, differences


def dequantize(model: str) -> str:
    """Compare what transformers loads from an FP8 export with bytes times scales."""
    import torch
    from safetensors.torch import load_file

    stored = {name: tensor for file in Path(model).glob("*.safetensors") for name, tensor in load_file(file).items()}
    loaded, blocks = load_model(model).state_dict(), 0
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        values = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            values, blocks = values * scales[: len(values), : values.shape[1]], blocks + 1
        assert torch.equal(values, loaded[name].float()), f"{name} differs"
    assert blocks, "the export has no FP8 tensor"
    return f"{len(loaded)} tensors are equal, {blocks} of them quantized"


def write_tasks(path: str) -> str:
    """Write tasks of lm-eval-harness: one generates, the other compares log-probs of two answers."""
    folder = Path(path)
    folder.mkdir()
    rows = [{"question": prompt, "answer": str(sum(map(int, prompt[:-1].split("+"))))} for prompt in make_prompts()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}, "test_split": "test"}
    common |= {"doc_to_text": "{{question}}", "target_delimiter": ""}
    generation = {"until": ["\n"], "max_gen_toks": TOKENS, "temperature": 0, "do_sample": False}
    generate = {"output_type": "generate_until", "doc_to_target": "{{answer}}", "generation_kwargs": generation}
    choose = {"output_type": "multiple_choice", "doc_to_choice": ["{{answer}}", "1{{answer}}0"], "doc_to_target": 0}
    for name, task, metric in (("generate", generate, "exact_match"), ("choose", choose, "acc")):
        content = {"task": f"interop_{name}", **common, **task, "metric_list": [{"metric": metric}], "metadata": {"version": 1}}
        (folder / f"{name}.yaml").write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return f"2 tasks of {len(rows)} rows"


COMMANDS: dict[str, Callable[..., str]] = {
    "vllm": generate_by_vllm,
    "served": generate_by_server,
    "completions": read_completions,
    "score": score,
    "dequantize": dequantize,
    "tasks": write_tasks,
}

if __name__ == "__main__":
    print(COMMANDS[sys.argv[1]](*sys.argv[2:]), flush=True)
    os._exit(0)  # vLLM's threads may outlive its work
