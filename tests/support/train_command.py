"""The command `megatron-rl train` on a tiny model, its results, and signals that hit it while it runs."""

import json
import shutil

import psutil

from examples.arithmetic.config import DemoConfig
from examples.arithmetic.new_model import make_random_checkpoint
from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.config import load_config
from megatron_rl.metrics import ROW_KEYS, describe, read_declarations
from support.processes import ROOT, Command, alive_after, command_lines, end, family, until

TINY = {  # over configs/quickstart.toml
    "warm_start.steps": 0,
    "architecture.num_hidden_layers": 1,
    "train.steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 8,
    "rollout.max_running_requests": 16,
    "rollout.max_total_tokens": 4096,
    "rollout.start_timeout": 900,
    "rollout.request_timeout": 900,
    "data.eval_size": 4,
    "reward.workers": 1,
    "sync.bucket_mb": 1,
}
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
LONG = 1500.0
"""Seconds that no run takes, however busy the machine is."""


def train(folder, changes=None, *, launcher=(), config="quickstart", module="megatron_rl"):
    """Start the command on a random model in `folder`. `changes` of the configuration override `TINY`."""
    settings = {**TINY, "model.path": folder / "model", "log.dir": folder / "runs", **(changes or {})}
    return Command(folder, *launcher, module, "train", *make_model(folder, settings, launcher, config))


def make_model(folder, settings, launcher=(), config="quickstart"):
    """Make the model of `settings` unless it exists, with the warm start's command if that takes steps. Return the arguments of `train`."""
    files = [ROOT / "configs" / f"{config}.toml", ROOT / "examples" / "arithmetic" / f"{config}.toml"]
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    demo = load_config(files[0], overrides, root=DemoConfig, more=files[1])
    if demo.warm_start.steps and not demo.model.path.exists():
        done = finish(Command(folder / "warm_start", *launcher, "examples.arithmetic.warm_start", files[0], *overrides))
        assert done.code == 0, done.err
    elif not demo.model.path.exists():
        make_random_checkpoint(demo.model.path, demo.architecture, demo.warm_start.seed)
        if demo.agent is not None:
            shutil.copy(CHAT_TEMPLATE, demo.model.path)
    return [files[0], *(word for word in overrides if not word.startswith(("--architecture.", "--warm_start.")))]


def finish(command, seconds=LONG):
    with command:
        return command.wait(seconds)


def latest(folder):
    """Return the newest run of `train` with this folder."""
    return folder / "runs" / "latest"


def read_rows(run, name="metrics.jsonl"):
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    declared = read_declarations(read_json(run / "run.json"))
    undeclared = {key for row in rows for key in row if name == "metrics.jsonl" and key not in ROW_KEYS and not describe(key, declared)}
    assert not undeclared, f"emitted, but declared by nobody: {undeclared}"
    return rows


def read_numbers(run):
    """Return the rows without measured values, and without values that depend on the order of requests."""
    measured = ("time", "second", "memory/", "restarts", "ahead/", "cached")
    return [{key: value for key, value in row.items() if not any(word in key for word in measured)} for row in read_rows(run)]


def read_json(file):
    return json.loads(file.read_text())


def wait_for_rows(command, folder, count):
    """Wait until a run has written `count` rows. Raise AssertionError if it ends first."""
    metrics = latest(folder) / "metrics.jsonl"
    until(lambda: command.ended() or (metrics.is_file() and len(metrics.read_text().splitlines()) >= count), LONG, f"{count} rows")
    assert not command.ended(), command.wait(1)


def end_by(strike, command):
    """Return how a command ends after `strike`. Raise AssertionError if any of its processes is left."""
    processes = family(command.pid)
    strike(command)
    done = command.wait(300)
    assert command_lines(alive_after(processes, 60)) == {}
    return done


def kill_engine(command, most=None):
    """Kill the engines' servers, or `most` of them."""
    servers = [process for process, words in command_lines(family(command.pid)).items() if "rollout_sglang.server" in words]
    end(servers[:most])


def kill_rank_1(command):
    next(process for process in family(command.pid) if process.environ().get("RANK") == "1").kill()


def kill_trainer(command):
    psutil.Process(command.pid).kill()


def terminate(command):
    psutil.Process(command.pid).terminate()
