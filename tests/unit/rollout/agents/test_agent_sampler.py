"""Agents in their own processes through the real endpoint: their requests become completions, and their failures affect only themselves."""

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.agents import AGENTS, ChatTokenizer, Policy, config
from support.processes import alive_after

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig
from megatron_rl.errors import AbortedError, EngineLostError, RunError, UserError
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.agents.trial import check_agent
from megatron_rl.rollout.engine import Abort
from megatron_rl.types import Completion, Problem, SamplingParams


@contextmanager
def sampler_of(policy: Any = None, **settings: Any) -> Iterator[AgentSampler]:
    with AgentSampler(config(**settings), policy or Policy(lambda prompt: "xy"), ChatTokenizer(), DataConfig()) as sampler:
        yield sampler


def sample(sampler: AgentSampler, *prompts: str, abort: Abort | None = None) -> list[Completion]:
    problems = [Problem(str(number), prompt, "0.75") for number, prompt in enumerate(prompts)]
    return sampler.sample(problems, [SamplingParams(1.0, 99, seed=number) for number in range(len(prompts))], 5, 0, abort)


def test_agents_fail_or_hang_each_for_itself_and_end_with_all_their_processes(descendants):
    with sampler_of() as sampler:
        good, broken, left, daemon, branched, loop = sample(sampler, "a", "raise", "leave", "daemon", "branch", "loop")
        assert len(alive_after(descendants(), 0)) == 2, "the server and its keeper"
    assert (good.text, good.calls, good.environment_error, good.finish_reason) == ("xy", 1, "", "stop")
    assert broken.environment_error == "exit code 1: KeyError: 'no such thing'" and broken.finish_reason == "agent"
    assert broken.sampled_count == 3, "what it asked is kept; its reward is another matter"
    assert left.environment_error == daemon.environment_error == ""
    assert branched.calls == 3 and len(branched.conversations) == 2 and branched.total_sampled == 9
    assert (loop.finish_reason, loop.environment_error, loop.calls) == ("turns", "", 16), "cut at its limit, and ended as it went on"
    assert alive_after(descendants(), 60) == []
    with sampler_of(timeout=4) as sampler:
        (hung,) = sample(sampler, "hang")
    assert hung.environment_error == "timeout after 4 s" and alive_after(descendants(), 60) == []


@pytest.mark.long
def test_an_agent_that_kills_or_stops_its_keeper_costs_only_itself(descendants):
    with sampler_of(name=f"{AGENTS}:end_keeper", timeout=4) as sampler:
        killed, stopped = sample(sampler, "kill", "stop")
    assert (killed.environment_error, stopped.environment_error) == ("signal 9", "timeout after 4 s")
    assert alive_after(descendants(), 60) == []


def test_an_agent_may_give_its_own_reward_or_be_a_program():
    with sampler_of(own_reward=True) as sampler:
        drawn = [completion.own_reward or 0.0 for prompts in (("draw", "draw"), ("draw",)) for completion in sample(sampler, *prompts)]
        assert drawn[0] == drawn[2] < 1 < drawn[1] and drawn[1] % 1 != drawn[0], "a fork's random numbers are those of its seed"
        given, missing = sample(sampler, "reward", "a")
    assert (given.own_reward, given.environment_error) == (0.5, "")
    assert missing.own_reward is None and missing.environment_error == "wrote '' instead of a reward, and agent.own_reward is on"
    command = (sys.executable, str(Path(__file__).parents[3] / "support" / "agent_programs.py"))
    with sampler_of(name=None, command=command, own_reward=True) as sampler:
        (completion,) = sample(sampler, "a")
    assert (completion.text, completion.own_reward, completion.environment_error) == ("xy", 0.75, "")
    with sampler_of(name=None, command=("no-such-program",)) as sampler:
        (missing,) = sample(sampler, "a")
    assert missing.environment_error == "exit code 127: no-such-program: No such file or directory" and not missing.conversations


