"""As tests/engine/test_agents_behind_a_proxy.py, with a policy over letters."""

import json
import time

from support import lossy_agents
from support.agents import ChatTokenizer, Policy, config

from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import Problem, SamplingParams


class Numbering(Policy):
    """Answers its n-th prompt with n, after a while."""

    def __init__(self):
        super().__init__(lambda prompt: f"n{len(self.asked)}")

    def generate(self, prompts_B, samplings, abort=None):
        with abort.calling(lambda: None):
            answer = super().generate(prompts_B, samplings)
            time.sleep(0.5)
            return answer


def test_what_is_trained_is_what_was_received(tmp_path, monkeypatch):
    monkeypatch.setenv(lossy_agents.FOLDER_VARIABLE, str(tmp_path))
    settings = config(name="support.lossy_agents:solve", max_calls=6, timeout=300)
    with AgentSampler(settings, lossy_agents.HoldingEngine(Numbering(), tmp_path), ChatTokenizer(), DataConfig()) as sampler:
        completions = sampler.sample([Problem(str(n), "", "") for n in range(3)], [SamplingParams(1.0, 99, seed=n) for n in range(3)], 5)
    assert [completion.environment_error for completion in completions] == [""] * 3
    for completion in completions:
        received = json.loads((tmp_path / completion.problem.id).read_text())["received"]
        assert lossy_agents.list_trained(completion, ChatTokenizer()) == sorted(received) and len(received) == 6
        assert len(completion.conversations) == 2 and not completion.history_notes
