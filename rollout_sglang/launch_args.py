"""Start of an engine's server: arguments, environment, ports and key of its processes, one on each of its nodes."""

import errno
import functools
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx
import torch

from megatron_rl.config import Config
from megatron_rl.config.hosts import check_listening, join_port
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.kernels.attention.requirements import choose_shared
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.threads import count_threads
from megatron_rl.redaction import hold
from megatron_rl.rollout import memory_saver
from megatron_rl.rollout.engine_placement import (
    LAUNCHER_VARIABLE,
    EnginePlacement,
    count_ranks_on_machine,
    find_meeting_host,
    get_base_gpu_id,
    place_engine,
)
from parallel.attention import GatedDeltaNet, LatentAttention
from parallel.row_sums import count_parts
from rollout_sglang import scoring
from rollout_sglang.access import KEEP_ALIVE_SECONDS, SERVER_KEEP_ALIVE_SECONDS
from rollout_sglang.answers import MEDIA_TYPE
from rollout_sglang.hooks import (
    adapters,
    blackwell,
    e4m3_cache,
    gated_delta,
    gpu_activation_quant,
    special_text,
    split_attention,
    tree_reduction,
)
from rollout_sglang.hooks.scheduling import RESERVED
from rollout_sglang.platform.activate import NAME as CPU_PLATFORM
from rollout_sglang.process import API_KEY_VARIABLE, THREADS_VARIABLE, EngineProcess, EngineProcesses
from rollout_sglang.server_options import find_sglang_folder, make_arguments

