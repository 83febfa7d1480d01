"""An SGLang engine behind its HTTP server: the client that implements `megatron_rl.rollout.engine.Engine`."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import torch

from megatron_rl.batch.kept_tokens import holds_tokens, make_kept_tokens
from megatron_rl.config.sync import Running
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rollout.engine import Abort, EngineTensorSpec, ParsedToolCalls, Places
from megatron_rl.types import Generation, SamplingParams
from rollout_sglang import memory_release
from rollout_sglang.health_watch import HealthMonitor
from rollout_sglang.launch_args import EngineLaunchSpec
from rollout_sglang.rank_handler import FAILED, PREFIX
from rollout_sglang.rank_requests import RankRequests
from rollout_sglang.request_gate import AnswersDroppedError, RequestGate
from rollout_sglang.routing_record import read_routed_experts

_CACHE_TAGS = (memory_release.CACHE, "cuda_graph")  # SGLang's names of the memory allocated again after a sync
_POLL_SECONDS = 0.5
_IDLE_SECONDS = 10
_IDLE_POLL_SECONDS = 0.01
_EXIT_SECONDS = 2.0
_NO_WEIGHTS = "the engine has no weights yet: it serves nothing before the first proved sync"
_KEEP_ALIVE_SECONDS = 2.0
"""Close an idle connection before SGLang does so, after 5 s, perhaps while a request is on its way."""


class SGLangEngine(RankRequests):
    """Client and owner of one engine's processes. All calls are bounded by `rollout.request_timeout`.

    An engine that ended, does not answer, or whose connection broke is lost: calls raise EngineLostError from then on.
    """

    def __init__(self, launch_spec: EngineLaunchSpec) -> None:
        """Start the processes; see `wait_until_ready`."""
        self._launch_spec, self._rollout = launch_spec, launch_spec.config.rollout
        record_routing = launch_spec.config.algorithm.routing_replay == "engine"
        self._routing = RoutingShape.from_hf_config(read_config(launch_spec.model_path)) if record_routing else None
        self._gate = RequestGate(self._rollout.request_timeout, _NO_WEIGHTS if launch_spec.empty else "")
        self._health_monitor = HealthMonitor(self._ping, self._kill_unresponsive, self._rollout.health_timeout)
        self._update_open = False  # SGLang's weight update has begun
        self._generation_paused = False  # SGLang holds the running requests
        self._released_tags: list[str] = []  # memory now released
        self._mixed_versions = False  # completions may hold tokens of several versions
        self._receiving = ExitStack()  # open while the ranks receive in the background
        self._hung = False  # ended by the health monitor
        self._start_process()

    def _start_process(self) -> None:
        self.process, self.url, self.api_key = self._launch_spec.start_process()
        headers, limits = {"Authorization": f"Bearer {self.api_key}"}, httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=self._rollout.request_timeout, limits=limits)

    def wait_until_ready(self) -> None:
        """Return when the engine is healthy. If another program took one of its ports, start it once more with others.

        Stop it and raise RunError, with the log's tail, if it ends or is not healthy within `rollout.start_timeout` seconds.
        """
        try:
            try:
                self._wait_until_healthy()
            except RunError as error:
                if "address already in use" not in error.log_tail.lower():
                    raise
                print("megatron-rl: a port of the engine was taken by another program; starting it once more", file=sys.stderr)
                self.stop()
                self._start_process()
                self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        """Return when `/health` answers, which needs no key."""
        seconds = self._rollout.start_timeout
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.has_ended():
                raise self._make_error(f"the engine did not start ({self.process.describe_end()})")
            try:
                if self._http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    self.process.remember_children()
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_SECONDS)
        raise self._make_error(f"the engine was not healthy after {seconds:g} s (rollout.start_timeout)")

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        """See `Engine.generate`. Seeds count on the CPU tier only (`rollout_sglang.hooks.seeded_sampling`); a GPU ignores them."""
        samplings = [sampling] * len(prompts_B) if isinstance(sampling, SamplingParams) else sampling
        parameters = [_sampling_params(params) for params in samplings]
        generations: dict[int, Generation] = {}
        while missing := [index for index in range(len(prompts_B)) if index not in generations]:
            recorded = [samplings[index].record_kept_tokens for index in missing]
            try:
                with self._gate.passing(), self._health_monitor.working():
                    answers = self._ask([prompts_B[index] for index in missing], [parameters[index] for index in missing], recorded, abort)
            except AnswersDroppedError:
                continue
            if self._http.is_closed:  # while its answers waited for a proof
                raise self._make_error("the engine was stopped", EngineLostError)
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
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and not self.process.has_ended():
            return None  # some parsers raise on what is no call
        if response.status_code != httpx.codes.OK:
            raise self._make_refusal(path, response)
        parsed = response.json()
        return ParsedToolCalls(parsed["normal_text"], [(call["name"], call["parameters"]) for call in parsed["calls"]])

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        parameters = {**_sampling_params(sampling), "ignore_eos": True}
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
        """Return SGLang's answers, those of aborted requests too. Raise AbortedError if `abort` is requested already."""
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
        """End requests by their ids. One that has ended, or that SGLang has not read yet, goes on."""
        for request in requests:
            self._post("/abort_request", {"rid": request})

    def _read(self, answer: dict[str, Any], prompt_tokens: int, mixed_versions: bool) -> Generation:
        """Return a completion with its routing, where that is recorded."""
        generation = parse_generation(answer, mixed_versions)
        if self._routing is not None:
            tokens = prompt_tokens + len(generation.output_ids_T)
            generation.routed_experts_T = read_routed_experts(answer, self._routing, tokens)
        return generation

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        super().start_receiving(hashing, places)
        self._health_monitor.resume()
        self._receiving.enter_context(self._health_monitor.working())  # it answers pings meanwhile

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        self._receiving.close()  # the answer may take as long as the rest of the transfer
        self._health_monitor.suspend()  # also for threads whose completions it holds
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
        """See `Engine.pause`. For "continue" SGLang frees the cache of running requests and queues them; the new weights compute the
        cache of their tokens again."""
        if self._gate.holding and not self._generation_paused:
            running = "restart"  # nothing goes on that weights without a proof have sampled
        if running == "continue":
            self._gate.hold(closed=True)
            if not self._generation_paused:  # still paused if an earlier sync failed
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
        tags = [*_CACHE_TAGS, memory_release.WEIGHTS] if torch.cuda.is_available() else [memory_release.CACHE]
        allocated = [tag for tag in tags if tag not in self._released_tags]
        if allocated and torch.cuda.is_available():
            self._post("/release_memory_occupation", {"tags": allocated})
        elif allocated:
            self._ask_ranks({"verb": "release"})
        self._released_tags = tags

    def _resume_memory(self, *tags: str) -> None:
        """Allocate again those of `tags` that are released."""
        released = [tag for tag in tags if tag in self._released_tags]
        if released and torch.cuda.is_available():
            self._post("/resume_memory_occupation", {"tags": released})
        elif released:
            self._ask_ranks({"verb": "restore"})
        self._released_tags = [tag for tag in self._released_tags if tag not in tags]

    def get_memory_mb(self) -> float:
        return self.process.get_memory_mb()

    def begin_sync(self) -> None:
        self._resume_memory(memory_release.WEIGHTS)
        self._empty_caches()
        if not self._update_open:  # still open if an earlier sync failed
            self._post("/begin_weight_update", {})
        self._update_open = True

    def end_sync(self, version: int) -> None:
        self._post("/end_weight_update", {})
        self._update_open = False
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._empty_caches()
        self._resume_memory(*_CACHE_TAGS)

    def _empty_caches(self) -> None:
        """Empty SGLang's caches, for which no request may run. Raise RunError if requests of another client keep running.

        SGLang removes a request a moment after its answer. Retry, because its own wait goes on for up to a second longer
        (--sleep-on-idle).
        """
        deadline = time.monotonic() + _IDLE_SECONDS
        while (response := self._request("/flush_cache", None)).status_code != httpx.codes.OK:
            if response.status_code != httpx.codes.BAD_REQUEST or time.monotonic() > deadline:
                raise self._make_refusal("/flush_cache", response)
            time.sleep(_IDLE_POLL_SECONDS)

    def stop(self, force: bool = False) -> None:
        self._http.close()
        self._gate.open()  # waiting threads go on, and fail
        self.process.kill() if force else self.process.stop()

    def _ping(self) -> None:
        """Return when every rank has answered, which it does between two batches. Raise EngineLostError if one does not in time, or the
        process of a node has ended, for which the others might wait."""
        if self.process.has_ended():
            raise self._make_error(f"the engine ended ({self.process.describe_end()})", EngineLostError)
        self._ask_ranks({"verb": "ping"}, self._rollout.health_timeout)

    def _kill_unresponsive(self) -> None:
        """End the processes, so that every waiting request fails."""
        self._hung = not self.process.has_ended()  # not if it ended by itself
        self.process.kill()

    def _ask_ranks(self, request: dict[str, Any], seconds: float | None = None) -> list[dict[str, str]]:
        """Ask the hook in every scheduler process (`rollout_sglang.rank_handler`) and return one mapping per engine rank."""
        answer = self._post("/weights_checker", {"action": PREFIX + json.dumps(request)}, seconds)
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        for number, rank in enumerate(ranks):
            if FAILED in rank["checksums"]:
                failure = rank["checksums"][FAILED]
                raise RunError(f"engine rank {number} could not {request['verb']}: {failure}", self.process.log_tail())
        return [rank["checksums"] for rank in ranks]

    def _post(self, path: str, body: dict[str, Any] | None, seconds: float | None = None) -> Any:
        """Return the answer to one bounded request. Raise EngineLostError if the engine is gone or too slow, RunError if it refuses."""
        response = self._request(path, body, seconds)
        if response.status_code != httpx.codes.OK:
            raise self._make_refusal(path, response)
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else response.text

    def _request(self, path: str, body: dict[str, Any] | None, seconds: float | None = None) -> httpx.Response:
        """Return the engine's response of any status. Raise EngineLostError if the engine is gone or too slow."""
        seconds = seconds or self._rollout.request_timeout
        try:
            return self._http.post(path, json=body, timeout=seconds)
        except httpx.TimeoutException:
            message = f"the engine did not answer {path} within {seconds:g} s (rollout.request_timeout)"
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed by `stop`
            message = f"the engine does not answer {path} ({self._describe_state(error)})"
        raise self._make_error(message, EngineLostError)

    def _describe_state(self, error: Exception) -> str:
        """Say what became of the process after `error`."""
        if self._hung:
            return f"it was silent for {self._rollout.health_timeout:g} s, rollout.health_timeout, and was ended"
        if self.process.wait_for_end(_EXIT_SECONDS):
            return f"its process ended with {self.process.describe_end()}"
        return f"{type(error).__name__}; its process still runs"

    def _make_error(self, message: str, error_class: type[RunError] = RunError) -> RunError:
        return error_class(f"{message}; log: {self.process.log}", self.process.log_tail())

    def _make_refusal(self, path: str, response: httpx.Response) -> RunError:
        """Return the error for a refused request: EngineLostError if the engine is ending, as where a rank cannot reach another."""
        lost = self.process.wait_for_end(_EXIT_SECONDS)
        error_class = EngineLostError if lost else RunError
        return error_class(f"the engine refused {path}: {response.status_code} {response.text[:500]}", self.process.log_tail())


