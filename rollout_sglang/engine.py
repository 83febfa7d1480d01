"""HTTP client of an SGLang engine; implements `megatron_rl.rollout.engine.Engine`."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import httpx
import msgspec
import numpy as np
import torch

from megatron_rl.config.sync import Running
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.hf.vocabulary import Vocabulary
from megatron_rl.precision.graph.graph import GRAPH_JSON, PrecisionGraph
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.engine import Abort, EngineTensorSpec, ParsedToolCalls, Places, Roots
from megatron_rl.types import Generation, Problem, RemoteColumns, SamplingParams, Scored
from megatron_rl.workers import plain
from rollout_sglang.activation_recorder import RecordingRequests
from rollout_sglang.answers import ABORTED, MEDIA_TYPE, Answer, parse_generation, read_answers, read_generation
from rollout_sglang.launch_args import EngineLaunchSpec, EngineServer
from rollout_sglang.process import HealthMonitor
from rollout_sglang.rank_handler import FAILED, PREFIX, REPEATABLE, RankRequests
from rollout_sglang.remote_columns import FIND, ask_to_leave, choose_place
from rollout_sglang.scoring import SCORE, SCORED, TEXTS
from rollout_sglang.texts import ask_for_texts

_CACHE, _WEIGHTS, _GRAPHS = "kv_cache", "weights", "cuda_graph"  # SGLang's names of its memory
_IDLE_SECONDS = 10
_IDLE_POLL_SECONDS = 0.01
_EXIT_SECONDS = 2.0
_NO_WEIGHTS = "the engine has no weights yet: it serves nothing before the first proved sync"
_POLL_SECONDS = 0.05
_REPEATABLE = ("/flush_cache", "/update_weight_version", "/abort_request")  # requests that have the same effect once and twice
_JSON = {"Content-Type": "application/json"}
_UNPARSED = (400, 422, 500)  # what SGLang answers if it cannot parse a response, or the schemas of an agent


class SGLangEngine(RankRequests, RecordingRequests):
    """Client of one engine. Creating it launches the engine's server. All calls are bounded by `rollout.request_timeout`, and pings watch
    the engine during each of them, so that a hang is noticed after `rollout.health_timeout`. An engine is lost if its server ended, does
    not answer or dropped the connection. Calls raise EngineLostError from then on."""

    def __init__(self, launch_spec: EngineLaunchSpec) -> None:
        self.server, self._rollout = EngineServer(launch_spec), launch_spec.config.rollout
        self._config = launch_spec.config
        self._http = self.server.connect()
        record_routing = launch_spec.config.algorithm.routing_replay == "engine"
        self._routing = RoutingShape.from_hf_config(read_config(launch_spec.model_path)) if record_routing else None
        self._gate = RequestGate(self._rollout.request_timeout, _NO_WEIGHTS if launch_spec.empty else "")
        self._health_monitor = HealthMonitor(self._ping, self._kill_unresponsive, self._rollout.health_timeout)
        self._update_open = False  # SGLang's weight update has begun
        self._generation_paused = False  # SGLang holds the running requests
        self._released_tags: list[str] = []  # memory that is currently released
        self._recording = False  # for a walk, which reads nothing but tokens and log-probs
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
        headers = _JSON | ask_for_texts(self._config.text_markers)
        place = choose_place(samplings[0].columns if samplings else "here", self.server.url)
        headers |= ask_to_leave(place, self._config.placement.max_staleness)
        while missing := [index for index in range(len(prompts_B)) if index not in generations]:
            recorded = [samplings[index].record_kept_tokens for index in missing]
            try:
                with self._gate.passing():
                    prompts, wanted = [prompts_B[index] for index in missing], [parameters[index] for index in missing]
                    answers = self._ask(prompts, wanted, recorded, headers, abort)
            except AnswersDroppedError:
                continue
            if self._http.is_closed:  # while its answers waited for the proof
                raise self.server.make_error("the engine was stopped", EngineLostError)
            if abort and abort.requested:
                raise AbortedError
            for index, answer in zip(missing, answers, strict=True):
                if answer.finish == ABORTED:  # discarded by a sync: sample it again
                    continue
                records_kept = samplings[index].record_kept_tokens
                generations[index] = self._read(answer, len(prompts_B[index]), records_kept, self._mixed_versions, samplings[index].seed)
        return [generations[index] for index in range(len(prompts_B))]

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls | None:
        parsed = self._parse("/parse_function_call", {"text": text, "tools": json.loads(tools), "tool_call_parser": parser})
        return parsed and ParsedToolCalls(parsed["normal_text"], [(call["name"], call["parameters"]) for call in parsed["calls"]])

    def separate_thought(self, text: str, parser: str) -> tuple[str, str] | None:
        parsed = self._parse("/separate_reasoning", {"text": text, "reasoning_parser": parser})
        return parsed and (parsed["reasoning_text"] or "", parsed["text"] or "")

    def _parse(self, path: str, body: dict[str, Any]) -> Any:
        response = self._request(path, body)
        if response.status_code in _UNPARSED and not self.server.processes.has_ended():
            return None  # some parsers raise on text without a call, or on schemas that they do not know
        return self._read_answer(path, response)

    def answer_canary(self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams) -> list[list[Generation]]:
        parameters = {**make_sampling_params(sampling), "ignore_eos": True}
        answers = self._ask(prompts_B, [parameters] * len(prompts_B), [False] * len(prompts_B), _JSON)
        return [[self._read(answer, len(prompt), False, False, sampling.seed) for answer, prompt in zip(answers, prompts_B, strict=True)]]

    def _ask(
        self,
        prompts_B: Sequence[np.ndarray],
        parameters: list[dict[str, Any]],
        record_kept_tokens: list[bool],
        headers: Mapping[str, str],
        abort: Abort | None = None,
    ) -> list[Answer]:
        body = {
            "input_ids": [np.asarray(prompt).tolist() for prompt in prompts_B],
            "sampling_params": parameters,
            "return_logprob": True,
            "return_routed_experts": self._routing is not None,
            "return_sampling_mask": record_kept_tokens,
        }
        if abort is None:
            return self._read_columns(self._post("/generate", body, headers))
        requests = [uuid.uuid4().hex for _ in prompts_B]
        with abort.calling(lambda: [self._post("/abort_request", {"rid": request}) for request in requests]):
            return self._read_columns(self._post("/generate", {**body, "rid": requests}, headers))

    def _read_columns(self, content: object) -> list[Answer]:
        """Return completions. Raise RunError if they do not come in columns, as from an engine without this project's hooks."""
        try:
            if isinstance(content, bytes):
                return read_answers(content)
            reason = "they are not packed"
        except ValueError as error:
            reason = str(error)
        raise RunError(f"the engine's completions cannot be read: {reason}", self.server.processes.log_tail())

    def _read(self, answer: Answer, prompt_tokens: int, records_kept: bool, mixed_versions: bool, seed: int | None) -> Generation:
        server = self.server.url, self.server.api_key
        if self._recording:  # what is not finite is to be found
            return parse_generation(answer, mixed_versions, finite=False)
        generation = read_generation(answer, prompt_tokens, self._routing, records_kept, mixed_versions, *server)
        generation.seed = None if torch.cuda.is_available() else seed  # a GPU ignores seeds
        return generation

    def find_columns(self, by_engine: Mapping[tuple[str, str], Sequence[RemoteColumns]]) -> set[str]:
        own = [columns.handle for columns in by_engine.get((self.server.url, self.server.api_key), ())]
        return set(self._read_answer(FIND, self._request(FIND, own, repeatable=True))) if own else set()

    def owns(self, columns: RemoteColumns) -> bool:
        return (columns.url, columns.key) == (self.server.url, self.server.api_key)

    def score(self, columns_B: Sequence[RemoteColumns], problems_B: Sequence[Problem]) -> list[Scored]:
        pairs = groupby(zip(columns_B, problems_B, strict=True), lambda pair: id(pair[1]))
        groups = [list(group) for _, group in pairs]  # a problem is sent once
        body = plain.dump([([columns.handle for columns, _ in group], group[0][1]) for group in groups])
        while (response := self._request(SCORE, msgspec.Raw(body), repeatable=True)).status_code == httpx.codes.ACCEPTED:
            pass  # the workers are still busy
        return SCORED.validate_python(self._read_answer(SCORE, response))

    def read_texts(self, columns_B: Sequence[RemoteColumns]) -> list[tuple[str, Response]]:
        texts = self._read_answer(TEXTS, self._request(TEXTS, [columns.handle for columns in columns_B], repeatable=True))
        return [(text, Response(*parts)) for text, *parts in texts]

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        super().start_receiving(hashing, places)
        self._receiving.enter_context(self._health_monitor.working())  # the ranks answer pings meanwhile

    def finish_receiving(self, hashing: bool) -> Roots:
        with self._receiving:
            return super().finish_receiving(hashing)

    def disconnect(self) -> None:
        self._receiving.close()
        super().disconnect()

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        ranks = [{name: text.split() for name, text in rank.items()} for rank in self._ask_ranks({"verb": "describe"})]
        return [{name: EngineTensorSpec(dtype, tuple(map(int, shape))) for name, (dtype, *shape) in rank.items()} for rank in ranks]

    def read_activation_formats(self) -> dict[str, str]:
        return self._ask_ranks({"verb": "activation_formats"})[0]

    def read_vocabulary(self) -> list[Vocabulary]:
        return [Vocabulary(**json.loads(rank["vocabulary"])) for rank in self._ask_ranks({"verb": "vocabulary"})]

    def read_graph(self) -> list[PrecisionGraph]:
        return [GRAPH_JSON.validate_json(rank["graph"]) for rank in self._ask_ranks({"verb": "graph"})]

    def pause(self, running: Running) -> None:
        """See `Engine.pause`. For "continue", SGLang queues running requests; the new weights recompute the KV cache of their tokens."""
        if self._gate.holding and not self._generation_paused:
            running = "restart"  # requests sampled by unproved weights must not continue
        if running == "continue":
            self._gate.hold(closed=True)
            if not self._generation_paused:  # still paused after a failed sync
                self._post("/pause_generation", {"mode": "retract"})
            self._generation_paused = self._mixed_versions = True
        else:
            self._gate.drain((lambda: self._post("/abort_request", {"abort_all": True})) if running == "restart" else None)

    def admit(self) -> None:
        if self._generation_paused:
            self._post("/continue_generation", {"torch_empty_cache": False})
            self._generation_paused = False
        self._gate.refusal = ""
        self._gate.hold(closed=False)

    def resume(self) -> None:
        self._gate.open()

    def release_memory(self) -> None:
        self._gate.drain()
        self._empty_caches()
        tags = [_CACHE, _GRAPHS, _WEIGHTS] if torch.cuda.is_available() else [_CACHE]
        allocated = [tag for tag in tags if tag not in self._released_tags]
        self._change_memory("release", allocated)
        self._released_tags = tags

    def _resume_memory(self, *tags: str) -> None:
        """Allocate the released memory among `tags` again. On a CPU, the system does so when it is used."""
        self._change_memory("resume", [tag for tag in tags if tag in self._released_tags])
        self._released_tags = [tag for tag in self._released_tags if tag not in tags]

    def _change_memory(self, verb: str, tags: list[str]) -> None:
        if tags and torch.cuda.is_available():
            self._post(f"/{verb}_memory_occupation", {"tags": tags})
        elif tags and verb == "release":
            self._ask_ranks({"verb": "release"})

    def start_recording(self) -> None:
        """See `RecordingEngine.start_recording`. Raise RunError if the weights are released, as on devices that the trainer shares."""
        if _WEIGHTS in self._released_tags:
            raise RunError("the engine has released its weights (placement.kind = colocated), so it cannot be walked")
        self._resume_memory(_CACHE)
        super().start_recording()
        self._recording = True

    def stop_recording(self) -> None:
        super().stop_recording()
        self._recording = False

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
        """Empty SGLang's caches. Raise RunError if requests of another client keep running. SGLang removes a request a moment after its
        answer, and its own wait lasts up to a second longer (--sleep-on-idle), so retry here."""
        deadline = time.monotonic() + _IDLE_SECONDS
        while (response := self._request("/flush_cache", None)).status_code != httpx.codes.OK:
            if response.status_code != httpx.codes.BAD_REQUEST or time.monotonic() > deadline:
                self._read_answer("/flush_cache", response)
            time.sleep(_IDLE_POLL_SECONDS)

    def stop(self, force: bool = False) -> None:
        self._http.close()
        self._gate.open()  # waiting threads continue and fail
        self.server.stop(force)

    def _ping(self) -> None:
        """Return when every rank has answered. Raise EngineLostError if a rank is late or a node's process has ended."""
        if self.server.processes.has_ended():
            raise self.server.make_error(f"the engine ended ({self.server.processes.describe_end()})", EngineLostError)
        self._ask_ranks({"verb": "ping"}, self._rollout.health_timeout)

    def _kill_unresponsive(self) -> None:
        """Kill the processes, so that every waiting request fails."""
        self._hung = not self.server.processes.has_ended()  # False if it ended by itself
        self.server.processes.kill()

    def _ask_ranks(self, request: dict[str, Any], seconds: float | None = None) -> list[dict[str, str]]:
        """Send a request to the hook in every scheduler process (`rollout_sglang.rank_handler`). Return one mapping per engine rank."""
        body = {"action": PREFIX + json.dumps(request)}
        answer = self._read_answer("/weights_checker", self._request("/weights_checker", body, seconds, request["verb"] in REPEATABLE))
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        for number, rank in enumerate(ranks):
            if FAILED in rank["checksums"]:
                failure = rank["checksums"][FAILED]
                raise RunError(f"engine rank {number} could not {request['verb']}: {failure}", self.server.processes.log_tail())
        return [rank["checksums"] for rank in ranks]

    def _post(self, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] = _JSON) -> Any:
        """Return the answer to one bounded request. Raise EngineLostError if the engine is gone or too slow, RunError if it refuses."""
        return self._read_answer(path, self._request(path, body, headers=headers))

    def _read_answer(self, path: str, response: httpx.Response) -> Any:
        """Return a response's content. Raise RunError if the request was refused, or EngineLostError if the engine is ending."""
        if response.status_code != httpx.codes.OK:
            error_class = EngineLostError if self.server.processes.wait_for_end(_EXIT_SECONDS) else RunError
            message = f"the engine refused {path}: {response.status_code} {response.text[:500]}"
            raise error_class(message, self.server.processes.log_tail())
        kind = response.headers.get("content-type", "")
        if kind == MEDIA_TYPE:
            return response.content
        return response.json() if kind.startswith("application/json") else response.text

    def _request(
        self,
        path: str,
        body: object,
        seconds: float | None = None,
        repeatable: bool = False,
        headers: Mapping[str, str] = _JSON,
    ) -> httpx.Response:
        """Send one request, watched by the health monitor. `seconds` is the time limit of the monitor's own. If the connection breaks, as
        one that the server closes just when it is used again, a request that may be sent twice is sent again once."""
        watch = self._health_monitor.working() if seconds is None else nullcontext()
        seconds, repeatable = seconds or self._rollout.request_timeout, repeatable or path in _REPEATABLE
        content = None if body is None else msgspec.json.encode(body)  # ten times as fast as httpx on a prompt's tokens
        try:
            with watch:
                try:
                    return self._http.post(path, content=content, headers=headers, timeout=seconds)
                except (httpx.NetworkError, httpx.RemoteProtocolError):
                    if not repeatable or self.server.processes.has_ended():
                        raise
                    return self._http.post(path, content=content, headers=headers, timeout=seconds)
        except httpx.TimeoutException:
            message = f"the engine did not answer {path} within {seconds:g} s (rollout.request_timeout)"
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed by `stop`
            message = f"the engine does not answer {path} ({self._describe_state(error)})"
        raise self.server.make_error(message, EngineLostError)

    def _describe_state(self, error: Exception) -> str:
        if self._hung:
            return f"it did not respond for {self._rollout.health_timeout:g} s (rollout.health_timeout) and was killed"
        if self.server.processes.wait_for_end(_EXIT_SECONDS):
            return f"its process ended with {self.server.processes.describe_end()}"
        return f"{type(error).__name__}; its process still runs"


