"""Whatever a plug does costs its own sample, or ends the run with one line that names the field and the plug: a table of misdeeds and
plugs, through the functions of the training loop. Plugs in worker processes come last."""

import re

import pytest
import torch
from support import misbehaving
from support.agents import ChatTokenizer, Policy
from support.agents import config as agent_config
from support.data import load

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.distributed import to_run_error
from megatron_rl.errors import RunError, UserError
from megatron_rl.observability.trackers import Trackers
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.environments.pool import EnvironmentPool
from megatron_rl.types import Episode, Problem, SamplingParams
from parallel.plug import Plug, PlugError, SignalExit

ENDING = {
    "raises": "ValueError: two lines",
    "raises what cannot be printed": "UnprintableError: its message cannot be written",
    "stops iteration": "StopIteration",
    "calls sys.exit": "SystemExit: 0",
}
"""Misdeeds of a call that end the run, with what the line says."""


def take_loss(misdeed):
    config = AlgorithmConfig(loss="support.misbehaving:loss", loss_settings={"misdeed": misdeed})
    old = torch.tensor([-1.0, -0.5])
    samples = [TrainingSample(torch.tensor([1]), torch.tensor([2, 3]), value, old_logprobs=old) for value in (1.0, -1.0)]
    (batch,) = make_micro_batches(samples, 8)
    logprobs = torch.full_like(batch.mask, -0.9, requires_grad=True)
    try:
        total, _ = PolicyLoss(config)(logprobs, batch)
        total.backward()
    except BaseException as error:
        raise to_run_error(error) or error from None  # as `Session.run` does
    return total.item()


def take_advantage(misdeed, monkeypatch=None):
    config = AlgorithmConfig(advantage="support.misbehaving:advantage")
    return compute_advantages([1.0, 0.0, 0.0, 1.0], [False] * 4, config, 2)


def draw_problem(misdeed):
    stream, _ = load(train="support.misbehaving:Generator", settings={"start": 64})
    stream.draw(64)
    return [problem.prompt for problem in stream.next_batch(2)]


MAIN_LOOP = {
    "algorithm.loss": (take_loss, "support.misbehaving:loss", pytest.approx(0.0)),
    "algorithm.advantage": (take_advantage, "support.misbehaving:advantage", [0.5, -0.5, -0.5, 0.5]),
    "data.train": (draw_problem, "support.misbehaving:Generator", ["64?", "65?"]),
}
RETURNED = {
    "algorithm.loss": {
        "wrong length": "must return (losses, clipped) of the log-probs' shape",
        "wrong type": "must return the two tensors (losses, clipped), not float",
        "one value": "must return the two tensors (losses, clipped), not tuple",
        "numbers": "must return the two tensors (losses, clipped), not tuple",
        "no gradient": "must return losses with a gradient",
        "mutates": "must not change batch.loss_weights in place",
        "exits in the backward pass": "SystemExit: 0",
    },
    "algorithm.advantage": dict.fromkeys(
        ("nan", "wrong length", "wrong type", "nothing", "bools"), "must return finite values of the rewards' shape"
    ),
    "data.train": {
        "nan": "id, prompt and answer of a problem must be strings",
        "wrong type": "it returned 'problem', not a Problem",
        "nothing": "it returned None, not a Problem",
        "history of numbers": "",
        "columns with an object": "object cannot be sent to a worker",
        "half a character": "surrogates not allowed",
    },
}


@pytest.mark.parametrize("field", MAIN_LOOP)
def test_a_call_in_the_loop_ends_the_run_with_one_line(field, monkeypatch):
    call, name, result = MAIN_LOOP[field]
    for misdeed, says in (ENDING | RETURNED[field]).items():
        monkeypatch.setenv(misbehaving.VARIABLE, misdeed)
        with pytest.raises(RunError) as caught:
            call(misdeed)
        assert str(caught.value).startswith(f"{field} = {name!r}: fails (") and says in str(caught.value), misdeed
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700 and caught.value.exit_code == 3
    for misdeed in ("", *(["mutates"] * (field == "algorithm.advantage"))):
        monkeypatch.setenv(misbehaving.VARIABLE, misdeed)
        assert call(misdeed) == result, misdeed


