"""Sampling of completions by agents. Each agent works in its own process and calls the policy through the endpoint as often as it likes.
Token in, token out: earlier responses of the policy go back to the engine as the ids that were sampled. An agent that fails, hangs or loops
affects only its own episode. An error of the run, such as a lost engine, fails the group, which is then sampled again."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_rl.config.agent import AgentConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.observability import hang_watchdog
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.endpoint import AgentEndpoint
from megatron_rl.rollout.agents.episode import AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import TEXT, ConversationMessage, ToolCall, fits_schema
from megatron_rl.rollout.agents.process import SERVER_ENDED, AgentProcess, AgentResult, AgentServer, ServerEndedError
from megatron_rl.rollout.engine import Abort, Engine, check_versions, cut_at_stop
from megatron_rl.types import Completion, Generation, Problem, SamplingParams
from megatron_rl.workers.proxies import make_bypass

_log = logging.getLogger(__name__)


class AgentSampler:
    """Samples completions with agents. A context manager that owns the endpoint."""

    def __init__(self, config: AgentConfig, engine: Engine, tokenizer: Any, data: DataConfig) -> None:
        """`data`: settings of the chat template."""
        self._config, self._engine = config, engine
        self._format = ChatFormat(tokenizer, data)
        self._endpoint = AgentEndpoint(self._answer, config)
        self._room = threading.Semaphore(config.workers)
        self._lock, self._running, self._closed = threading.Lock(), set[AgentProcess](), False
        self._server: AgentServer | None = None
        self._warned: set[str] = set()

    def __enter__(self) -> AgentSampler:
        self._endpoint.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
        self._endpoint.__exit__(*exception)

    def close(self) -> None:
        """Terminate all agents, and start no further one."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill()
        if self._server is not None:
            self._server.close()

    def sample(
        self, problems_B: list[Problem], samplings_B: list[SamplingParams], version: int, staleness: int = 0, abort: Abort | None = None
    ) -> list[Completion]:
        """Return one unscored completion per problem, in order: the agent's last conversation, with the other conversations as
        `branches`. `max_new_tokens` limits the sampled tokens of one conversation. See `Sampler.sample` for the errors."""
        episodes = [
            AgentEpisode(problem, sampling, version, staleness, self._config, self._format, abort)
            for problem, sampling in zip(problems_B, samplings_B, strict=True)
        ]
        with ThreadPoolExecutor(max(len(episodes), 1), thread_name_prefix="megatron-rl-agent") as threads:
            return list(threads.map(self._run, episodes))

    def _run(self, episode: AgentEpisode) -> Completion:
        with self._room, episode.abort.calling(lambda: episode.kill()):
            key = self._endpoint.open(episode)
            try:
                result = self._run_process(key, episode)
            finally:
                self._endpoint.close(key)
        completion = episode.finish(result.error, result.reward)
        if episode.abort.requested:
            raise AbortedError
        if episode.failure is not None:
            raise episode.failure
        if self._closed:
            raise EngineLostError("the agents were ended")
        return completion

    def _run_process(self, key: str, episode: AgentEpisode) -> AgentResult:
        try:
            process = self._start(key, episode)
        except ServerEndedError:
            return AgentResult(SERVER_ENDED)
        result = process.run()
        with self._lock:
            self._running.discard(process)
        return result

    def _start(self, key: str, episode: AgentEpisode) -> AgentProcess:
        environment = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": key, **make_bypass()}
        environment |= {"ANTHROPIC_BASE_URL": self._endpoint.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        with self._lock:
            if self._closed:
                raise EngineLostError("the agents were ended")
            process = self._fork(environment, episode)
            self._running.add(process)
        episode.kill = process.kill
        if episode.abort.requested or episode.failure:  # `kill` was not set yet at that time
            process.kill()
        return process

    def _fork(self, environment: dict[str, str], episode: AgentEpisode) -> AgentProcess:
        for _ in range(2):  # the server may have been killed, for example when memory ran out
            is_new = self._server is None or self._server.ended
            if self._server is None or is_new:
                self._server = AgentServer(self._config)
            try:
                return AgentProcess(self._config, self._server, environment, episode.problem, episode.sampling.seed or 0)
            except ServerEndedError:
                if is_new and self._server.ready:
                    raise  # this agent has ended it
        what = self._config.name or " ".join(self._config.command or ())
        raise RunError(f"no agent {what} can be started: the process that agents are forked from ends immediately; its error is above")

    def _answer(self, episode: AgentEpisode, turn: Turn, abort: Abort) -> None:
        """Sample the response to a request. Called by the endpoint's threads."""
        request = turn.request
        for name in request.overridden:
            self._warn_once(f"agents set {name}; the run's own value is used instead")
        if request.calls_tools and not self._config.tool_parser:
            self._warn_once("agents offer tools, but agent.tool_parser is empty: tool calls are not parsed")
        if episode.notes:
            text = f"an agent repeats a conversation otherwise than it was ({episode.notes[0]}), so another sample begins; "
            self._warn_once(text + "see agent/foreign_histories, and history_notes in samples.jsonl", "history")
        hang_watchdog.enter_phase("generate")
        with episode.abort.calling(abort.request):
            (generation,) = self._engine.generate([turn.prompt_ids_T], [turn.sampling], abort)
        check_versions(generation, episode.version, episode.staleness)
        stops = turn.sampling.stop
        text = generation.text if generation.text is not None else self._format.decode(generation.output_ids_T, stops)
        text, stop = cut_at_stop(text, stops)
        said, malformed = self._read(turn, generation, text.removesuffix(stop))
        episode.add(turn, generation, said, malformed, stop)

    def _read(self, turn: Turn, generation: Generation, text: str) -> tuple[ConversationMessage, bool]:
        """Return a response as a message, and whether it tried to call a tool incorrectly. `text`: the response before the stop text that
        ended it."""
        request, thought, whole = turn.request, "", text
        reads_calls = request.calls_tools and bool(self._config.tool_parser)
        if reads_calls:
            ids_T, _ = self._format.split_end(generation.output_ids_T)
            whole, stop = cut_at_stop(self._format.decode_all(ids_T), turn.sampling.stop)
            whole = whole.removesuffix(stop)
        if self._config.reasoning_parser and request.messages[0].role != TEXT:
            opened = self._format.opened_thought(turn.given_ids_T)
            parsed = self._engine.separate_thought(opened + whole, self._config.reasoning_parser)
            if parsed is not None and parsed[0]:
                thought, text = parsed
                whole = text
        said = ConversationMessage("assistant", text, thought=thought)
        if not reads_calls:
            return said, False
        found = self._engine.parse_tool_calls(whole, request.tools, self._config.tool_parser)
        calls = found.calls[: None if request.parallel_calls else 1] if found else []
        if not calls:
            return said, found is None or found.text != whole
        try:  # a policy may write lone surrogates as JSON escapes, which no text can hold, or a name of any length
            assert found is not None
            "".join((found.text, *(part for call in calls for part in call))).encode()
            called = ConversationMessage("assistant", found.text, tuple(ToolCall("", *call) for call in calls), thought=thought)
        except ValueError:
            return said, True
        fits = all(name not in request.strict or fits_schema(request.tools, name, arguments) for name, arguments in calls)
        return (called, False) if fits else (said, True)

    def _warn_once(self, text: str, kind: str = "") -> None:
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            _log.warning("%s", text)