DISABLED_MODELS_VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
"""SGLang's default compiles DeepGEMM's kernels for 16,384 batch sizes at the start; if off, each is compiled at its first use."""
_OWN_FLASH_ATTENTION = "SGLANG_USE_SGL_FA3_KERNEL"  # FlashAttention 3 from sgl-kernel, not from the Hugging Face Hub
_WINDOW_DTYPE, _STATE_DTYPE = "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"
"""Formats of what linear attention keeps of a sequence. SGLang's default rounds windows of the convolution to BF16 in an FP32 model too."""
_PREFILL_GRAPHS = {"cuda_graph_backend_prefill", "disable_prefill_cuda_graph", "disable_cuda_graph", "cuda_graph_config"}
DECODE_GRAPHS = {"cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "disable_cuda_graph", "cuda_graph_config"}
_POLL_SECONDS = 0.5
_WATCH_SECONDS = 60.0


class LaunchedServer(NamedTuple):
    process: EngineProcesses
    url: str
    api_key: str  # key that every request must carry


@dataclass(frozen=True)
class EngineLaunchSpec:
    """Everything needed to start engine `number` of a run. Every start uses new ports and a new key, unless they are given."""

    config: Config
    model_path: Path
    log_dir: Path
    number: int = 0
    empty: bool = False
    """Start with dummy weights. Nothing is served before a sync has replaced them."""
    seed: int = 0  # of the engine's own random numbers
    arguments: tuple[str, ...] = ()  # additional SGLang arguments, for benchmarks
    port: int = 0  # 0 chooses one
    api_key: str = ""  # "" makes one

    def start_process(self) -> LaunchedServer:
        """Start the server on all its nodes without waiting for it. Raise UserError if the address of the first node cannot be bound."""
        rollout, contract = self.config.rollout, PrecisionContract.from_config(self.config.precision)
        placements = place_engine(rollout, self.number)
        architectures = read_config(self.model_path).get("architectures") or ()
        key, (port, meeting_port) = self.api_key or secrets.token_hex(24), _free_ports(placements[0], rollout.engines_per_node)
        port = self.port or port
        hold(key)
        meeting = join_port(find_meeting_host(placements, self.config.sync.host), meeting_port)
        processes = []
        for placement in placements:
            arguments = make_server_arguments(self.config, contract, self.model_path, port, placement, meeting, self.seed)
            arguments += [*(["--load-format", "dummy"] if self.empty else []), *self.arguments]
            secret = {API_KEY_VARIABLE: key, LAUNCHER_VARIABLE: placement.launcher}
            environment = secret | make_environment(self.config, contract, placement) | leave_out_other_models(architectures)
            environment |= scoring.make_environment(self.config) if self.empty else {}
            name = f"engine{self.number}" * (rollout.engines > 1) or "engine"
            log = self.log_dir / (f"{name}.node{placement.node}.log" if placement.node else f"{name}.log")
            processes.append(EngineProcess(arguments, environment, log))
        return LaunchedServer(EngineProcesses(processes), f"http://{join_port(placements[0].host, port)}", key)


def make_server_arguments(
    config: Config, contract: PrecisionContract, model_path: Path, port: int, placement: EnginePlacement, meeting: str, seed: int = 0
) -> list[str]:
    """Return the server's command-line arguments. `meeting`: address at which the ranks of several nodes find each other."""
    rollout = config.rollout
    options: dict[str, Any] = {
        "host": placement.host,
        "port": port,
        "model-path": model_path,
        "dtype": contract.high_format.dtype,
        "tp-size": rollout.tp,
        "ep-size": rollout.ep,
        "max-running-requests": rollout.max_running_requests,
        "max-total-tokens": rollout.max_total_tokens + RESERVED,
        "random-seed": seed,
        "weight-version": "0",
        "log-level": "warning",
    }
    if rollout.nodes_per_engine > 1:
        options |= {"nnodes": rollout.nodes_per_engine, "node-rank": placement.node, "dist-init-addr": meeting}
    if rollout.chunked_prefill_size is not None:
        options["chunked-prefill-size"] = rollout.chunked_prefill_size
    flags = ["skip-server-warmup", "disable-shared-experts-fusion", *([] if rollout.enable_prefix_caching else ["disable-radix-cache"])]
    flags.append("sleep-on-idle")  # the trainer needs the cores while the engine waits
    if config.algorithm.routing_replay == "engine":
        flags.append("enable-return-routed-experts")
    if contract.engine_format.quantized:
        options["quantization"] = contract.engine_format.engine_quantization
    if torch.cuda.is_available():
        if contract.scales_kv_by_layer:
            options |= {"kv-cache-dtype": "fp8_e4m3", "attention-backend": e4m3_cache.BACKEND}
        if contract.sums_by_ranks:
            options["attention-backend"] = choose_shared_attention(config, model_path)
        if not DECODE_GRAPHS & rollout.sglang.keys():
            options["cuda-graph-max-bs-decode"] = rollout.max_running_requests  # SGLang's default only looks at memory and tp
        if blackwell.is_blackwell():
            options = blackwell.SERVER_OPTIONS | options
        options["base-gpu-id"] = get_base_gpu_id(config, placement)
        # SGLang enables a kernel for many models that sums over ranks, adds the residual, and normalizes, past the hooks on each step
        flags.append("enforce-disable-flashinfer-allreduce-fusion")
        if config.placement.kind == "colocated":
            flags.append("enable-memory-saver")
        kinds = set(map(type, config.make_geometry(read_config(model_path)).attention))
        has_states = GatedDeltaNet in kinds and shares_delta_rule(contract)
        if has_states:
            options["mamba-radix-cache-strategy"] = "no_buffer"  # other strategies keep states inside of a prompt's part
            options["max-mamba-cache-size"] = rollout.state_slots
            if rollout.enable_prefix_caching:  # a batch that was started ahead changes the state that SGLang is about to cache
                flags.append("disable-overlap-schedule")
        shares_splits = contract.sums_by_ranks and options["attention-backend"] == "triton"
        # SGLang's default, breakable graphs, cannot be released, and with them prompts of latent attention are not multiplied in FP8
        unwanted = shares_splits or has_states or config.placement.kind == "colocated" or LatentAttention in kinds
        if unwanted and not _PREFILL_GRAPHS & rollout.sglang.keys():
            options["cuda-graph-backend-prefill"] = "disabled"
    else:
        # the cache size is max-total-tokens; SGLang's own estimate relies on free memory, which other programs use too
        options |= {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.9}
        options["max-mamba-cache-size"] = rollout.state_slots  # other models have no states
        flags += ["disable-overlap-schedule", "disable-hybrid-swa-memory"]  # layers with a window keep all tokens, as the others
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))] + [f"--{flag}" for flag in flags]
    return words + make_arguments(rollout.sglang)


