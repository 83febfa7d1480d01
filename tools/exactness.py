"""Tabulate the largest |dlogp| of sampled tokens for every trainer layout against every engine layout: each cell must be exactly 0.

    python tools/checks/exactness.py                                                   # everything, about half an hour on two cores
    python tools/checks/exactness.py --families qwen3 --modes fp8 --train-tp 1,2 --rollout-tp 1,2 --pp 1 --cp 1

Of each family a random model of two layers is written, in FP8 where the mode computes in it. A real SGLang engine of each layout, filled by
a sync, samples with seeds: prompts of one token to 150, two turns, the second upon the first's tokens and KV cache. Then gloo ranks
of each trainer layout compute the log-probs of the engines' own tokens. Exit code 0 only where every promised cell is 0
(`megatron_rl.precision.exactness`); a cell that is not promised shows its size, and one that the preflight refuses its line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from megatron_rl.config import Config  # sets how threads wait, so it comes before torch

# isort: split
import numpy as np
import torch
import typer
from real_widths import make_checkpoint
from rich.console import Console
from rich.table import Table
from verify_sync import run_on_ranks

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import Rank0
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.model import build_model, freeze, start_megatron
from megatron_rl.mcore.weights.cache_scales import renew_scales
from megatron_rl.mcore.weights.export import convert
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.exactness import list_inexact
from megatron_rl.preflight import Facts, Needs, find_mistakes
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

_DENSE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 384, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "attention_bias": False, "max_position_embeddings": 1024, "torch_dtype": "bfloat16", "bos_token_id": None,
}  # fmt: skip
_SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "head_dim": 64,
}  # fmt: skip
_SOFTMAX = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_QWEN = {"use_sliding_window": False}
_HALF_ROTATED = {"attention_bias": True, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"mlp_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", {**_QWEN, "hidden_size": 512}),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "glm4": ("Glm4ForCausalLM", _HALF_ROTATED),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_QWEN, **_SOFTMAX}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_HALF_ROTATED, **_SIGMOID, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_SIGMOID, **_LATENT}),
}
"""Family -> (its class in transformers, its settings over `_DENSE`): every product can be cut for four ranks, more than there are key-value
heads."""
MODES: dict[str, dict[str, Any]] = {
    "fp8": {"mode": "fp8_unified", "high": "bf16"},
    "fp8_fp32": {"mode": "fp8_unified", "high": "fp32"},
    "fp8_kv": {"mode": "fp8_unified", "high": "bf16", "kv": "e4m3"},
    "fp8_layer_kv": {"mode": "fp8_unified", "high": "bf16", "kv": "e4m3_per_layer"},
    "bf16": {"mode": "bf16", "high": "bf16"},
    "fp32": {"mode": "bf16", "high": "fp32"},
}
_PROMPTS, _TOKENS = 32, 48
_LONGEST_PROMPT = 150
_SUFFIX = 5
"""Tokens that the second turn adds to the first one's."""

Answers = list[tuple[list[int], list[int], list[float]]]
"""Prompt, answer, and the engine's log-probs of the answer, of each request."""


class Case(NamedTuple):
    """A model in a precision."""

    family: str
    mode: str
    folder: Path

    def configure(self, layout: Layout, engine: EngineLayout) -> Config:
        """Return a run's configuration."""
        sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
        rollout = {"tp": engine.tp, "ep": engine.ep, "max_running_requests": 64, "max_total_tokens": 1 << 15, "start_timeout": 1200.0}
        sections = {"precision": MODES[self.mode], "rollout": rollout, "train": {"layout": sizes}}
        return Config.model_validate({"model": {"path": self.folder}, **sections})

    def find_refusal(self, layout: Layout, engine: EngineLayout) -> str | None:
        """Return the line with which the preflight refuses the two layouts."""
        config = self.configure(layout, engine)
        facts = Facts(config, hf_config=read_config(self.folder), path=self.folder)
        return next((str(error) for _, error in find_mistakes(facts, Needs.MODEL | Needs.LAYOUT | Needs.ENGINE)), None)


def write_case(family: str, mode: str, folder: Path) -> Case:
    """Write a random model as both sides load it."""
    architecture, settings = FAMILIES[family]
    plain = folder / family
    if not plain.exists():
        plain.mkdir()
        make_byte_tokenizer(plain)
        make_checkpoint(plain, {"architectures": [architecture], "model_type": family, **_DENSE, **settings}, std=0.05)
    if MODES[mode]["mode"] == "bf16":
        return Case(family, mode, plain)
    quantized = folder / f"{family}_{mode}"
    convert(plain, quantized, MODES[mode])
    return Case(family, mode, quantized)