def test_the_line_names_the_place_in_the_users_file():
    with pytest.raises(RunError, match=r"ValueError: two lines, misbehaving.py line \d+\)$"):
        take_loss("raises")


def read_rows(misdeed, **settings):
    source = {"source": "support.misbehaving:rows", "settings": {"misdeed": misdeed, **settings}, "format": "gsm8k"}
    stream, _ = load(train=[source])
    return sorted((problem.prompt, problem.answer, problem.columns["question"]) for problem in stream.next_batch(4))


def read_with_format():
    source = {"source": "support.misbehaving:rows", "settings": {"misdeed": ""}, "format": "support.misbehaving:read_row"}
    stream, _ = load(train=[source])
    return sorted((problem.prompt, problem.answer, problem.columns["question"]) for problem in stream.next_batch(4))


READ = [(f"{number}+1?", str(number + 1), f"{number}+1?") for number in range(4)]


def test_rows_end_the_command_before_the_run_with_one_line():
    wrong = {"wrong type": "'int' object is not iterable", "no row": "must be a JSON object, not list", "bytes": "not bytes"}
    for misdeed, says in (wrong | {"nan": "", "raises": "two lines", "later": "two lines"}).items():
        with pytest.raises(UserError) as caught:
            read_rows(misdeed, **({"later": "raises"} if misdeed == "later" else {}))
        assert str(caught.value).startswith("data.train = 'support.misbehaving:rows") and says in str(caught.value), misdeed
        assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    for misdeed in ("mutates", ""):
        assert read_rows(misdeed, names=["a"]) == READ, "every row is the one that was yielded, though the function fills one object"


def test_a_format_ends_the_command_before_the_run_with_one_line(monkeypatch):
    wrong = {
        "raises": "two lines",
        "nan": "pass_rate = nan",
        "wrong length": "not messages with role and content",
        "wrong type": "it returned 5, not a ProblemRow",
        "nothing": "it returned None",
        "a level of text": "level = 'high', not an integer",
        "half a character": "surrogates not allowed",
    }
    for misdeed, says in wrong.items():
        monkeypatch.setenv(misbehaving.VARIABLE, misdeed)
        with pytest.raises(UserError) as caught:
            read_with_format()
        assert re.match(r"data.train = 'support.misbehaving:rows:1': format support.misbehaving:read_row fails \(", str(caught.value))
        assert says in str(caught.value) and "\n" not in str(caught.value), misdeed
    monkeypatch.setenv(misbehaving.VARIABLE, "mutates")
    assert all(question == f"{number}+1?" for number, (*_, question) in enumerate(read_with_format())), "columns are the row"


@pytest.mark.parametrize("misdeed", ["raises", "mutates"])
def test_a_tracker_costs_its_own_rows(misdeed, monkeypatch, tmp_path):
    said, config, row = list[str](), {"train": {"steps": 3}}, {"reward/mean": 0.5}
    trackers = Trackers(said.append)
    monkeypatch.setenv(misbehaving.VARIABLE, "mutates" if misdeed == "mutates" else "")
    trackers.start(["support.misbehaving:Tracker"], tmp_path, config, None)
    monkeypatch.setenv(misbehaving.VARIABLE, misdeed)
    for step in (1, 2):
        trackers.log(row, step)
    trackers.finish("finished")
    assert (config, row) == ({"train": {"steps": 3}}, {"reward/mean": 0.5})
    says = ENDING.get(misdeed)
    assert said == ([f"tracker support.misbehaving:Tracker failed, the run continues ({says})"] if says else [])
    if says:
        monkeypatch.setenv(misbehaving.VARIABLE, f"start {misdeed}")
        with pytest.raises(UserError, match=re.escape(f"log.trackers = 'support.misbehaving:Tracker': does not start ({says})")):
            Trackers(said.append).start(["support.misbehaving:Tracker"], tmp_path, config, None)


IN_WORKERS = {
    "raises": "ValueError: two",
    "raises no Exception": "OddError",
    "interrupts": "KeyboardInterrupt",
    "nan": "nan",
    "wrong length": "list",
    "wrong type": "str",
}
"""Misdeeds that cost a sample in a worker, with what its error says."""
ENDED = {"calls sys.exit": "SystemExit: 0", "hangs": "timeout after", "kills itself": "signal 9"}
LAST = ("calls sys.exit", "prints 100 MB", "mutates", "hangs", "calls os._exit", "kills itself")


