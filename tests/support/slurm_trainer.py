"""A stand-in for the trainer of a batch job: it starts the engines of its configuration where they belong, and ends them although they
hang.

`python -m support.slurm_trainer`, followed by the trainer's arguments. The engines are stand-ins too: instead of starting SGLang they write
their node and settings to their logs, and then ignore every signal that can be ignored.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from megatron_rl.config import load_config
from megatron_rl.preflight import Facts, Needs, check
from rollout_sglang.launch_args import EngineLaunchSpec
from rollout_sglang.process import EngineProcesses
from support.processes import until

ENGINE = """# Python runs this first, as sitecustomize
import json, os, signal, sys, time
if "rollout_sglang.server" in sys.orig_argv and not os.environ.get("MEGATRON_RL_ENGINE_LAUNCHER"):  # else it is to become its launcher
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    names = {"host": "--host", "rank": "--node-rank", "meeting": "--dist-init-addr"}
    report = {name: sys.orig_argv[sys.orig_argv.index(flag) + 1] for name, flag in names.items() if flag in sys.orig_argv}
    report |= {"node": os.environ["SLURMD_NODENAME"], "cores": os.environ["SGLANG_CPU_OMP_THREADS_BIND"], "pid": os.getpid()}
    print(json.dumps(report), flush=True)
    time.sleep(6000)
"""


def main():
    folder = Path.cwd()
    (folder / "sitecustomize.py").write_text(ENGINE)
    (folder / "config.json").write_text("{}")
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"
    config = load_config(Path(sys.argv[4]), sys.argv[5:])  # -m megatron_rl train CONFIG ...
    check(Facts(config), Needs.ENGINE | Needs.MACHINE)
    engines = [EngineLaunchSpec(config, folder, folder, number).start_process().process for number in range(config.rollout.engines)]
    logs = list(folder.glob("engine*.log"))
    assert len(logs) == config.rollout.engines * config.rollout.nodes_per_engine
    try:
        until(lambda: all('"pid"' in log.read_text() for log in logs), 900, "every node of every engine")
    finally:
        with ThreadPoolExecutor(len(engines)) as threads:
            list(threads.map(EngineProcesses.kill, engines))
    pids = [int(re.findall(r'"pid": (\d+)', log.read_text())[0]) for log in logs]
    until(lambda: not any(map(psutil.pid_exists, pids)), 300, "the engines' end")  # the end of the job would end them in any case


if __name__ == "__main__":
    main()
