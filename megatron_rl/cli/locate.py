"""The command `locate`: starts trainer and engine as a run would, fills the engine, and walks both through one prompt."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rl.cli.run_settings import check_output_files
from megatron_rl.config import Config
from megatron_rl.diagnosis.locate import Locator, describe
from megatron_rl.distributed import Rank0, get_rank
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.folder import read_state_file
from megatron_rl.mcore.weights.load_weights import collect_named_tensors
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import GRAPH, check_run, pin_model
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.training.policies import load_actor
from megatron_rl.training.resume import find_newest_whole
from megatron_rl.training.start import start_empty_engines, start_trainer
from parallel.layout import Layout


def locate_difference(config: Config, run: Path | None, text: str | None, json_file: Path | None) -> bool:
    """Print where trainer and engine differ first. Return True if they do not. Under torchrun, every rank calls this. Raise UserError
    before anything heavy starts, RunError if trainer or engine cannot be started or the sync is not proved."""
    check_output_files({"--json": json_file})
    config = pin_model(config)
    layout = check_run(config, GRAPH)
    with ExitStack() as resources:
        return _locate(config, layout, run, text, json_file, resources)


def _locate(config: Config, layout: Layout, run: Path | None, text: str | None, json_file: Path | None, resources: ExitStack) -> bool:
    start_trainer(config, layout, GRAPH, resources)
    checkpoint = None if run is None else find_newest_whole(run)[0]
    if run is not None and checkpoint is None:
        raise UserError("RUN_OR_CONFIG", str(run), "holds no complete checkpoint", "give the run's config file to start from its model")
    hf_config, contract = read_config(config.model.folder), PrecisionContract.from_config(config.precision)
    actor, shards = load_actor(config, layout, hf_config)
    if checkpoint is not None:
        load_run_checkpoint(checkpoint, actor.model, actor.optimizer, read_state_file(checkpoint), same_layout=False)
    geometry, rollout = config.make_geometry(hf_config), config.rollout.to_layout()
    plan = SyncPlan.make(geometry, layout, rollout, contract, config.sync.chunk_bytes, get_rank())

    def start() -> EnginePool:
        folder = Path(resources.enter_context(TemporaryDirectory(prefix="megatron-rl-locate-")))
        return start_empty_engines(config, hf_config, folder, folder)

    engines = Rank0(start)
    resources.callback(lambda: engines.run_local(lambda pool: pool.stop()))
    read_named_tensors = partial(collect_named_tensors, actor.model, shards, contract)
    sync = WeightSync(plan, engines, read_named_tensors, config.sync)
    resources.callback(sync.close)
    sync.run(0)
    prompt = [] if text is None else [int(token) for token in load_tokenizer(config.model.folder).encode(text)]
    report = Locator(config, actor, engines, plan, read_named_tensors, hf_config).run(prompt)

    def show(report: dict[str, object]) -> bool:
        print(*describe(report), sep="\n")
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(f"written: {json_file}")
        return report["operator"] is None

    return report.run(show, bool)