def _sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "sampling_seed": sampling.seed,
    }


def read_kept_tokens(answer: dict[str, Any], generation: Generation) -> None:
    """Set the tokens that SGLang kept for each sampled token, and the log-probs over those. Raise RunError if one was not kept itself."""
    kept, tokens = make_kept_tokens(answer["meta_info"].get("output_token_sampling_mask") or []), generation.output_ids_T
    if len(kept.counts) != len(tokens) or not holds_tokens(kept, tokens):
        raise RunError("the engine does not tell which tokens top_p, top_k and min_p left to draw from, or drew another")
    generation.kept_tokens = kept
    generation.logprobs_T = np.array(answer["meta_info"]["output_token_sampling_logprobs"], np.float32)


def parse_generation(answer: dict[str, Any], mixed_versions: bool) -> Generation:
    """Return one completion of SGLang's answer. Raise RunError if several policy versions sampled it, unless `mixed_versions` allows that,
    or if a log-prob is no number."""
    meta = answer["meta_info"]
    spans = meta.get("weight_versions") or []
    versions = {span["version"] for span in spans} | {meta["weight_version"]}
    if len(versions) > 1 and not mixed_versions:
        raise RunError(f"one completion was sampled by policy versions {', '.join(sorted(versions))}")
    entries = meta["output_token_logprobs"]
    logprobs_T = np.array([entry[0] for entry in entries], np.float32)
    ids_T = np.array([entry[1] for entry in entries], np.int32)
    if np.isnan(logprobs_T).any():  # JSON has no NaN: it is None there
        raise RunError("the engine computed a log-probability that is no finite number: its weights or its FP8 scales are broken")
    versions_T = None
    if len(versions) > 1:
        lengths = [span["end"] - span["start"] for span in spans]
        if sum(lengths) != len(ids_T):
            raise RunError(f"the engine tells the policy versions of {sum(lengths)} tokens in a completion of {len(ids_T)}")
        versions_T = np.repeat(np.array([int(span["version"]) for span in spans], np.int32), lengths)
    finish, version = str(meta["finish_reason"]["type"]), int(meta["weight_version"])
    return Generation(ids_T, logprobs_T, finish, version, versions_T, cached_tokens=int(meta["cached_tokens"]))
