"""Starts what a run needs before its first step: Megatron, the engines, and the data, rewards, and environments of the rollout."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.data import ProblemStream, load_problems
from megatron_rl.data.orders import compute_fingerprint
from megatron_rl.distributed import errors_on_all_ranks, run_on_rank0
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.hub import fetch_weights
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.vocabulary import check_vocabulary
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.observability import hang_watchdog
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.threads import count_threads
from megatron_rl.preflight import Needs, check_on_rank_0
from megatron_rl.preflight.resumed_run import describe_change
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.columns import choose_place
from megatron_rl.rollout.engine_pool import EnginePool, start_engines
from megatron_rl.rollout.generation import make_sampler, start_environments
from megatron_rl.rollout.worker import AsyncRolloutWorker, RolloutWorker
from megatron_rl.training.checkpoint_manager import TrainState
from megatron_rl.training.context import RunContext
from megatron_rl.training.resume import hash_code
from megatron_rl.types import Problem
from parallel.layout import Layout


def start_trainer(config: Config, layout: Layout, known: Needs, resources: ExitStack, timeout_minutes: int = 30) -> None:
    """Start Megatron, make the checks `known` that only rank 0 makes, and fetch the weights. `resources` stops Megatron, also on SIGTERM.
    `timeout_minutes`: of collectives. Collective."""
    start_megatron(layout, config.train.seed, timeout_minutes)
    resources.callback(stop_megatron)
    if not torch.cuda.is_available():
        torch.set_num_threads(count_threads(layout.world_size))
    run_on_rank0(lambda: check_on_rank_0(config, known))
    with errors_on_all_ranks():  # rank 0 has fetched the weights; nodes with separate caches fetch them too
        fetch_weights(config.model.path)


def start_empty_engines(
    config: Config, hf_config: Mapping[str, Any], folder: Path, logs: Path, notify: Callable[[str], None] = print, version: int = 0
) -> EnginePool:
    """Start the engines without weights. `folder`: an empty folder for their config.json and tokenizer; `version`: see `start_engines`.
    Rank 0 only."""
    weights = describe_weights(hf_config, PrecisionContract.from_config(config.precision))
    write_all_but_weights(folder, weights, config.model.folder)
    return start_engines(config, folder, logs, notify, empty=True, version=version)


def start_rollout(run: RunContext, hf_config: dict[str, Any], state: TrainState | None) -> tuple[EnginePool, AsyncRolloutWorker]:
    """Load the problems and start reward workers and engines. Rank 0 only."""
    config = run.config
    tokenizer = load_tokenizer(config.model.folder)
    try:
        stream, held_out = load_problems(config, tokenizer)
    except UserError as error:  # the check before the run has read the same data
        raise RunError(f"the data can no longer be read: {error}") from None
    if state is not None:
        stream.load_state_dict(state.data(), bool(run.resumed and run.resumed.may_have_other_problems))
    _record_contents(run, stream, held_out)
    scorer = run.resources.enter_context(Scorer(config.reward, run.notify, tokenizer.chat_template))
    environments = start_environments(config, run.resources)
    run.notify(f"starting the engines: {config.rollout.engines}")
    hang_watchdog.enter_phase("starting the engines", limit=config.rollout.start_timeout)
    (model := run.folder / "engine_model").mkdir()
    engines = start_empty_engines(config, hf_config, model, run.folder, run.notify, 0 if state is None else state.version)
    run.log.value.record_launch(engine_seeds=engines.seeds)
    run.resources.callback(engines.stop)
    check_vocabulary(engines.read_vocabulary(), tokenizer, config.model.folder, hf_config)
    sampler = make_sampler(config, engines, tokenizer, environments, run.resources)
    place = choose_place(config)
    worker = RolloutWorker(config, sampler, stream, held_out, scorer, run.notify, place, engines)
    ahead = AsyncRolloutWorker(worker, config.placement.max_staleness, config.train.steps, engines.stop)
    run.resources.callback(ahead.close)
    return engines, ahead


def _record_contents(run: RunContext, stream: ProblemStream, held_out: Sequence[Problem]) -> None:
    """Write the fingerprints of what the configuration names to run.json, and what differs in a resumed run. Rank 0 only."""
    scored = compute_fingerprint(*(problem.to_json() for problem in held_out))
    problems = {"data.train.source": f"problems {stream.fingerprint}", "data.eval.source": f"problems {scored}"}
    code = {field: f"code {value}" for field, value in hash_code(run.config).items()}
    log = run.log.value
    if others := log.record_contents(problems | code):
        log.record_changes([describe_change(field, *values) for field, values in others.items()])