def choose_shared_attention(config: Config, model_path: Path) -> str:
    """Return SGLang's attention backend with `precision.reduction = "ranks"` on a GPU."""
    return choose_shared(config.make_geometry(read_config(model_path)).attention, config.rollout.sglang.get("attention_backend"))


def shares_delta_rule(contract: PrecisionContract) -> bool:
    """Return whether an engine on a GPU computes gated delta nets by the trainer's kernels. If it alone is quantized, SGLang's own are
    faster and no less exact."""
    return contract.trainer_format.quantized == contract.engine_format.quantized


def make_environment(config: Config, contract: PrecisionContract, placement: EnginePlacement) -> dict[str, str]:
    rollout, colocated = config.rollout, config.placement.kind == "colocated"
    contracted = {_WINDOW_DTYPE: contract.high_format.dtype, _STATE_DTYPE: "float32"}
    order = "tree" if contract.sums_by_tree else "ranks" if contract.sums_by_ranks else "fast"
    contracted |= {tree_reduction.REDUCTION_VARIABLE: order, e4m3_cache.KV_VARIABLE: contract.kv}
    contracted[special_text.TREATMENT_VARIABLE] = config.data.special_text
    contracted["SGLANG_TIMEOUT_KEEP_ALIVE"] = str(SERVER_KEEP_ALIVE_SECONDS)
    if contract.sums_by_ranks:
        contracted[tree_reduction.PARTS_VARIABLE] = str(count_parts(config.train.layout.tp, rollout.tp))
    if (lora := config.lora) is not None:
        contracted[adapters.LORA_VARIABLE] = adapters.describe(lora.rank, lora.scale, lora.targets)
    if torch.cuda.is_available():
        format = contract.engine_format
        scales = {gpu_activation_quant.SCALE_FORMAT_VARIABLE: format.scale_format} if format.quantized else {}
        memory = memory_saver.make_environment(os.environ, torch.version.cuda) if colocated else {}
        shared = {gated_delta.SHARED_VARIABLE: "1"} if shares_delta_rule(contract) else {}
        if contract.sums_by_ranks:
            shared |= {_OWN_FLASH_ATTENTION: "true", split_attention.BACKEND_VARIABLE: choose_shared_attention(config, config.model.folder)}
        return {_PRECOMPILE: os.environ.get(_PRECOMPILE, "false"), **contracted, **scales, **memory, **shared}
    cores, first = os.cpu_count() or 1, placement.index * rollout.tp + placement.node * rollout.ranks_per_node
    interface = {} if rollout.nodes_per_engine > 1 else {"GLOO_SOCKET_IFNAME": "lo"}  # see `rollout_sglang.server`
    return {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "OMP_NUM_THREADS": "1",
        THREADS_VARIABLE: str(count_threads(count_ranks_on_machine(rollout, placement))),  # the trainer sleeps while engines work
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str((first + rank) % cores) for rank in range(rollout.ranks_per_node)),
        **interface,
        **contracted,
        # glibc would return the pages of every large tensor, and the next tensor would fault them in again, half the time of a long
        # product; `rank_handler.release_cache` returns them
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "TORCHDYNAMO_DISABLE": "1",  # there is nothing to compile for, and its guards fail on the Triton stub
    }


