"""How an engine's process is started: its arguments, its environment, its port and its key."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE, EnginePlacement, get_base_gpu_id, place_engine
from rollout_sglang.hooks import gpu_activation_quant
from rollout_sglang.platform.activate import NAME as CPU_PLATFORM
from rollout_sglang.process import API_KEY_VARIABLE, EngineProcess

_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
"""SGLang would compile DeepGEMM's kernels for 16,384 batch sizes before it is ready, in 10 to 20 minutes by its own words, longer than
`rollout.start_timeout`. Without, a kernel is compiled when it is first used, in seconds."""
_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class EngineLaunchSpec:
    """All that is needed to start engine `number` of a run; every start has a port and a key of its own."""

    config: Config
    model_path: Path
    log_dir: Path
    number: int = 0
    arguments: tuple[str, ...] = ()
    """More of SGLang's own, for measuring: such as weights that it makes up."""

    def start_process(self) -> tuple[EngineProcess, str, str]:
        """The process, the server's URL, and the key that every request must carry. Raises UserError where the host cannot be bound."""
        rollout, contract = self.config.rollout, PrecisionContract.from_config(self.config.precision)
        placement = place_engine(rollout, self.number)
        port, key = _free_port(placement), secrets.token_hex(24)
        arguments = [*_server_arguments(self.config, contract, self.model_path, port, placement), *self.arguments]
        environment = {API_KEY_VARIABLE: key, LAUNCHER_VARIABLE: placement.launcher, **_environment(rollout.tp, contract, placement)}
        log = self.log_dir / (f"engine{self.number}.log" if rollout.engines > 1 else "engine.log")
        return EngineProcess(arguments, environment, log), f"http://{placement.host}:{port}", key


def _server_arguments(config: Config, contract: PrecisionContract, model_path: Path, port: int, placement: EnginePlacement) -> list[str]:
    rollout = config.rollout
    options: dict[str, Any] = {
        "host": placement.host,
        "port": port,
        "model-path": model_path,
        "dtype": _DTYPE[contract.high],
        "tp-size": rollout.tp,
        "ep-size": rollout.ep,
        "max-running-requests": rollout.max_running_requests,
        "max-total-tokens": rollout.max_total_tokens,
        "random-seed": config.train.seed,
        "weight-version": "0",
        "log-level": "warning",
    }
    flags = ["skip-server-warmup", "disable-radix-cache", "disable-shared-experts-fusion"]
    flags.append("sleep-on-idle")  # the trainer needs the cores while the engine waits
    if config.algorithm.routing_replay == "engine":
        flags.append("enable-return-routed-experts")
    if contract.engine_quantization:
        options["quantization"] = contract.engine_quantization
    if torch.cuda.is_available():
        options["base-gpu-id"] = get_base_gpu_id(config, placement)
        flags += ["enable-memory-saver"] if config.placement.kind == "colocated" else []
    else:
        # the cache's size is max-total-tokens; SGLang compares the machine's free memory before and after loading, which others use too
        options |= {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.9}
        flags.append("disable-overlap-schedule")
    return [part for name, value in options.items() for part in (f"--{name}", str(value))] + [f"--{flag}" for flag in flags]


def _environment(tp: int, contract: PrecisionContract, placement: EnginePlacement) -> dict[str, str]:
    if torch.cuda.is_available():
        scales = {gpu_activation_quant.SCALE_FORMAT_VARIABLE: contract.scale_format} if contract.rollout_fp8 else {}
        return {_PRECOMPILE: os.environ.get(_PRECOMPILE, "false"), **scales}
    cores = os.cpu_count() or 1
    return {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "OMP_NUM_THREADS": "1",  # by far the fastest for small models
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str((placement.index * tp + rank) % cores) for rank in range(tp)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",  # there is nothing to compile for, and its guards choke on the stand-in for Triton
    }


def _free_port(placement: EnginePlacement) -> int:
    if placement.launcher:  # another machine's ports; one that is taken shows when the engine starts, and no neighbour takes it
        return 20000 + secrets.randbelow(10000 // placement.engines_on_node) * placement.engines_on_node + placement.index
    try:
        with socket.socket() as probe:
            probe.bind((placement.host, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError(
            "rollout.hosts", placement.host, f"cannot be bound ({error})", "use 127.0.0.1 or an address of this machine"
        ) from None
