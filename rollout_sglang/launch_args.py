"""Start an engine's process: its arguments, environment, port and key."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.ops.threads import count_threads
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE, EnginePlacement, get_base_gpu_id, place_engine
from rollout_sglang.hooks import gpu_activation_quant
from rollout_sglang.platform.activate import NAME as CPU_PLATFORM
from rollout_sglang.process import API_KEY_VARIABLE, THREADS_VARIABLE, EngineProcess

_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
"""By default SGLang compiles DeepGEMM's kernels for 16,384 batch sizes before it is ready, by its own words in 10 to 20 minutes, longer
than `rollout.start_timeout`. Switched off, each kernel is compiled at its first use, in seconds."""


class LaunchedServer(NamedTuple):
    """A started server."""

    process: EngineProcess
    url: str
    api_key: str
    """Every request must carry it."""


@dataclass(frozen=True)
class EngineLaunchSpec:
    """Everything needed to start engine `number` of a run; every start uses a new port and key."""

    config: Config
    model_path: Path
    log_dir: Path
    number: int = 0
    empty: bool = False
    """Start without weights: SGLang makes some up, and nothing is served before a sync has replaced them."""
    arguments: tuple[str, ...] = ()
    """More arguments of SGLang, for benchmarks."""

    def start_process(self) -> LaunchedServer:
        """Start the server without waiting for it. Raise UserError if the host cannot be bound."""
        rollout, contract = self.config.rollout, PrecisionContract.from_config(self.config.precision)
        placement = place_engine(rollout, self.number)
        port, key = _free_port(placement, rollout.engines_per_node), secrets.token_hex(24)
        arguments = _server_arguments(self.config, contract, self.model_path, port, placement)
        arguments += [*(["--load-format", "dummy"] if self.empty else []), *self.arguments]
        environment = {API_KEY_VARIABLE: key, LAUNCHER_VARIABLE: placement.launcher, **_environment(rollout, contract, placement)}
        log = self.log_dir / (f"engine{self.number}.log" if rollout.engines > 1 else "engine.log")
        return LaunchedServer(EngineProcess(arguments, environment, log), f"http://{placement.host}:{port}", key)


def _server_arguments(config: Config, contract: PrecisionContract, model_path: Path, port: int, placement: EnginePlacement) -> list[str]:
    rollout = config.rollout
    options: dict[str, Any] = {
        "host": placement.host,
        "port": port,
        "model-path": model_path,
        "dtype": contract.high_format.dtype,
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
    if contract.engine_format.quantized:
        options["quantization"] = contract.engine_format.engine_quantization
    if torch.cuda.is_available():
        options["base-gpu-id"] = get_base_gpu_id(config, placement)
        flags += ["enable-memory-saver"] if config.placement.kind == "colocated" else []
    else:
        # the cache's size is max-total-tokens; SGLang's own estimate compares the free memory of a machine that other programs use too
        options |= {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.9}
        flags.append("disable-overlap-schedule")
    return [part for name, value in options.items() for part in (f"--{name}", str(value))] + [f"--{flag}" for flag in flags]


def _environment(rollout: RolloutConfig, contract: PrecisionContract, placement: EnginePlacement) -> dict[str, str]:
    if torch.cuda.is_available():
        format = contract.engine_format
        scales = {gpu_activation_quant.SCALE_FORMAT_VARIABLE: format.scale_format} if format.quantized else {}
        return {_PRECOMPILE: os.environ.get(_PRECOMPILE, "false"), **scales}
    cores = os.cpu_count() or 1
    return {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "OMP_NUM_THREADS": "1",
        THREADS_VARIABLE: str(count_threads(rollout.engines_per_node * rollout.tp)),  # the trainer sleeps while engines work
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str((placement.index * rollout.tp + rank) % cores) for rank in range(rollout.tp)),
        "GLOO_SOCKET_IFNAME": "lo",
        # glibc would give every large tensor's pages back, and the next one fault them in again, half of a long product's time;
        # `memory_release` gives them back
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "TORCHDYNAMO_DISABLE": "1",  # there is nothing to compile for, and its guards fail on the stub of Triton
    }


def _free_port(placement: EnginePlacement, engines_on_node: int) -> int:
    """Return a port below those that Linux hands out by itself: an engine binds it seconds later, and until then nobody is given it."""
    while True:
        port = 20000 + secrets.randbelow(10000 // engines_on_node) * engines_on_node + placement.index
        try:
            if not placement.launcher:  # elsewhere a taken port fails the start; engines of one node never choose the same
                socket.create_server((placement.host, port)).close()
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                fix = "use 127.0.0.1 or an address of this machine"
                raise UserError("rollout.hosts", placement.host, f"cannot be bound ({error})", fix) from None
