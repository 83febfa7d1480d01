"""Checks of the teacher for on-policy distillation. It must read the policy's tokens and fit into the policy's layout."""

from collections.abc import Callable
from dataclasses import replace

from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.preflight.layouts import (
    checkpoint_format_is_known,
    longest_sequence_fits,
    megatron_supports_the_layout,
    trainer_can_shard_the_model,
)
from megatron_rl.preflight.rule import Facts, Needs, rule
from parallel.plug import InputError


def _of_teacher(facts: Facts) -> Facts | None:
    """Return the facts with the teacher as the model, or None if there is no teacher."""
    teacher = facts.config.teacher
    if teacher is None:
        return None
    if str(teacher.path).startswith(HUB_PREFIX):
        rule = "is on the hub, but a teacher can only be loaded from a local folder"
        raise UserError("teacher.path", str(teacher.path), rule, "download it and give its folder")
    hf_config = read_config(teacher.path, "teacher.path")
    return replace(facts, hf_config=hf_config, path=teacher.path, option="teacher.path", geometry=None)


def _refuse_vocabulary(teacher: Facts, difference: str) -> UserError:
    rule = f"must score the policy's tokens, but its vocabulary {difference}"
    return UserError("teacher.path", str(teacher.path), rule, "give a teacher with the policy's tokenizer")


def _check(check: Callable[[Facts], None], teacher: Facts) -> None:
    try:
        check(teacher)
    except (UserError, InputError) as error:
        rule, fix = f"does not fit this run: {error}", "change this setting, or give another teacher"
        raise UserError("teacher.path", str(teacher.path), rule, fix) from None


@rule(Needs.TRAINER | Needs.MODEL)
def teacher_fits_the_policys_sequences(facts: Facts) -> None:
    if (teacher := _of_teacher(facts)) is None:
        return
    if teacher.model.vocab != facts.model.vocab:
        raise _refuse_vocabulary(teacher, f"has {teacher.model.vocab} tokens and the policy's {facts.model.vocab}")
    _check(checkpoint_format_is_known, teacher)
    _check(longest_sequence_fits, teacher)


@rule(Needs.TRAINER | Needs.MODEL)
def loss_supports_token_advantages(facts: Facts) -> None:
    teacher = facts.config.teacher
    if teacher is not None and teacher.kl_in == "advantage" and facts.config.algorithm.loss == "gmpo":
        rule = "needs one advantage per completion, but [teacher] gives each token its own"
        raise UserError("algorithm.loss", "gmpo", rule, 'use ppo, gspo or cispo, or set teacher.kl_in = "loss"')


@rule(Needs.TRAINER | Needs.MODEL | Needs.LAYOUT)
def trainer_can_shard_the_teacher(facts: Facts) -> None:
    if teacher := _of_teacher(facts):
        _check(megatron_supports_the_layout, teacher)
        _check(trainer_can_shard_the_model, teacher)


@rule(Needs.TASK | Needs.TRAINER)
def teacher_has_the_policys_tokenizer(facts: Facts) -> None:
    """Vocabularies of the same size may still differ."""
    from megatron_rl.hf.tokenizer import load_tokenizer

    if teacher := _of_teacher(facts):
        policys, teachers = load_tokenizer(facts.config.model.folder), load_tokenizer(teacher.path, "teacher.path")
        if policys.get_vocab() != teachers.get_vocab():
            raise _refuse_vocabulary(teacher, "differs from the policy's")


@rule(Needs.WEIGHTS | Needs.MODEL | Needs.TRAINER)
def tensors_match_the_teacher(facts: Facts) -> None:
    if teacher := _of_teacher(facts):
        teacher.checkpoint.check(teacher.model)
        teacher.checkpoint.check_scales(teacher.model.tensors().values(), teacher.contract.trainer_format)
