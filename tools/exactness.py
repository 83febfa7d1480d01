"""Compare every trainer layout with every engine layout: the largest |Δ log p| of sampled tokens must be exactly 0 in each pair.

    python tools/exactness.py                                                   # everything, about half an hour on two cores
    python tools/exactness.py --families qwen3 --modes fp8 --train-tp 1,2 --rollout-tp 1,2 --pp 1 --cp 1
    python tools/exactness.py --families gpt_oss --modes bf16 --whole-experts   # its experts are never sharded in a trainer

For each family, the tool writes a random model of two layers. A real SGLang engine of each layout receives the weights by a sync and
samples with fixed seeds: prompts of 1 to 150 tokens in two turns, where the second turn reuses the first turn's KV cache. Models with
sparse attention select as many tokens (`index_topk`) as the longest sequence has. The gloo ranks of each trainer layout then compute the
log-probs of the tokens that the engines sampled. The exit code is 0 only if every pair that `megatron_rl.precision.exactness` promises to
be exact is 0. A pair without that promise shows its difference in brackets. `--json` writes the pairs of each trainer layout as soon as
they are known; the same command goes on after the pairs in that file.
"""

import json
import multiprocessing
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from megatron_rl.config import Config, TrainConfig  # sets how threads wait, so it comes before torch

# isort: split
import numpy as np
import torch
import typer
from harness import JsonFile, parse_names, parse_numbers, run_on_ranks, write_json, write_random_checkpoint
from rich.console import Console
from rich.table import Table

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import run_script
from megatron_rl.distributed import Rank0
from megatron_rl.errors import as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.base.names import freeze
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.mcore.weights.cache_scales import renew_scales
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.exactness import list_inexact
from megatron_rl.preflight import Facts, Needs, find_mistakes
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.row_sums import count_parts
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
_PAIR = ("family", "mode", "trainer", "engine")
_PROMPTS, _TOKENS = 32, 48
_LONGEST_PROMPT = 150
_SUFFIX = 5
"""Tokens that the second turn adds to the first turn."""
_LONGEST = _LONGEST_PROMPT + _TOKENS + _SUFFIX + _TOKENS
_SPARSE = {**_SIGMOID, **_LATENT, "index_topk": _LONGEST, "index_n_heads": 4, "index_head_dim": 128}
_WIDE_HEADS = {"qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
_SINKS = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 0.5, "head_dim": 64, "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
_ALL_HEADS = {"num_local_experts": 8, "num_experts_per_tok": 4, "rotary_dim": 64, "use_qk_norm": True}
_QWEN = {"use_sliding_window": False}
_HALF_ROTATED = {"attention_bias": True, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"mlp_bias": False}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "qwen2": ("Qwen2ForCausalLM", {**_QWEN, "hidden_size": 512}),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "glm4": ("Glm4ForCausalLM", _HALF_ROTATED),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_QWEN, **_SOFTMAX}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_HALF_ROTATED, **_SIGMOID, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_SIGMOID, **_LATENT}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _SPARSE),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**_SPARSE, **_WIDE_HEADS}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", _ALL_HEADS),
    "gpt_oss": ("GptOssForCausalLM", _SINKS),
}
"""Family -> (transformers class, settings on top of `_DENSE`). Every matrix product can be sharded over four ranks, although there are
only two key-value heads."""
MODES: dict[str, dict[str, Any]] = {
    "fp8": {"mode": "fp8_unified", "high": "bf16"},
    "fp8_fp32": {"mode": "fp8_unified", "high": "fp32"},
    "fp8_kv": {"mode": "fp8_unified", "high": "bf16", "kv": "e4m3"},
    "fp8_layer_kv": {"mode": "fp8_unified", "high": "bf16", "kv": "e4m3_per_layer"},
    "bf16": {"mode": "bf16", "high": "bf16"},
    "fp32": {"mode": "bf16", "high": "fp32"},
    "fp8_ranks": {"mode": "fp8_unified", "high": "bf16", "scale_format": "pow2", "reduction": "ranks"},
    "bf16_ranks": {"mode": "bf16", "high": "bf16", "reduction": "ranks"},
}

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of the prompt and of the response."""
Samples = dict[Turn, list[float]]
"""The engine's log-probs of each response."""