def make_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters of a request to SGLang."""
    names = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")
    return {name: getattr(sampling, name) for name in names} | {"stop": list(sampling.stop), "sampling_seed": sampling.seed}


class AnswersDroppedError(Exception):
    """The answers of a request were computed with weights that were never proved. The request must be repeated."""


class RequestGate:
    """Gate that generating threads pass through, initially open. Another thread closes and opens it. No wait is longer than `timeout`
    seconds. While it is holding, no thread can leave, because its answer is not proved yet. With `refusal`, every request is refused."""

    def __init__(self, timeout: float, refusal: str = "") -> None:
        self._timeout, self.refusal = timeout, refusal
        self._changed = threading.Condition()
        self._closed, self._inside, self._drops = False, 0, 0
        self.holding = False  # whether no request may leave

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Enclose a request. Raise RunError if it is refused or the gate stays closed, AnswersDroppedError if its answers are dropped."""
        if self.refusal:
            raise RunError(self.refusal)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, self._timeout):
                raise RunError(f"the engine's weights were being changed for {self._timeout:g} s (rollout.request_timeout)")
            self._inside += 1
            drops = self._drops
        try:
            yield
            with self._changed:
                if not self._changed.wait_for(lambda: not self.holding or self._drops > drops, self._timeout):
                    wait = f"an answer waited {self._timeout:g} s for the proof of the engine's new weights"
                    raise RunError(f"{wait} (rollout.request_timeout)")
                if self._drops > drops:
                    raise AnswersDroppedError
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def drain(self, on_wait: Callable[[], None] | None = None) -> None:
        """Close the gate, drop held answers, and wait until no request is inside, calling `on_wait`. If one stays, open it and raise
        RunError."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            self._drops += self.holding
            self._closed, self.holding = True, False
            self._changed.notify_all()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._inside == 0, _POLL_SECONDS):
                    return
            if time.monotonic() > deadline:
                self.open()
                raise RunError(f"requests were still running after {self._timeout:g} s (rollout.request_timeout)")
            if on_wait is not None:
                on_wait()

    def hold(self, closed: bool) -> None:
        """Let no request out. If `closed`, let no request in either."""
        with self._changed:
            self._closed, self.holding = closed, True
            self._changed.notify_all()

    def open(self) -> None:
        """Let requests in and out."""
        with self._changed:
            self._closed = self.holding = False
            self._changed.notify_all()
