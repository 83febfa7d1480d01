"""Checks that read files, import user code or start workers. Heavy modules are imported inside, because `plan` does not need them."""

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config, read_end_tokens
from megatron_rl.plugs import AGENTS, TRACKERS
from megatron_rl.preflight.rule import Facts, Needs, rule
from parallel.model_geometry import ModelGeometry, as_critic


@rule(Needs.PLUGS)
def environment_can_be_loaded(facts: Facts) -> None:
    from megatron_rl.rollout.environments.base import load_environment

    if facts.config.environment is not None:
        load_environment(facts.config.environment.name)


@rule(Needs.PLUGS)
def agent_can_be_loaded(facts: Facts) -> None:
    agent = facts.config.agent
    if agent is None:
        return
    if agent.name is not None:
        AGENTS.load(agent.name)
    elif agent.command is not None and shutil.which(agent.command[0]) is None:
        rule = "is not an executable program on this machine"
        raise UserError("agent.command", agent.command[0], rule, "give its path, or add its folder to PATH")


@rule(Needs.TASK | Needs.TRAINER)
def agent_has_a_chat_template(facts: Facts) -> None:
    if facts.config.agent is not None:
        from megatron_rl.hf.tokenizer import load_tokenizer
        from megatron_rl.rollout.generation import check_chat_template

        check_chat_template(facts.config, load_tokenizer(facts.config.model.folder))


@rule(Needs.TRAINER | Needs.PLUGS)
def loss_and_advantage_can_be_computed(facts: Facts) -> None:
    from megatron_rl.algorithm.plug_check import check_algorithm

    check_algorithm(facts.config.algorithm)


@rule(Needs.TASK | Needs.TRAINER)
def tokenizer_can_be_loaded(facts: Facts) -> None:
    """Load the tokenizer, and write a copy of its files as for an engine. Not needed by `eval`, which loads the tokenizers of its
    checkpoints immediately after the checks."""
    from megatron_rl.hf.tokenizer import load_tokenizer
    from megatron_rl.hf.write import describe_weights, write_all_but_weights

    tokenizer, vocab = load_tokenizer(folder := facts.config.model.folder), facts.model.vocab
    if tokenizer.vocab_size > vocab or tokenizer.eos_token_id >= vocab:  # added tokens that no prompt uses may lie outside
        found = f"its tokenizer has {tokenizer.vocab_size} tokens and the end token {tokenizer.eos_token_id}"
        raise UserError(
            "model.path", str(folder), f"{found}, but config.json vocab_size is {vocab}", "use config.json and tokenizer of one model"
        )
    read_end_tokens(folder, facts.hf_config)
    with TemporaryDirectory(prefix="megatron-rl-") as copy:
        write_all_but_weights(Path(copy), describe_weights(facts.hf_config, facts.contract), folder)


@rule(Needs.TASK | Needs.TRAINER)
def problems_can_be_read(facts: Facts) -> None:
    """Not needed by `eval`, which reads its problems immediately after the checks, and then calls the plugs on them."""
    facts.problems  # noqa: B018 - raises if they cannot be read


@rule(Needs.TASK)
def rewards_can_be_computed(facts: Facts) -> None:
    from megatron_rl.rewards.scorer import check_rewards

    check_rewards(facts.config.reward, facts.first_problems)


@rule(Needs.TASK | Needs.TRAINER)
def turns_can_be_taken(facts: Facts) -> None:
    """Not needed by `eval`, see `problems_can_be_read`."""
    if facts.config.environment is not None or facts.config.agent is not None:
        from megatron_rl.hf.tokenizer import load_tokenizer
        from megatron_rl.rollout.generation import check_turns

        check_turns(facts.config, load_tokenizer(facts.config.model.folder), facts.first_problems)


@rule(Needs.TASK | Needs.TRAINER)
def trackers_can_be_loaded(facts: Facts) -> None:
    for name in facts.config.log.trackers:
        TRACKERS.load(name)


@rule(Needs.WEIGHTS | Needs.MODEL)
def weights_can_be_fetched(facts: Facts) -> None:
    """Download a hub model. This follows all checks without weights, because a large model has hundreds of gigabytes."""
    from megatron_rl.hf.hub import fetch_weights

    fetch_weights(facts.path, facts.option)


@rule(Needs.WEIGHTS | Needs.MODEL)
def tensors_match_the_model(facts: Facts) -> None:
    """Check names, shapes and dtypes, which are in the headers of the files."""
    facts.checkpoint.check(facts.model)


@rule(Needs.WEIGHTS | Needs.MODEL | Needs.TRAINER)
def mtp_tensors_are_complete(facts: Facts) -> None:
    """Only required if the multi-token prediction layers are trained. Otherwise they may be missing or not quantized."""
    if facts.config.train.mtp_loss_scaling_factor:
        model = replace(facts.model, trains_mtp=True)
        facts.checkpoint.check(model)
        facts.checkpoint.check_scales(model.tensors().values(), facts.contract.trainer_format)


@rule(Needs.WEIGHTS | Needs.MODEL | Needs.TRAINER)
def tensors_match_the_critic(facts: Facts) -> None:
    """Like `tensors_match_the_model`, for `critic.path`, which may have a value head."""
    from megatron_rl.hf.read import HFCheckpoint

    path = facts.config.critic.path
    if path is not None and facts.config.algorithm.has_critic:
        hf_config = as_critic(read_config(path, "critic.path"))
        checkpoint, model = HFCheckpoint(path, hf_config, "critic.path"), ModelGeometry.from_hf_config(hf_config)
        checkpoint.check(model)
        checkpoint.check_scales(model.tensors().values(), facts.contract.trainer_format)


@rule(Needs.WEIGHTS | Needs.MODEL | Needs.TRAINER)
def scales_match_the_precision(facts: Facts) -> None:
    facts.checkpoint.check_scales(facts.model.tensors().values(), facts.contract.trainer_format)
