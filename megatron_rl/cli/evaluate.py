"""The command `eval`: samples and scores completions of one or two checkpoints, with one engine at a time and no trainer.

DIR/eval.json                 all results (docs/guides/evaluation.md)
DIR/completions.jsonl         all completions, written as they are scored
DIR/eval.html                 a page with the tables
DIR/checkpoint/, baseline/    engine logs
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.reading import parse_number
from megatron_rl.data import load_held_out
from megatron_rl.errors import UserError
from megatron_rl.evaluation.checkpoint import EvalCheckpoint, check_checkpoint
from megatron_rl.evaluation.sampling import append_completions, sample
from megatron_rl.evaluation.statistics import CONFIDENCE, powers_of_two
from megatron_rl.evaluation.tallies import Tally, build_table, compare_tallies
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.vocabulary import check_vocabulary
from megatron_rl.observability.console import ProgressDisplay
from megatron_rl.observability.files import make_unique_folder, replace_file
from megatron_rl.preflight import EVAL, Facts, check
from megatron_rl.redaction import redact_data
from megatron_rl.reporting.eval_page import print_results, write_page
from megatron_rl.reporting.eval_text import SCHEMA
from megatron_rl.rewards.scorer import Scorer, check_rewards, check_verdicts
from megatron_rl.rollout.engine_pool import start_engines
from megatron_rl.rollout.generation import check_chat_template, check_turns, make_sampler, start_environments
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.types import Problem, Reward, SamplingParams
from megatron_rl.versions import collect_versions


@dataclass(frozen=True)
class EvalRequest:
    """Options of the command line."""

    checkpoint: Path
    baseline: Path | None = None
    at: str | None = None  # values of k for pass@k and maj@k, or None for powers of two
    output: Path | None = None  # None uses the default of `choose_output_folder`

    def list_ks(self, samples: int) -> list[int]:
        """Return the values of k to report for `samples` completions per problem, ascending. Raise UserError for invalid values."""
        if self.at is None:
            return powers_of_two(samples)
        numbers = {parse_number(word, 1, 1 << 40) for word in self.at.split(",")}
        ks = sorted(number for number in numbers if number is not None)
        if None in numbers:
            raise UserError("--at", self.at, "must be positive integers separated by commas", "write for example --at 1,8,64")
        if ks[-1] > samples:
            rule = f"requires {ks[-1]} completions per problem, but there are {samples}"
            raise UserError("--at", self.at, rule, f"use --samples {ks[-1]} or more")
        return ks


def evaluate(config: Config, request: EvalRequest) -> Path:
    """Evaluate and return the folder with the results. Raise UserError before an engine starts, or RunError if an engine fails. Completions
    scored until then remain in completions.jsonl."""
    samples, sampling = config.eval.samples, config.to_eval_sampling()
    ks = request.list_ks(samples)
    if not config.data.eval:
        raise UserError("data.eval", None, "is empty, so there is nothing to evaluate", "set it to held-out problems")
    if request.output is not None and os.path.lexists(request.output) and _holds_something(request.output):
        raise UserError("--output", str(request.output), "exists and is not an empty folder", "use a new folder")
    check(Facts.here(config), EVAL)
    checkpoints = {"checkpoint": check_checkpoint(request.checkpoint, "--checkpoint", config)}
    if request.baseline is not None:
        checkpoints["baseline"] = check_checkpoint(request.baseline, "--baseline", config)
    tokenizer = load_tokenizer(checkpoints["checkpoint"].tokenizer)
    check_chat_template(config, tokenizer)
    problems = load_held_out(config, tokenizer)
    if not problems:
        raise UserError("data.eval", config.data.eval, "contains no problems", "use another file")
    check_rewards(config.reward, problems)
    check_turns(config, tokenizer, problems)
    folder = choose_output_folder(config, request, checkpoints["checkpoint"])
    started = _now()
    tallies, seconds = _sample(config, sampling, checkpoints, problems, folder, tokenizer.chat_template)
    results = {
        "schema": SCHEMA,
        "started": started,
        "ended": _now(),
        "argv": sys.argv,
        "versions": collect_versions(),
        "config": config.model_dump(mode="json"),
        "sampling": {"samples": samples, **asdict(replace(sampling, seed=config.train.seed))},
        "ks": ks,
        "confidence": CONFIDENCE,
        "sides": {
            name: {
                "path": str(checkpoint.folder),
                "step": checkpoint.step,
                "seconds": seconds[name],
                "problems": [asdict(tally) for tally in tallies[name]],
                "table": build_table(tallies[name], ks),
            }
            for name, checkpoint in checkpoints.items()
        },
        "comparison": compare_tallies(tallies["checkpoint"], tallies["baseline"], ks) if "baseline" in tallies else [],
    }
    replace_file(folder / "eval.json", json.dumps(redact_data(results), indent=1) + "\n")
    write_page(folder)
    print_results(results)
    return folder


def _holds_something(path: Path) -> bool:
    return not os.path.isdir(path) or any(os.scandir(path))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def choose_output_folder(config: Config, request: EvalRequest, checkpoint: EvalCheckpoint) -> Path:
    """Create and return the folder for the results: --output, RUN_DIR/eval/step_N for a run's checkpoint, or LOG.DIR/eval/NAME."""
    try:
        if request.output is not None:
            request.output.mkdir(mode=0o700, parents=True, exist_ok=True)
            return request.output
        return make_unique_folder((checkpoint.run_dir or config.log.dir) / "eval", request.checkpoint.resolve().name)
    except OSError as error:
        raise UserError("--output", None, f"the folder cannot be created ({error})", "use a folder that you can write to") from None