def test_a_reward_costs_its_own_sample():
    texts = ["gold", *IN_WORKERS, *LAST]  # a worker's first task has more time
    problems = [Problem(str(number), "?", "gold", columns={"gold": "gold"}) for number in range(len(texts))]
    config = RewardConfig(function="support.misbehaving:reward", workers=1, timeout=3.0, on_error="exclude")
    with Scorer(config, lambda line: None) as scorer:
        rewards = dict(zip(texts, scorer.score(texts, problems, [1] * len(texts)), strict=True))
    for misdeed, says in (IN_WORKERS | ENDED).items():
        assert rewards[misdeed].excluded and says in rewards[misdeed].error, (misdeed, rewards[misdeed])
    assert rewards["calls os._exit"].excluded and "exit" in rewards["calls os._exit"].error
    assert [rewards[text].error for text in ("prints 100 MB", "mutates", "gold")] == [""] * 3 and rewards["gold"].correct
    assert {problem.answer for problem in problems} == {"gold"} and all(problem.columns == {"gold": "gold"} for problem in problems)


def test_an_environment_costs_its_own_completion():
    texts = ["fine", *IN_WORKERS, *LAST]
    episodes = [Episode(str(number), "?", "gold") for number in range(len(texts))]
    with EnvironmentPool(EnvironmentConfig(name="support.misbehaving:Environment", workers=1, timeout=3.0)) as pool:
        replies = dict(zip(texts, pool.step([(text, "") for text in texts], episodes), strict=True))
    says = IN_WORKERS | ENDED | {"nan": "not float", "wrong length": "not tuple"}
    for misdeed, error in says.items():
        assert error in replies[misdeed].error and replies[misdeed].message is None, (misdeed, replies[misdeed])
    assert "exit" in replies["calls os._exit"].error
    assert [replies[text].message.text for text in ("prints 100 MB", "mutates", "fine")] == ["prints 100 MB", "mutates", "fine"]
    assert {episode.answer for episode in episodes} == {"gold"}


def test_an_agent_costs_its_own_episode():
    prompts = ["fine", *IN_WORKERS, *LAST, "forks"]
    problems = [Problem(prompt, prompt, "gold") for prompt in prompts]
    settings = agent_config(name="support.misbehaving:agent", own_reward=True, timeout=10.0)
    with AgentSampler(settings, Policy(lambda prompt: "xy"), ChatTokenizer(), DataConfig()) as sampler:
        completions = sampler.sample(problems, [SamplingParams(1.0, 9, seed=number) for number in range(len(prompts))], 5, 0)
    found = {completion.problem.id: completion for completion in completions}
    exits = dict.fromkeys(("calls sys.exit", "calls os._exit"), "wrote '' instead of a reward")
    for misdeed, says in (IN_WORKERS | ENDED | {"raises": "lines", **exits}).items():
        assert says in found[misdeed].environment_error, (misdeed, found[misdeed].environment_error)
    for fine in ("prints 100 MB", "mutates", "fine"):
        assert (found[fine].environment_error, found[fine].own_reward) == ("", 0.5), fine
    assert {problem.answer for problem in problems} == {"gold"}


def test_ctrl_c_and_a_clusters_signal_pass_through_plugs():
    for error in (KeyboardInterrupt, SignalExit):
        with pytest.raises(error), Plug("section.field", {}).call("own:thing"):
            raise error


def test_a_failure_outside_of_a_call_is_still_that_of_the_plug():
    with pytest.raises(UserError):
        load(train=[{"source": "support.misbehaving:rows", "settings": {"misdeed": "raises"}, "format": "gsm8k"}])
    with pytest.raises(SystemExit) as caught:
        misbehaving.do("calls sys.exit")
    assert "SystemExit: 0, misbehaving.py line" in str(to_run_error(caught.value))
    assert to_run_error(ValueError("ours")) is None
    assert str(PlugError("a", "b:c", "d")) == "a = 'b:c': d"