def leave_out_other_models(architectures: Sequence[str]) -> dict[str, str]:
    """Return environment variables that keep SGLang from importing the files of other models, which takes 4 s of a core at every start, but
    not of drafts of these `architectures` (`...NextN`, `...Eagle`). Empty if no file defines them; SGLang then reports the error."""
    definitions = _find_model_files()
    needed = {file for name, files in definitions.items() if name.startswith(tuple(architectures)) for file in files}
    every = {file for files in definitions.values() for file in files}
    return {DISABLED_MODELS_VARIABLE: ",".join(sorted(every - needed))} if needed else {}


@functools.cache
def _find_model_files() -> dict[str, list[str]]:
    """Return the files of SGLang's models that define each class."""
    folder, definitions = find_sglang_folder(), dict[str, list[str]]()
    for file in sorted((folder / "srt" / "models").glob("*.py")) if folder else ():
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            definitions.setdefault(name, []).append(file.stem)
    return definitions


def _free_ports(placement: EnginePlacement, engines_on_node: int) -> tuple[int, int]:
    """Return two ports below the range that Linux assigns by itself, so that nobody takes them before the engine binds them."""
    step = 2 * engines_on_node
    while True:
        port = 20000 + secrets.randbelow(10000 // step) * step + 2 * placement.index
        try:
            if not placement.launcher:  # on other nodes, a taken port fails the start; engines of one node never choose the same port
                for each in (port, port + 1):
                    check_listening(placement.host, each)
            return port, port + 1
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                fix = "use 127.0.0.1 or an address of this machine"
                raise UserError("rollout.hosts", placement.host, f"cannot be bound ({error})", fix) from None


class EngineServer:
    """The running server of one engine, with its processes on all nodes. Creating it starts the processes without waiting for them."""

    def __init__(self, launch_spec: EngineLaunchSpec) -> None:
        self._launch_spec, self._rollout = launch_spec, launch_spec.config.rollout
        self._start()

    def _start(self) -> None:
        self.processes, self.url, self.api_key = self._launch_spec.start_process()

    def connect(self) -> httpx.Client:
        """Return an HTTP client that sends the server's key, takes completions in columns, and ignores proxies."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Accept": f"{MEDIA_TYPE}, application/json"}
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS)
        timeout = self._rollout.request_timeout
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False)

    def wait_until_ready(self) -> None:
        """Wait until the server is healthy. If another program took one of its ports, start it once more with other ports. If it ends or
        is not healthy within `rollout.start_timeout` seconds, stop it and raise RunError with the tail of its log."""
        try:
            try:
                self._wait_until_healthy()
            except RunError as error:
                if "address already in use" not in error.log_tail.lower():
                    raise
                print("megatron-rl: another program took a port of the engine; starting the engine again", file=sys.stderr)
                self.stop()
                self._start()
                self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        seconds = self._rollout.start_timeout
        deadline = time.monotonic() + seconds
        with self.connect() as http:
            while time.monotonic() < deadline:
                if self.processes.has_ended():
                    raise self.make_error(f"the engine did not start ({self.processes.describe_end()})")
                try:
                    if http.get("/health", timeout=5).status_code == httpx.codes.OK:
                        self.processes.remember_children()
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_POLL_SECONDS)
        raise self.make_error(f"the engine was not healthy after {seconds:g} s (rollout.start_timeout)")

    def serve(self, greeting: str) -> NoReturn:
        """Print `greeting` when the server is healthy, and stop it when this thread is interrupted. Raise RunError if it ends by itself."""
        try:
            self.wait_until_ready()
            print(greeting, flush=True)
            while not self.processes.wait_for_end(_WATCH_SECONDS):
                pass
            raise self.make_error(f"the engine ended ({self.processes.describe_end()})")
        finally:
            self.stop()

    def stop(self, force: bool = False) -> None:
        """Terminate the processes, or kill them with `force`. Idempotent."""
        self.processes.kill() if force else self.processes.stop()

    def make_error(self, message: str, error_class: type[RunError] = RunError) -> RunError:
        """Return an error that names the log and holds its tail."""
        return error_class(f"{message}; log: {self.processes.log}", self.processes.log_tail())
