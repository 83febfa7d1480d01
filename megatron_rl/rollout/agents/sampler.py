"""Sample completions by agents: each works in a process of its own, and asks the policy through the endpoint as often as it likes.

Token in, token out: what the policy said earlier in a conversation goes back to the engine as the ids that were sampled. An agent that
fails, hangs or loops costs its own episode; an error of the run's, such as lost engines, is the group's, which is then sampled again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from megatron_rl.config.agent import AgentConfig
from megatron_rl.errors import AbortedError, EngineLostError, RunError
from megatron_rl.observability import hang_watchdog
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.endpoint import AgentEndpoint
from megatron_rl.rollout.agents.episode import AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import PolicyRequest
from megatron_rl.rollout.agents.process import AgentProcess, AgentServer, ServerEndedError
from megatron_rl.rollout.engine import Abort, Engine, check_versions
from megatron_rl.types import Completion, Generation, Problem, SamplingParams

_log = logging.getLogger(__name__)
_LOCAL = "127.0.0.1,localhost"


class AgentSampler:
    """Samples completions by agents; use it as a context manager, which owns the endpoint."""

    def __init__(self, config: AgentConfig, engine: Engine, tokenizer: Any) -> None:
        self._config, self._engine = config, engine
        self._format = ChatFormat(tokenizer)
        self._endpoint = AgentEndpoint(self._answer, config.workers)
        self._room = threading.Semaphore(config.workers)
        self._lock, self._running, self._closed = threading.Lock(), set[AgentProcess](), False
        self._server: AgentServer | None = None
        self._told: set[str] = set()

    def __enter__(self) -> AgentSampler:
        self._endpoint.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
        self._endpoint.__exit__(*exception)

    def close(self) -> None:
        """End all agents, and start no other."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            process.kill()
        if self._server is not None:
            self._server.close()

    def sample(
        self,
        problems_B: Sequence[Problem],
        samplings_B: Sequence[SamplingParams],
        version: int,
        staleness: int = 0,
        abort: Abort | None = None,
    ) -> list[Completion]:
        """Return one completion per problem, in order, not yet scored: its agent's last conversation, with the others as `branches`.

        `max_new_tokens` bounds what the policy samples in one conversation. Raise RunError and AbortedError as
        `Sampler.sample` does.
        """
        episodes = [
            AgentEpisode(problem, sampling, version, staleness, self._config, self._format, abort)
            for problem, sampling in zip(problems_B, samplings_B, strict=True)
        ]
        with ThreadPoolExecutor(max(len(episodes), 1), thread_name_prefix="megatron-rl-agent") as threads:
            completions = list(threads.map(self._run, episodes))
        errors = [completion.environment_error for completion in completions if completion.environment_error]
        if errors:
            _log.warning("agents failed in %d of %d episodes: %s", len(errors), len(completions), errors[0])
        return completions

    def _run(self, episode: AgentEpisode) -> Completion:
        """Run one agent to its end."""
        with self._room, episode.abort.calling(lambda: episode.kill()):
            key = self._endpoint.open(episode)
            try:
                process = self._start(key, episode)
                result = process.run()
            finally:
                self._endpoint.close(key)
            with self._lock:
                self._running.discard(process)
        completion = episode.finish(result.error, result.reward)
        if episode.abort.requested:
            raise AbortedError
        if episode.failure is not None:
            raise episode.failure
        if self._closed:
            raise EngineLostError("the agents were ended")
        return completion

    def _start(self, key: str, episode: AgentEpisode) -> AgentProcess:
        # a proxy of the machine's does not know the endpoint
        local = {name: ",".join(filter(None, (os.environ.get(name), _LOCAL))) for name in ("NO_PROXY", "no_proxy")}
        environment = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": key, **local}
        with self._lock:
            if self._closed:
                raise EngineLostError("the agents were ended")
            process = self._fork(environment, episode.problem)
            self._running.add(process)
        episode.kill = process.kill
        if episode.abort.requested or episode.failure:  # too early to end it then
            process.kill()
        return process

    def _fork(self, environment: dict[str, str], problem: Problem) -> AgentProcess:
        for _ in range(2):  # what agents are forked from may have been ended, such as for want of memory
            if self._server is None or self._server.ended:
                self._server = AgentServer(self._config)
            with suppress(ServerEndedError):
                return AgentProcess(self._config, self._server, environment, problem)
        what = self._config.name or " ".join(self._config.command or ())
        raise RunError(f"no agent {what} can be started: the process that they are forked from ends at once; its error is above")

    def _answer(self, episode: AgentEpisode, request: PolicyRequest) -> Turn:
        """Sample the turn that a request asks for. Called by the endpoint's threads."""
        self._tell_overridden(request)
        planned = episode.plan(request)
        hang_watchdog.enter_phase("generate")
        (generation,) = self._engine.generate([planned.prompt_ids_T], [planned.sampling], episode.abort)
        check_versions(generation, episode.version, episode.staleness)
        content, calls, misspelt = self._read(generation, request)
        return episode.add(planned, generation, content, calls, misspelt)

    def _read(self, generation: Generation, request: PolicyRequest) -> tuple[str, list[tuple[str, str]], bool]:
        """Return what an answer says, the tools that it calls, and whether it tried to call one in a wrong way."""
        ids_T, _ = self._format.split_end(generation.output_ids_T)
        text = self._format.decode(ids_T)
        for stop in request.stop:  # the tokens of its last stop text stay in the sample
            text = text.partition(stop)[0]
        if not (request.calls_tools and self._config.tool_parser):
            return text, [], False
        whole = self._format.decode(ids_T, skip_special_tokens=False)
        parsed = self._engine.parse_tool_calls(whole, request.tools, self._config.tool_parser)
        if parsed is None:
            return text, [], True
        return (parsed.text, parsed.calls, False) if parsed.calls else (text, [], parsed.text != whole)

    def _tell_overridden(self, request: PolicyRequest) -> None:
        """Say once of each option that the run decides it."""
        for name in request.overridden:
            self._tell_once(f"agents ask for a {name} of their own; the policy is sampled as the run says")
        if request.calls_tools and not self._config.tool_parser:
            self._tell_once("agents offer tools, and agent.tool_parser is empty: calls are not read")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)