def sample(case: Case, engine: EngineLayout, rank: int) -> Answers:
    """Run on the one rank of a trainer: return what a live engine of this layout answers in two turns, once a sync has filled it."""
    start_megatron(Layout(), seed=0)
    config, (hf_config, contract, shards, model) = case.configure(Layout(), engine), _load(case, Layout())
    folder = Path(tempfile.mkdtemp(dir=case.folder.parent))
    write_all_but_weights(folder, describe_weights(hf_config, contract), case.folder)
    server = SGLangEngine(EngineLaunchSpec(config, folder, folder, empty=True))
    try:
        server.wait_until_ready()
        geometry = ModelGeometry.from_hf_config(hf_config)
        plan = SyncPlan.make(geometry, Layout(), config.rollout.to_layout(), contract, config.sync.chunk_bytes)
        sync = WeightSync(plan, Rank0(lambda: server), partial(collect_named_tensors, model, shards, contract), config.sync)
        sync.run(0)
        sync.close()
        return _take_turns(server, hf_config["vocab_size"])
    finally:
        server.stop()


def _take_turns(server: SGLangEngine, vocabulary: int) -> Answers:
    generator = np.random.default_rng(0)
    lengths = [1, 1, 2, 3, 15, 16, 17, 32, 33, 64, 65, 128, 129]
    lengths += generator.integers(1, _LONGEST_PROMPT, _PROMPTS - len(lengths)).tolist()
    prompts = [generator.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    answers: Answers = []
    for turn in range(2):
        seeds = [SamplingParams(1.0, _TOKENS, seed=1000 * turn + number) for number in range(len(prompts))]
        generations = server.generate(prompts, seeds)
        for prompt, generation in zip(prompts, generations, strict=True):
            answers.append((prompt.tolist(), generation.output_ids_T.tolist(), generation.logprobs_T.tolist()))
        suffixes = generator.integers(0, vocabulary, (len(prompts), _SUFFIX), dtype=np.int32)
        pairs = zip(prompts, generations, suffixes, strict=True)
        prompts = [np.concatenate([prompt, generation.output_ids_T, suffix]) for prompt, generation, suffix in pairs]
    return answers


def score(layout: Layout, cases: dict[Case, list[tuple[list[int], list[int]]]], rank: int) -> dict[Case, list[list[float]]]:
    """Run on every trainer rank: return the log-probs of the answers of each case."""
    start_megatron(layout, seed=0)
    return {case: _score_case(layout, case, answers) for case, answers in cases.items()}


def _score_case(layout: Layout, case: Case, answers: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    *_, model = _load(case, layout)
    samples = [TrainingSample(torch.tensor(prompt), torch.tensor(answer)) for prompt, answer in answers]
    logprobs, _ = Policy(model, 1.0, micro_batch_tokens=2048).compute_logprobs(samples)  # every replica computes all
    return [values.tolist() for values in logprobs]


def _load(case: Case, layout: Layout) -> tuple[Any, PrecisionContract, Any, Any]:
    """Return this rank's part of the trainer's model."""
    hf_config = read_config(case.folder)
    contract = PrecisionContract.from_config(case.configure(layout, EngineLayout()).precision)
    shards, model = build_rank_shards(hf_config, layout), freeze(build_model(hf_config, layout, contract))
    load_checkpoint(model, case.folder, shards)
    if contract.scales_kv_by_layer:
        with renew_scales(model):
            tokens = torch.arange(hf_config["vocab_size"])
            Policy(model, 1.0, micro_batch_tokens=2048).compute_logprobs([TrainingSample(tokens, tokens[:1])])
    return hf_config, contract, shards, model


def list_trainer_layouts(tps: list[int], pps: list[int], cps: list[int], eps: list[int]) -> list[Layout]:
    """Return them; with expert parallelism experts are whole, and there are as many replicas as it needs."""
    return [
        Layout(tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if ep > 1 else tp, dp=max(1, ep // (tp * cp)))
        for ep, cp, pp, tp in product(eps, cps, pps, tps)
    ]


def measure(scored: list[list[float]], answers: Answers, index: dict[tuple[tuple[int, ...], tuple[int, ...]], int]) -> float:
    """Return the largest |dlogp| of an engine's answers."""
    ours = [scored[index[tuple(prompt), tuple(answer)]] for prompt, answer, _ in answers]
    pairs = zip(ours, answers, strict=True)
    return max(abs(a - b) for own, (_, _, engine) in pairs for a, b in zip(own, engine, strict=True))


def run(families: list[str], modes: list[str], trainers: list[Layout], engines: list[EngineLayout], console: Console) -> list[dict]:
    """Return the cells."""
    cells = []
    with tempfile.TemporaryDirectory(prefix="megatron-rl-exactness-", ignore_cleanup_errors=True) as name:
        cases = [write_case(family, mode, Path(name)) for family, mode in product(families, modes)]
        answers: dict[Case, dict[EngineLayout, Answers]] = {case: {} for case in cases}
        for case, engine in product(cases, engines):
            if (has_experts(case.family) or engine.ep == 1) and case.find_refusal(Layout(), engine) is None:
                start = time.perf_counter()
                answers[case][engine] = run_on_ranks(partial(sample, case, engine), 1)
                console.print(f"{case.family} {case.mode}: engine {name_of(engine)} sampled, {time.perf_counter() - start:.0f} s")
        index = {case: number_answers(answers[case]) for case in cases}
        for layout in trainers:
            own = [case for case in cases if has_experts(case.family) or layout.ep == 1]
            asked = {
                case: [(list(a), list(b)) for a, b in index[case]] for case in own if case.find_refusal(layout, EngineLayout()) is None
            }
            start = time.perf_counter()
            scored = run_on_ranks(partial(score, layout, asked), layout.world_size) if asked else {}
            console.print(f"trainer {name_of(layout)} scored, {time.perf_counter() - start:.0f} s")
            for case, engine in product(own, engines):
                if has_experts(case.family) or engine.ep == 1:
                    cell = {"family": case.family, "mode": case.mode, "trainer": name_of(layout), "engine": name_of(engine)}
                    cells.append(cell | judge(case, layout, engine, scored, answers, index))
    return cells


def judge(case: Case, layout: Layout, engine: EngineLayout, scored: dict, answers: dict, index: dict) -> dict[str, Any]:
    """Return a cell's figures."""
    refusal = case.find_refusal(layout, engine)
    if refusal is not None:
        return {"refused": refusal, "tokens": 0, "largest": None, "not_promised": []}
    not_promised = list_inexact(case.configure(layout, engine), read_config(case.folder), on_gpu=False)
    sampled = answers[case][engine]
    tokens = sum(len(answer) for _, answer, _ in sampled)
    return {"largest": float(measure(scored[case], sampled, index[case])), "tokens": tokens, "not_promised": not_promised, "refused": None}


def number_answers(answers: dict[EngineLayout, Answers]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Number the different answers of all engines: equal bits sample equal tokens, which are scored once."""
    different = dict.fromkeys((tuple(prompt), tuple(answer)) for each in answers.values() for prompt, answer, _ in each)
    return {answer: number for number, answer in enumerate(different)}


def has_experts(family: str) -> bool:
    return "moe_intermediate_size" in FAMILIES[family][1]


def name_of(layout: Layout | EngineLayout) -> str:
    """Return "tp2 pp2" for the sizes above 1."""
    sizes = [(name, getattr(layout, name)) for name in ("tp", "pp", "cp", "ep") if hasattr(layout, name)]
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"


def show(cells: list[dict[str, Any]], console: Console) -> None:
    """Print a table of each family and mode: trainers down, engines across."""
    for family, mode in dict.fromkeys((cell["family"], cell["mode"]) for cell in cells):
        own = [cell for cell in cells if (cell["family"], cell["mode"]) == (family, mode)]
        engines = list(dict.fromkeys(cell["engine"] for cell in own))
        tokens = max(cell["tokens"] for cell in own)
        table = Table("trainer", *engines, title=f"{family} {mode}: {tokens} tokens of each engine", title_justify="left", box=None)
        for trainer in dict.fromkeys(cell["trainer"] for cell in own):
            table.add_row(trainer, *(format_cell(cell) for cell in own if cell["trainer"] == trainer))
        console.print(table)
    for line in dict.fromkeys(reason for cell in cells for reason in (*cell["not_promised"], cell["refused"]) if reason):
        console.print(line)


def format_cell(cell: dict[str, Any]) -> str:
    if cell["refused"]:
        return "refused"
    value = "0" if cell["largest"] == 0 else f"{cell['largest']:.1e}"
    return f"({value})" if cell["not_promised"] else value


def parse_list(option: str, text: str, allowed: dict[str, Any]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in allowed]:
        raise UserError(option, ",".join(unknown), f"must be some of {', '.join(allowed)}", "correct it")
    return names


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(
    families: Annotated[str, typer.Option(help="Some of them.")] = ",".join(FAMILIES),
    modes: Annotated[str, typer.Option(help=f"Some of {', '.join(MODES)}.")] = "fp8,bf16",
    train_tp: str = "1,2,4",
    pp: str = "1,2",
    cp: str = "1,2",
    ep: Annotated[str, typer.Option(help="Of the trainer; families without experts have 1.")] = "1,2",
    rollout_tp: str = "1,2,4",
    rollout_ep: str = "1,2",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the cells here.")] = None,
) -> None:
    """Compare every trainer layout with every engine layout."""
    console = Console(width=120)
    try:
        trainers = list_trainer_layouts(*map(parse_numbers, (train_tp, pp, cp, ep)))
        pairs = product(parse_numbers(rollout_ep), parse_numbers(rollout_tp))
        engines = [EngineLayout(tp, ep) for ep, tp in pairs if tp % ep == 0]
        cells = run(parse_list("--families", families, FAMILIES), parse_list("--modes", modes, MODES), trainers, engines, console)
    except (MegatronRLError, GeometryError) as error:
        print(getattr(error, "log_tail", ""), f"exactness: {error}", sep="\n", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    show(cells, console)
    if json_file:
        json_file.write_text(json.dumps(cells, indent=1) + "\n")
    wrong = [cell for cell in cells if not cell["refused"] and not cell["not_promised"] and cell["largest"] != 0]
    promised = sum(not cell["refused"] and not cell["not_promised"] for cell in cells)
    console.print(
        f"{promised - len(wrong)} of {promised} promised cells are exactly 0; {len(cells) - promised} are refused or not promised."
    )
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