class Case(NamedTuple):
    family: str
    mode: str
    folder: Path

    def configure(self, layout: Layout, engine: EngineLayout) -> Config:
        sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "dp")}
        rollout = {"tp": engine.tp, "ep": engine.ep, "max_running_requests": 64, "max_total_tokens": 1 << 15, "start_timeout": 1200.0}
        lengths = {"data": {"max_prompt_tokens": _LONGEST - _TOKENS}, "rollout": {**rollout, "max_new_tokens": _TOKENS}}
        sections = {"precision": MODES[self.mode], "train": {"layout": sizes}, **lengths}
        return Config.model_validate({"model": {"path": self.folder}, **sections})

    def find_refusal(self, layout: Layout, engine: EngineLayout) -> str | None:
        """Return the message with which the preflight refuses the two layouts, or None if it accepts them."""
        config = self.configure(layout, engine)
        facts = Facts(config, hf_config=read_config(self.folder), path=self.folder)
        return next((str(error) for _, error in find_mistakes(facts, Needs.MODEL | Needs.LAYOUT | Needs.ENGINE)), None)

    def count_parts(self, layout: Layout, engine: EngineLayout) -> int:
        """Return the number of parts of row-parallel sums, by which the bits of "ranks" differ; 1 for other orders."""
        return count_parts(layout.tp, engine.tp) if MODES[self.mode].get("reduction") == "ranks" else 1

    def name_pair(self, layout: Layout, engine: EngineLayout) -> dict[str, str]:
        return dict(zip(_PAIR, (self.family, self.mode, format_layout(layout), format_layout(engine)), strict=True))

    def supports(self, layout: Layout | EngineLayout) -> bool:
        """Return whether the layout makes sense for the family: expert parallelism needs experts."""
        return layout.ep == 1 or ModelGeometry.from_hf_config(read_config(self.folder)).experts is not None


Sums = tuple[Case, int]
"""A case and its `Case.count_parts`."""


def write_case(family: str, mode: str, folder: Path) -> Case:
    """Write a random model, quantized if the mode computes in FP8 and the family supports it."""
    architecture, settings = FAMILIES[family]
    plain = folder / family
    if not plain.exists():
        plain.mkdir()
        make_byte_tokenizer(plain)
        write_random_checkpoint(plain, {"architectures": [architecture], "model_type": family, **_DENSE, **settings})
    case = Case(family, mode, plain)
    if MODES[mode]["mode"] == "bf16" or case.find_refusal(Layout(), EngineLayout()) is not None:
        return case
    quantized = folder / f"{family}_{mode}"
    convert(plain, quantized, MODES[mode])
    return Case(family, mode, quantized)


def sample(case: Case, engine: EngineLayout, tp: int, rank: int) -> Samples:
    """Sync the model from a one-rank trainer into a live engine of this layout, of a run whose trainer has this tp. Return what the engine
    samples in two turns."""
    start_megatron(Layout(), seed=0)
    config, (hf_config, contract, shards, model) = case.configure(Layout(tp=tp), engine), _load(case, Layout())
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
        return _sample_two_turns(server, hf_config["vocab_size"])
    finally:
        server.stop()