def test_agents_survive_the_end_of_their_server_but_a_module_that_ends_its_process_ends_the_run():
    with sampler_of(name=f"{AGENTS}:end_server") as sampler:
        lost, again = sample(sampler, "a")[0], sample(sampler, "a")[0]
    assert lost.environment_error == again.environment_error == "the process that agents are forked from has ended"
    with sampler_of(name="support.no_such_module:agent") as sampler, pytest.raises(RunError, match=r"no agent support\.no_such_module"):
        sample(sampler, "a")


def test_the_memory_of_an_agent_and_its_children_is_limited_and_its_addresses_are_not(descendants):
    with sampler_of(name=f"{AGENTS}:hold_memory", memory_mb=512) as sampler:
        small, large = sample(sampler, "100", "700")
    assert (small.environment_error, small.calls) == ("", 1)
    assert re.match(
        r"signal 9: agent\.memory_mb = 512: the agent and its processes hold \d+ MiB in memory; raise it", large.environment_error
    )
    assert alive_after(descendants(), 60) == []


NODE = """
const line = require("fs").readFileSync(0, "utf8");
const ask = async (body, read) => read(await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST", body: JSON.stringify(body),
  headers: {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY}}));
(async () => {
  const messages = [{role: "user", content: JSON.parse(line).prompt}];
  const first = await ask({messages}, async (answer) => (await answer.json()).choices[0].message);
  messages.push(first, {role: "user", content: "again"});
  const text = await ask({messages, stream: true}, (answer) => answer.text());
  if (!text.includes("data: [DONE]")) process.exit(5);
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node")
def test_the_guides_agent_in_node_runs_within_the_default_limits(tmp_path):
    (tmp_path / "agent.js").write_text(NODE)
    with sampler_of(name=None, command=("node", str(tmp_path / "agent.js"))) as sampler:
        (completion,) = sample(sampler, "a")
    assert (completion.environment_error, completion.calls, len(completion.conversations)) == ("", 2, 1)


class Stuck(Policy):
    """Answers when the request is aborted, or never."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "xy")
        self.began, self.end = threading.Event(), threading.Event()

    def generate(self, prompts_B, samplings, abort=None):
        with abort.calling(self.end.set):
            self.began.set()
            self.end.wait()
        if abort.requested:
            raise AbortedError
        raise EngineLostError("the engines were stopped")


@pytest.mark.parametrize("error", [AbortedError, EngineLostError])
def test_agents_end_with_their_group_and_with_the_run(error, descendants):
    policy, abort = Stuck(), Abort()
    with sampler_of(policy) as sampler:

        def end() -> None:
            policy.began.wait()
            if error is AbortedError:
                abort.request()
            else:
                sampler.close()
                policy.end.set()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(error):
            sample(sampler, "a", "hang", abort=abort)
        thread.join()
        with pytest.raises(error):
            sample(sampler, "a", abort=abort)
    assert alive_after(descendants(), 60) == []


def test_an_error_of_the_runs_is_not_the_agents():
    lost = SimpleNamespace(generate=Mock(side_effect=EngineLostError("gone")))
    with sampler_of(lost) as sampler, pytest.raises(EngineLostError, match="gone"):
        sample(sampler, "a")


def test_an_agent_that_fails_whatever_the_policy_says_is_refused_before_a_run():
    def check(prompts: list[str], **settings: Any) -> None:
        agent = {"name": f"{AGENTS}:ask", "timeout": 5, **settings}
        run = Config.model_validate({"model": {"path": "m"}, "agent": agent}, strict=False)
        check_agent(run.agent, run, ChatTokenizer(), [Problem(str(number), prompt, "5") for number, prompt in enumerate(prompts)])

    check(["a"])
    check(["raise", "a"])
    check(["reward"], own_reward=True)
    for prompts, settings, line in (
        (["raise"] * 4, {}, f"agent.name = '{AGENTS}:ask': fails on the first problems of a set, such as 0 (exit code 1: KeyError"),
        (["a"], {"own_reward": True}, "(wrote '' instead of a reward, and agent.own_reward is on); correct it"),
        (["a"], {"name": f"{AGENTS}:judge_nothing"}, "(it ended without a request to the policy); correct it"),
        (["a"], {"name": f"{AGENTS}:end_server"}, "agent.name = 'support.agent_programs:end_server': fails on the first problems of a set"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            check(prompts, **settings)