def _sample(
    config: Config,
    sampling: SamplingParams,
    checkpoints: dict[str, EvalCheckpoint],
    problems: list[Problem],
    folder: Path,
    chat_template: str | Mapping[str, str] | None,
) -> tuple[dict[str, list[Tally]], dict[str, float]]:
    """Return the tallies of all problems and the duration of sampling and scoring in seconds, by checkpoint."""
    samples, total = config.eval.samples, len(problems) * config.eval.samples
    with ExitStack() as resources:
        display = ProgressDisplay(len(checkpoints) * total)
        resources.callback(display.close)
        display.print_line(f"results: {folder}")
        temporary = tempfile.TemporaryDirectory(prefix=".models-", dir=folder, ignore_cleanup_errors=True)  # the checkpoints are large
        converted = Path(resources.enter_context(temporary))
        models = {name: checkpoint.prepare(config, converted / name) for name, checkpoint in checkpoints.items()}
        scorer = resources.enter_context(Scorer(config.reward, display.print_line, chat_template))
        environments = start_environments(config, resources)
        file = resources.enter_context((folder / "completions.jsonl").open("a", encoding="utf-8"))
        chunk = config.rollout.max_running_requests * config.rollout.engines
        tallies: dict[str, list[Tally]] = {}
        seconds: dict[str, float] = {}
        done, rewards = 0, list[Reward]()

        def record(name: str, scored: Any) -> None:
            nonlocal done
            append_completions(file, name, scored)
            rewards.extend(outcome.reward for _, _, outcome in scored)
            done += len(scored)
            display.set_step(done)

        # a restarted engine would wait for a weight sync, which never happens here
        rollout = config.rollout.model_copy(update={"max_restarts": 0})
        for name, checkpoint in checkpoints.items():
            display.set_phase(f"{name}: engine")
            (folder / name).mkdir()
            own_config = config.model_copy(update={"rollout": rollout, "lora": checkpoint.lora})
            engine = start_engines(own_config, models[name], folder / name, display.print_line)
            try:
                check_live_engine(checkpoint.plan, engine)
                display.set_phase(name)
                start, tokenizer = time.perf_counter(), load_tokenizer(checkpoint.tokenizer)
                check_vocabulary(engine.read_vocabulary(), tokenizer, checkpoint.tokenizer, checkpoint.hf_config)
                with ExitStack() as own:
                    sampler = make_sampler(config, engine, tokenizer, environments, own)
                    rewards.clear()
                    tallies[name] = sample(sampler, scorer, problems, samples, sampling, config.train.seed, chunk, partial(record, name))
                    check_verdicts(rewards, config.reward)
                seconds[name] = time.perf_counter() - start
                display.print_line(f"{name}: {total} completions in {seconds[name]:.1f} s")
            finally:
                engine.stop()
        return tallies, seconds
