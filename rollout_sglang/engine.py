"""A real SGLang engine behind its HTTP server, as the loop sees it (`megatron_rl.engine.Engine`)."""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from megatron_rl.config import Config
from megatron_rl.config_sync import Running
from megatron_rl.engine import LiveTensor
from megatron_rl.errors import RunError, UserError
from megatron_rl.graph import Graph
from megatron_rl.precision import PrecisionContract
from megatron_rl.types import Generation, Sampling
from rollout_sglang import activations, memory
from rollout_sglang.gate import Gate
from rollout_sglang.live import FAILED, PREFIX
from rollout_sglang.platform import NAME as CPU_PLATFORM
from rollout_sglang.process import API_KEY_VARIABLE, EngineProcess
from rollout_sglang.requests import LiveRequests

_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}
_CACHES = (memory.CACHE, "cuda_graph")  # SGLang's names for what is taken again when the weights are there
_POLL_SECONDS = 0.5
_IDLE_SECONDS = 10
_IDLE_POLL_SECONDS = 0.01


def launch(config: Config, model_path: Path, log_dir: Path) -> SGLangEngine:
    """Entry point of the group `megatron_rl.rollout`: starts an engine on `model_path` and waits until it is healthy.

    A port that another program took in the meantime is tried once more with others. Raises RunError, with the log's tail, when the
    engine dies or is not healthy within `rollout.start_timeout` seconds.
    """
    try:
        return _launch_once(config, model_path, log_dir)
    except RunError as error:
        if "address already in use" not in error.log_tail.lower():
            raise
        print("megatron-rl: a port of the engine was taken by another program; starting it once more", file=sys.stderr)
        return _launch_once(config, model_path, log_dir)


def _launch_once(config: Config, model_path: Path, log_dir: Path) -> SGLangEngine:
    rollout, contract = config.rollout, PrecisionContract.of(config.precision)
    port, key = _free_port(rollout.host), secrets.token_hex(24)
    arguments = _server_arguments(config, contract, model_path, port)
    process = EngineProcess(arguments, {API_KEY_VARIABLE: key, **_environment(rollout.tp, contract)}, log_dir / "engine.log")
    engine = SGLangEngine(process, f"http://{rollout.host}:{port}", key, rollout.request_timeout)
    try:
        engine.wait_until_healthy(rollout.start_timeout)
    except BaseException:
        engine.stop()
        raise
    return engine


