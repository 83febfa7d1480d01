"""HTTP client of an SGLang engine; implements `megatron_rl.rollout.engine.Engine`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import torch

from megatron_rl.config.sync import Running
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rollout.engine import Abort, EngineTensorSpec, ParsedToolCalls, Places
from megatron_rl.types import Generation, SamplingParams
from rollout_sglang.answers import make_sampling_params, parse_generation, read_kept_tokens, read_routed_experts
from rollout_sglang.health_watch import HealthMonitor
from rollout_sglang.launch_args import EngineLaunchSpec
from rollout_sglang.launcher import EngineServer
from rollout_sglang.rank_handler import FAILED, PREFIX
from rollout_sglang.rank_requests import RankRequests
from rollout_sglang.request_gate import AnswersDroppedError, RequestGate

_CACHE, _WEIGHTS, _GRAPHS = "kv_cache", "weights", "cuda_graph"  # SGLang's names of its memory
_IDLE_SECONDS = 10
_IDLE_POLL_SECONDS = 0.01
_EXIT_SECONDS = 2.0
_NO_WEIGHTS = "the engine has no weights yet: it serves nothing before the first proved sync"


class SGLangEngine(RankRequests):
    """Client of one engine. Creating it launches the engine's server. All calls are bounded by `rollout.request_timeout`. An engine is
    lost if its server ended, does not answer or dropped the connection. Calls raise EngineLostError from then on."""

    def __init__(self, launch_spec: EngineLaunchSpec) -> None:
        self.server, self._rollout = EngineServer(launch_spec), launch_spec.config.rollout
        self._http = self.server.connect()
        record_routing = launch_spec.config.algorithm.routing_replay == "engine"
        self._routing = RoutingShape.from_hf_config(read_config(launch_spec.model_path)) if record_routing else None
        self._gate = RequestGate(self._rollout.request_timeout, _NO_WEIGHTS if launch_spec.empty else "")
        self._health_monitor = HealthMonitor(self._ping, self._kill_unresponsive, self._rollout.health_timeout)
        self._update_open = False  # SGLang's weight update has begun
        self._generation_paused = False  # SGLang holds the running requests
        self._released_tags: list[str] = []  # memory that is currently released
        self._mixed_versions = False  # completions may hold tokens of several versions
        self._receiving = ExitStack()  # open while the ranks receive in the background
        self._hung = False  # killed by the health monitor

    def wait_until_ready(self) -> None:
        self.server.wait_until_ready()
        self._http = self.server.connect()  # the server may have been started again at another port

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        """See `Engine.generate`. Seeds have an effect on the CPU tier only (`rollout_sglang.hooks.seeded_sampling`); a GPU ignores them."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, SamplingParams) else sampling
        parameters = [make_sampling_params(params) for params in samplings]
        generations: dict[int, Generation] = {}
        while missing := [index for index in range(len(prompts_B)) if index not in generations]:
            recorded = [samplings[index].record_kept_tokens for index in missing]
            try:
                with self._gate.passing(), self._health_monitor.working():
                    answers = self._ask([prompts_B[index] for index in missing], [parameters[index] for index in missing], recorded, abort)
            except AnswersDroppedError:
                continue
            if self._http.is_closed:  # while its answers waited for the proof
                raise self.server.make_error("the engine was stopped", EngineLostError)
            if abort and abort.requested:
                raise AbortedError
            for index, answer in zip(missing, answers, strict=True):
                if answer["meta_info"]["finish_reason"]["type"] == "abort":  # discarded by a sync: sample it again
                    continue
                generations[index] = generation = self._read(answer, len(prompts_B[index]), self._mixed_versions)
                if samplings[index].record_kept_tokens:
                    read_kept_tokens(answer, generation)
        return [generations[index] for index in range(len(prompts_B))]

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls | None:
        path, body = "/parse_function_call", {"text": text, "tools": json.loads(tools), "tool_call_parser": parser}
        response = self._request(path, body)
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and not self.server.processes.has_ended():
            return None  # some parsers raise on text without a call
        if response.status_code != httpx.codes.OK:
            raise self._make_refusal(path, response)
        parsed = response.json()
        return ParsedToolCalls(parsed["normal_text"], [(call["name"], call["parameters"]) for call in parsed["calls"]])

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        parameters = {**make_sampling_params(sampling), "ignore_eos": True}
        with self._health_monitor.working():
            answers = self._ask(prompts_B, [parameters] * len(prompts_B), [False] * len(prompts_B))
        return [[self._read(answer, len(prompt), False) for answer, prompt in zip(answers, prompts_B, strict=True)]]

    def _ask(
        self,
        prompts_B: Sequence[np.ndarray],
        parameters: list[dict[str, Any]],
        record_kept_tokens: list[bool],
        abort: Abort | None = None,
    ) -> list[dict[str, Any]]:
        """Return SGLang's answers, including those of aborted requests. Raise AbortedError if `abort` has been requested already."""
        body = {
            "input_ids": [np.asarray(prompt).tolist() for prompt in prompts_B],
            "sampling_params": parameters,
            "return_logprob": True,
            "return_routed_experts": self._routing is not None,
            "return_sampling_mask": record_kept_tokens,
        }
        if abort is None:
            return self._post("/generate", body)
        requests = [uuid.uuid4().hex for _ in prompts_B]
        with abort.calling(lambda: self._abort(requests)):
            return self._post("/generate", {**body, "rid": requests})

    def _abort(self, requests: Sequence[str]) -> None:
        """End requests by their ids. A request that has ended or that SGLang has not read yet is not affected."""
        for request in requests:
            self._post("/abort_request", {"rid": request})

    def _read(self, answer: dict[str, Any], prompt_tokens: int, mixed_versions: bool) -> Generation:
        """Return a completion, with its routing if that is recorded."""
        generation = parse_generation(answer, mixed_versions)
        if self._routing is not None:
            tokens = prompt_tokens + len(generation.output_ids_T)
            generation.routed_experts_T = read_routed_experts(answer, self._routing, tokens)
        return generation

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        super().start_receiving(hashing, places)
        self._health_monitor.resume()
        self._receiving.enter_context(self._health_monitor.working())  # the ranks answer pings meanwhile

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        self._receiving.close()  # the answer may take as long as the rest of the transfer
        self._health_monitor.suspend()  # also for threads whose completions the engine holds
        return super().finish_receiving(hashing)

    def disconnect(self) -> None:
        self._receiving.close()
        super().disconnect()

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        ranks = [{name: text.split() for name, text in rank.items()} for rank in self._ask_ranks({"verb": "describe"})]
        return [{name: EngineTensorSpec(dtype, tuple(map(int, shape))) for name, (dtype, *shape) in rank.items()} for rank in ranks]

    def read_activation_formats(self) -> dict[str, str]:
        return self._ask_ranks({"verb": "activation_formats"})[0]

    def read_graph(self) -> list[PrecisionGraph]:
        return [PrecisionGraph.from_json(json.loads(rank["graph"])) for rank in self._ask_ranks({"verb": "graph"})]

    def pause(self, running: Running) -> None:
        """See `Engine.pause`. For "continue", SGLang frees the KV cache of running requests and queues them. The new weights then
        recompute the cache of their tokens."""
        if self._gate.holding and not self._generation_paused:
            running = "restart"  # requests sampled by unproved weights must not continue
        if running == "continue":
            self._gate.hold(closed=True)
            if not self._generation_paused:  # still paused after a failed sync
                self._post("/pause_generation", {"mode": "retract"})
            self._generation_paused = self._mixed_versions = True
        else:
            self._gate.drain((lambda: self._post("/abort_request", {"abort_all": True})) if running == "restart" else None)

    def _continue_generation(self) -> None:
        if self._generation_paused:
            self._post("/continue_generation", {"torch_empty_cache": False})
            self._generation_paused = False

    def admit(self) -> None:
        self._continue_generation()
        self._health_monitor.resume()
        self._gate.refusal = ""
        self._gate.hold(closed=False)

    def resume(self) -> None:
        self._gate.open()

    def release_memory(self) -> None:
        self._gate.drain()
        self._empty_caches()
        tags = [_CACHE, _GRAPHS, _WEIGHTS] if torch.cuda.is_available() else [_CACHE]
        allocated = [tag for tag in tags if tag not in self._released_tags]
        if allocated and torch.cuda.is_available():
            self._post("/release_memory_occupation", {"tags": allocated})
        elif allocated:
            self._ask_ranks({"verb": "release"})
        self._released_tags = tags

    def _resume_memory(self, *tags: str) -> None:
        """Allocate the released memory among `tags` again."""
        released = [tag for tag in tags if tag in self._released_tags]
        if released and torch.cuda.is_available():
            self._post("/resume_memory_occupation", {"tags": released})
        elif released:
            self._ask_ranks({"verb": "restore"})
        self._released_tags = [tag for tag in self._released_tags if tag not in tags]

    def get_memory_mb(self) -> float:
        return self.server.processes.get_memory_mb()

    def begin_sync(self) -> None:
        self._resume_memory(_WEIGHTS)
        self._empty_caches()
        if not self._update_open:  # still open after a failed sync
            self._post("/begin_weight_update", {})
        self._update_open = True

    def end_sync(self, version: int) -> None:
        self._post("/end_weight_update", {})
        self._update_open = False
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._empty_caches()
        self._resume_memory(_CACHE, _GRAPHS)

    def _empty_caches(self) -> None:
        """Empty SGLang's caches, which requires that no request is running. Raise RunError if requests of another client keep running.
        SGLang removes a request a moment after its answer. Retry here, because SGLang's own wait lasts up to a second longer
        (--sleep-on-idle)."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while (response := self._request("/flush_cache", None)).status_code != httpx.codes.OK:
            if response.status_code != httpx.codes.BAD_REQUEST or time.monotonic() > deadline:
                raise self._make_refusal("/flush_cache", response)
            time.sleep(_IDLE_POLL_SECONDS)

    def stop(self, force: bool = False) -> None:
        self._http.close()
        self._gate.open()  # waiting threads continue and fail
        self.server.stop(force)

    def _ping(self) -> None:
        """Return when every rank has answered, which it does between two batches. Raise EngineLostError if a rank does not answer in
        time or the process of a node has ended, for which other ranks might wait."""
        if self.server.processes.has_ended():
            raise self.server.make_error(f"the engine ended ({self.server.processes.describe_end()})", EngineLostError)
        self._ask_ranks({"verb": "ping"}, self._rollout.health_timeout)

    def _kill_unresponsive(self) -> None:
        """Kill the processes, so that every waiting request fails."""
        self._hung = not self.server.processes.has_ended()  # False if it ended by itself
        self.server.processes.kill()

    def _ask_ranks(self, request: dict[str, Any], seconds: float | None = None) -> list[dict[str, str]]:
        """Send a request to the hook in every scheduler process (`rollout_sglang.rank_handler`). Return one mapping per engine rank."""
        answer = self._post("/weights_checker", {"action": PREFIX + json.dumps(request)}, seconds)
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        for number, rank in enumerate(ranks):
            if FAILED in rank["checksums"]:
                failure = rank["checksums"][FAILED]
                raise RunError(f"engine rank {number} could not {request['verb']}: {failure}", self.server.processes.log_tail())
        return [rank["checksums"] for rank in ranks]

    def _post(self, path: str, body: dict[str, Any] | None, seconds: float | None = None) -> Any:
        """Return the answer to one bounded request. Raise EngineLostError if the engine is gone or too slow, RunError if it refuses."""
        response = self._request(path, body, seconds)
        if response.status_code != httpx.codes.OK:
            raise self._make_refusal(path, response)
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else response.text

    def _request(self, path: str, body: dict[str, Any] | None, seconds: float | None = None) -> httpx.Response:
        """Return the engine's response, whatever its status. Raise EngineLostError if the engine is gone or too slow."""
        seconds = seconds or self._rollout.request_timeout
        try:
            return self._http.post(path, json=body, timeout=seconds)
        except httpx.TimeoutException:
            message = f"the engine did not answer {path} within {seconds:g} s (rollout.request_timeout)"
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed by `stop`
            message = f"the engine does not answer {path} ({self._describe_state(error)})"
        raise self.server.make_error(message, EngineLostError)

    def _describe_state(self, error: Exception) -> str:
        """Describe the state of the processes after `error`."""
        if self._hung:
            return f"it did not respond for {self._rollout.health_timeout:g} s (rollout.health_timeout) and was killed"
        if self.server.processes.wait_for_end(_EXIT_SECONDS):
            return f"its process ended with {self.server.processes.describe_end()}"
        return f"{type(error).__name__}; its process still runs"

    def _make_refusal(self, path: str, response: httpx.Response) -> RunError:
        """Return the error for a refused request: EngineLostError if the engine is ending, for example because a rank cannot reach
        another rank."""
        lost = self.server.processes.wait_for_end(_EXIT_SECONDS)
        error_class = EngineLostError if lost else RunError
        return error_class(f"the engine refused {path}: {response.status_code} {response.text[:500]}", self.server.processes.log_tail())