def _sample_two_turns(server: SGLangEngine, vocabulary: int) -> Samples:
    generator = np.random.default_rng(0)
    lengths = [1, 1, 2, 3, 15, 16, 17, 32, 33, 64, 65, 128, 129, *[_LONGEST_PROMPT] * 3]
    lengths += generator.integers(1, _LONGEST_PROMPT, _PROMPTS - len(lengths)).tolist()
    prompts = [generator.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    samples: Samples = {}
    for turn in range(2):
        seeds = [SamplingParams(1.0, _TOKENS, seed=1000 * turn + number) for number in range(len(prompts))]
        generations = server.generate(prompts, seeds)
        for prompt, generation in zip(prompts, generations, strict=True):
            samples[tuple(prompt.tolist()), tuple(generation.output_ids_T.tolist())] = generation.logprobs_T.tolist()
        suffixes = generator.integers(0, vocabulary, (len(prompts), _SUFFIX), dtype=np.int32)
        pairs = zip(prompts, generations, suffixes, strict=True)
        prompts = [np.concatenate([prompt, generation.output_ids_T, suffix]) for prompt, generation, suffix in pairs]
    return samples


def score(layout: Layout, cases: dict[Sums, list[Turn]], sequence_parallel: bool, rank: int) -> dict[Sums, Samples]:
    """Run on every trainer rank: return the trainer's log-probs of the responses of each case."""
    start_megatron(layout, seed=0)
    return {sums: _score_case(layout, *sums, turns, sequence_parallel) for sums, turns in cases.items()}


def _score_case(layout: Layout, case: Case, parts: int, turns: list[Turn], sequence_parallel: bool) -> Samples:
    *_, model = _load(case, layout, parts, sequence_parallel)
    samples = [TrainingSample(torch.tensor(prompt), torch.tensor(response)) for prompt, response in turns]
    logprobs, _ = Policy(model, 1.0, micro_batch_tokens=2048).compute_logprobs(samples)  # every replica computes all samples
    return {turn: values.tolist() for turn, values in zip(turns, logprobs, strict=True)}


def _load(case: Case, layout: Layout, parts: int = 1, sequence_parallel: bool = True) -> tuple[Any, PrecisionContract, Any, Any]:
    """Return (config.json, contract, shards, model) of this trainer rank."""
    hf_config = read_config(case.folder)
    contract = PrecisionContract.from_config(case.configure(layout, EngineLayout()).precision, parts)
    train = TrainConfig.model_validate({"layout": {"sequence_parallel": sequence_parallel}})
    shards, model = build_rank_shards(hf_config, layout), freeze(build_model(hf_config, layout, contract, train))
    load_checkpoint(model, case.folder, shards)
    if contract.scales_kv_by_layer:
        with renew_scales(model):
            tokens = torch.arange(hf_config["vocab_size"])
            Policy(model, 1.0, micro_batch_tokens=2048).compute_logprobs([TrainingSample(tokens, tokens[:1])])
    return hf_config, contract, shards, model


def list_trainer_layouts(whole_experts: bool, tps: list[int], pps: list[int], cps: list[int], eps: list[int]) -> list[Layout]:
    """Return all combinations. With expert parallelism, experts are not sharded, and there are as many replicas as `ep` needs."""
    return [
        Layout(tp=tp, pp=pp, cp=cp, ep=ep, etp=1 if ep > 1 or whole_experts else tp, dp=max(1, ep // (tp * cp)))
        for ep, cp, pp, tp in product(eps, cps, pps, tps)
    ]


def run(
    families: list[str], modes: list[str], trainers: list[Layout], engines: list[EngineLayout], sequence_parallel: bool, file: Path | None
) -> list[dict]:
    """Return one report for each case, trainer layout, and engine layout; those in `file` are known."""
    console = Console(width=120)
    cells = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else []
    known = {tuple(cell[name] for name in _PAIR) for cell in cells}
    with tempfile.TemporaryDirectory(prefix="megatron-rl-exactness-", ignore_cleanup_errors=True) as name:
        cases = [write_case(family, mode, Path(name)) for family, mode in product(families, modes)]
        open_pairs = [
            (case, layout, engine)
            for layout, case, engine in product(trainers, cases, engines)
            if case.supports(layout) and case.supports(engine) and tuple(case.name_pair(layout, engine).values()) not in known
        ]
        sampled: dict[tuple[Sums, EngineLayout], Samples] = {}
        for case, engine in product(cases, engines):
            own = [layout for other, layout, its_engine in open_pairs if (other, its_engine) == (case, engine)]
            widths = {case.count_parts(layout, engine): layout.tp for layout in own}  # for each number of parts, a trainer's tp
            for parts, tp in widths.items():
                if case.find_refusal(Layout() if parts == 1 else Layout(tp=tp), engine) is None:
                    start = time.perf_counter()
                    sampled[(case, parts), engine] = run_on_ranks(partial(sample, case, engine, tp), 1)
                    seconds = time.perf_counter() - start
                    console.print(f"{case.family} {case.mode}: engine {format_layout(engine)} sampled, parts {parts}, {seconds:.0f} s")
        for layout in trainers:
            pairs = [(case, engine) for case, own, engine in open_pairs if own == layout]
            turns: dict[Sums, list[Turn]] = {}  # equal bits sample equal tokens: each distinct turn is scored once
            for case, engine in pairs:
                sums = case, case.count_parts(layout, engine)
                if (samples := sampled.get((sums, engine))) and case.find_refusal(layout, EngineLayout()) is None:
                    turns[sums] = list(dict.fromkeys([*turns.get(sums, []), *samples]))
            start = time.perf_counter()
            scored = run_on_ranks(partial(score, layout, turns, sequence_parallel), layout.world_size) if turns else {}
            console.print(f"trainer {format_layout(layout)} scored, {time.perf_counter() - start:.0f} s")
            cells += [case.name_pair(layout, engine) | judge(case, layout, engine, scored, sampled) for case, engine in pairs]
            write_json(file, cells)
    return cells


def judge(case: Case, layout: Layout, engine: EngineLayout, scored: dict, sampled: dict) -> dict[str, Any]:
    """Return whether the two layouts are refused or exempt from the promise, and the largest |Δ log p| of the sampled tokens."""
    refusal = case.find_refusal(layout, engine)
    if refusal is not None:
        return {"refused": refusal, "tokens": 0, "largest": None, "not_promised": []}
    sums = case, case.count_parts(layout, engine)
    pairs = [pair for turn, ours in sampled[sums, engine].items() for pair in zip(scored[sums][turn], ours, strict=True)]
    largest = float(max(abs(trainer - engine_value) for trainer, engine_value in pairs))
    not_promised = list_inexact(case.configure(layout, engine), read_config(case.folder), on_gpu=False)
    return {"largest": largest, "tokens": len(pairs), "not_promised": not_promised, "refused": None}


def format_layout(layout: Layout | EngineLayout) -> str:
    """Return the sizes above 1, for example "tp2 pp2"."""
    sizes = [(name, getattr(layout, name)) for name in ("tp", "pp", "cp", "ep") if hasattr(layout, name)]
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"


def show(cells: list[dict[str, Any]], console: Console) -> None:
    """Print one table for each family and mode, with a row per trainer layout and a column per engine layout."""
    for family, mode in dict.fromkeys((cell["family"], cell["mode"]) for cell in cells):
        own = [cell for cell in cells if (cell["family"], cell["mode"]) == (family, mode)]
        engines = list(dict.fromkeys(cell["engine"] for cell in own))
        tokens = max(cell["tokens"] for cell in own)
        table = Table("trainer", *engines, title=f"{family} {mode}: {tokens} tokens per engine", title_justify="left", box=None)
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


def main(
    families: Annotated[str, typer.Option(help="Model families, separated by commas.")] = ",".join(FAMILIES),
    modes: Annotated[str, typer.Option(help=f"Some of {', '.join(MODES)}.")] = "fp8,bf16",
    train_tp: str = "1,2,4",
    pp: str = "1,2",
    cp: str = "1,2",
    ep: Annotated[str, typer.Option(help="ep of the trainer; families without experts use 1 only.")] = "1,2",
    rollout_tp: str = "1,2,4",
    rollout_ep: str = "1,2",
    whole_experts: Annotated[bool, typer.Option("--whole-experts", help="Never shard experts in a trainer; gpt_oss needs it.")] = False,
    sequence_parallel: bool = True,
    json_file: JsonFile = None,
) -> None:
    """Compare every trainer layout with every engine layout."""
    multiprocessing.set_forkserver_preload(["megatron_rl.mcore.actor", "rollout_sglang.engine"])  # otherwise every rank imports them
    console = Console(width=120)
    with as_user_error():
        trainers = list_trainer_layouts(whole_experts, *map(parse_numbers, (train_tp, pp, cp, ep)))
        pairs = product(parse_numbers(rollout_ep), parse_numbers(rollout_tp))
        engines = [EngineLayout(tp, ep) for ep, tp in pairs if tp % ep == 0]
        names = parse_names("--families", families, FAMILIES), parse_names("--modes", modes, MODES)
        cells = run(*names, trainers, engines, sequence_parallel, json_file)
    show(cells, console)
    promised = [cell for cell in cells if not cell["refused"] and not cell["not_promised"]]
    wrong = [cell for cell in promised if cell["largest"] != 0]
    console.print(
        f"{len(promised) - len(wrong)} of {len(promised)} promised cells are exactly 0; "
        f"{len(cells) - len(promised)} are refused or not promised."
    )
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    run_script(main)