def _server_arguments(config: Config, contract: PrecisionContract, model_path: Path, port: int) -> list[str]:
    rollout = config.rollout
    options: dict[str, Any] = {
        "model-path": model_path,
        "host": rollout.host,
        "port": port,
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
    if contract.engine_quantization:
        options["quantization"] = contract.engine_quantization
    if torch.cuda.is_available():
        flags += ["enable-memory-saver"] if config.placement.kind == "colocated" else []
    else:
        options |= {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.1}
        flags.append("disable-overlap-schedule")
    return [part for name, value in options.items() for part in (f"--{name}", str(value))] + [f"--{flag}" for flag in flags]


def _environment(tp: int, contract: PrecisionContract) -> dict[str, str]:
    if torch.cuda.is_available():
        return {activations.VARIABLE: contract.scale_format} if contract.rollout_fp8 else {}
    return {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "OMP_NUM_THREADS": "1",  # by far the fastest for small models
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",  # there is nothing to compile for, and its guards choke on the stand-in for Triton
    }


def _free_port(host: str) -> int:
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError("rollout.host", host, f"cannot be bound ({error})", "use 127.0.0.1 or an address of this machine") from None


class SGLangEngine(LiveRequests):
    """Client and owner of one engine process. All calls are bounded by `timeout` seconds."""

    def __init__(self, process: EngineProcess, url: str, key: str, timeout: float) -> None:
        self.process = process
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=timeout)
        self._gate = Gate(timeout)
        self._changing = False  # SGLang's weight update is open
        self._held = False  # SGLang holds the requests that run
        self._away: list[str] = []  # memory that was given back
        self._mixes = False  # completions may hold tokens of several versions

    def wait_until_healthy(self, seconds: float) -> None:
        """Returns when `/health` answers; see `launch`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.exit_code() is not None:
                raise RunError(
                    f"the engine did not start (exit code {self.process.exit_code()}); log: {self.process.log}", self.process.log_tail()
                )
            try:
                if self._http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    self.process.remember_children()
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_SECONDS)
        raise RunError(
            f"the engine was not healthy after {seconds:g} s (rollout.start_timeout); log: {self.process.log}", self.process.log_tail()
        )

    def generate(self, prompts_B: Sequence[list[int]], sampling: Sampling | Sequence[Sampling]) -> list[Generation]:
        """See `Engine.generate`. Seeds are obeyed on the CPU tier (`rollout_sglang.draws`); on a GPU SGLang draws as it likes."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, Sampling) else sampling
        parameters = [_parameters(one) for one in samplings]
        found: dict[int, Generation] = {}
        while missing := [index for index in range(len(prompts_B)) if index not in found]:
            with self._gate.passing():
                body = {
                    "input_ids": [prompts_B[index] for index in missing],
                    "sampling_params": [parameters[index] for index in missing],
                    "return_logprob": True,
                }
                answers = self._post("/generate", body)
            for index, answer in zip(missing, answers, strict=True):
                if answer["meta_info"]["finish_reason"]["type"] != "abort":  # else thrown away at a switch: sampled anew
                    found[index] = _generation(answer, self._mixes)
        return [found[index] for index in range(len(prompts_B))]

    def live_tensors(self) -> list[dict[str, LiveTensor]]:
        return [{name: _live_tensor(text) for name, text in rank.items()} for rank in self._live({"verb": "describe"})]

    def activation_scale_formats(self) -> dict[str, str]:
        return self._live({"verb": "scale_formats"})[0]

    def graph(self) -> list[Graph]:
        return [Graph.from_json(json.loads(rank["graph"])) for rank in self._live({"verb": "graph"})]

    def pause(self, running: Running) -> None:
        """`continue`: SGLang frees the cache of what runs and queues it; the cache of its tokens is computed anew by the new weights."""
        if running == "continue":
            self._gate.shut_behind()
            self._post("/pause_generation", {"mode": "retract"})
            self._held = self._mixes = True
        else:
            self._gate.shut((lambda: self._post("/abort_request", {"abort_all": True})) if running == "restart" else None)

    def resume(self) -> None:
        if self._held:
            self._post("/continue_generation", {"torch_empty_cache": False})
            self._held = False
        self._gate.open()

    def release(self) -> None:
        self._gate.shut()
        self._empty_caches()
        away = [*_CACHES, memory.WEIGHTS] if torch.cuda.is_available() else [memory.CACHE]
        wanted = [tag for tag in away if tag not in self._away]
        if wanted and torch.cuda.is_available():
            self._post("/release_memory_occupation", {"tags": wanted})
        elif wanted:
            self._live({"verb": "release"})
        self._away = away

    def _take_again(self, *tags: str) -> None:
        """Memory that was given back; none where it was not."""
        wanted = [tag for tag in tags if tag in self._away]
        if wanted and torch.cuda.is_available():
            self._post("/resume_memory_occupation", {"tags": wanted})
        elif wanted:
            self._live({"verb": "restore"})
        self._away = [tag for tag in self._away if tag not in tags]

    def memory_mb(self) -> float:
        return self.process.memory_mb()

    def begin_sync(self) -> None:
        self._take_again(memory.WEIGHTS)
        self._empty_caches()
        if not self._changing:  # else a sync before this one broke
            self._post("/begin_weight_update", {})
        self._changing = True

    def end_sync(self, version: int) -> None:
        self._post("/end_weight_update", {})
        self._changing = False
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._empty_caches()
        self._take_again(*_CACHES)

    def _empty_caches(self) -> None:
        """Raises RunError where requests run that are not ours.

        SGLang refuses while requests run, and clears one away a moment after its answer. It is asked again and again, because its own
        waiting goes on for up to a second after that (--sleep-on-idle).
        """
        deadline = time.monotonic() + _IDLE_SECONDS
        while (response := self._answer("/flush_cache", None)).status_code != httpx.codes.OK:
            if response.status_code != httpx.codes.BAD_REQUEST or time.monotonic() > deadline:
                raise self._refused("/flush_cache", response)
            time.sleep(_IDLE_POLL_SECONDS)

    def stop(self) -> None:
        self._gate.open()  # whoever waits there is told that the engine is gone
        self._http.close()
        self.process.stop()

    def _live(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """Asks the hook in every scheduler process (`rollout_sglang.live`); one mapping per engine rank."""
        answer = self._post("/weights_checker", {"action": PREFIX + json.dumps(request)})
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        for number, rank in enumerate(ranks):
            if FAILED in rank["checksums"]:
                failure = rank["checksums"][FAILED]
                raise RunError(f"engine rank {number} could not {request['verb']}: {failure}", self.process.log_tail())
        return [rank["checksums"] for rank in ranks]

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        """One bounded request. Raises RunError when the engine is gone, too slow, or answers with an error."""
        response = self._answer(path, body)
        if response.status_code != httpx.codes.OK:
            raise self._refused(path, response)
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else response.text

    def _answer(self, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Whatever the engine answers. Raises RunError when it is gone or too slow."""
        try:
            return self._http.post(path, json=body)
        except httpx.TimeoutException:
            raise RunError(
                f"the engine did not answer {path} within {self._http.timeout.read:g} s (rollout.request_timeout)", self.process.log_tail()
            ) from None
        except httpx.TransportError as error:
            code = self.process.exit_code()
            state = "is still running" if code is None else f"ended with exit code {code}"
            raise RunError(
                f"the engine does not answer {path} ({type(error).__name__}); its process {state}; log: {self.process.log}",
                self.process.log_tail(),
            ) from None

    def _refused(self, path: str, response: httpx.Response) -> RunError:
        return RunError(f"the engine refused {path}: {response.status_code} {response.text[:500]}", self.process.log_tail())


def _parameters(sampling: Sampling) -> dict[str, Any]:
    found = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": 1.0,
        "stop": list(sampling.stop),
    }
    return found if sampling.seed is None else {**found, "sampling_seed": sampling.seed}


def _generation(answer: dict[str, Any], mixes: bool) -> Generation:
    """Raises RunError for an answer that more than one policy version sampled, unless it `mixes`, or with log-probs that are no numbers."""
    meta = answer["meta_info"]
    spans = meta.get("weight_versions") or []
    versions = {span["version"] for span in spans} | {meta["weight_version"]}
    if len(versions) > 1 and not mixes:
        raise RunError(f"one completion was sampled by policy versions {', '.join(sorted(versions))}")
    if any(entry[0] is None for entry in meta["output_token_logprobs"]):  # JSON has no NaN
        raise RunError("the engine computed a log-probability that is no finite number: its weights or its FP8 scales are broken")
    logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    ids = [int(entry[1]) for entry in meta["output_token_logprobs"]]
    versions_T = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])] if len(versions) > 1 else []
    if versions_T and len(versions_T) != len(ids):
        raise RunError(f"the engine tells the policy versions of {len(versions_T)} tokens in a completion of {len(ids)}")
    return Generation(ids, logprobs, str(meta["finish_reason"]["type"]), int(meta["weight_version"]), versions_T)


def _live_tensor(text: str) -> LiveTensor:
    dtype, *shape = text.split()
    return LiveTensor(dtype, tuple(map(int, shape)))
