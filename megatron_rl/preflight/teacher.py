"""Rules on the teacher of on-policy distillation: it reads what the policy writes, in the policy's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.preflight.layouts import longest_sequence_fits, megatron_builds_the_model, trainer_divides_the_model
from megatron_rl.preflight.rule import Facts, Needs, rule
from parallel.plug import InputError


def _of_teacher(facts: Facts) -> Facts | None:
    """Return the facts with the teacher as the model; None without one."""
    teacher = facts.config.teacher
    if teacher is None:
        return None
    if str(teacher.path).startswith(HUB_PREFIX):
        raise UserError("teacher.path", str(teacher.path), "is on the hub, and only a folder is loaded", "download it, give its folder")
    hf_config = read_config(teacher.path, "teacher.path")
    return replace(facts, hf_config=hf_config, path=teacher.path, option="teacher.path", geometry=None)


def _refuse(facts: Facts, rule: str, fix: str) -> UserError:
    return UserError("teacher.path", str(facts.path), rule, fix)


@rule(Needs.TRAINER | Needs.MODEL)
def teacher_reads_the_policys_tokens(facts: Facts) -> None:
    teacher = _of_teacher(facts)
    if teacher is None:
        return
    if teacher.model.vocab != facts.model.vocab:
        rule = f"has {teacher.model.vocab} tokens, the policy {facts.model.vocab}: it must score the policy's own"
        raise _refuse(teacher, rule, "give a teacher with the same tokenizer")
    _check(longest_sequence_fits, teacher)


@rule(Needs.TRAINER | Needs.MODEL)
def losses_take_the_teachers_advantages(facts: Facts) -> None:
    teacher = facts.config.teacher
    if teacher is not None and teacher.kl_in == "advantage" and facts.config.algorithm.loss == "gmpo":
        rule = "has one advantage for a completion, and [teacher] gives one to each token"
        raise UserError("algorithm.loss", "gmpo", rule, 'use ppo, gspo or cispo, or set teacher.kl_in = "loss"')


@rule(Needs.TRAINER | Needs.MODEL | Needs.LAYOUT)
def trainer_divides_the_teacher(facts: Facts) -> None:
    teacher = _of_teacher(facts)
    if teacher is not None:
        _check(megatron_builds_the_model, teacher)
        _check(trainer_divides_the_model, teacher)


def _check(of_model: Callable[[Facts], None], teacher: Facts) -> None:
    try:
        of_model(teacher)
    except (UserError, InputError) as error:
        raise _refuse(teacher, f"does not fit this run: {error}", "change that, or give another teacher") from None


@rule(Needs.TASK | Needs.TRAINER)
def teacher_has_the_policys_tokenizer(facts: Facts) -> None:
    """As large a vocabulary may be another one."""
    from megatron_rl.hf.tokenizer import load_tokenizer

    teacher = _of_teacher(facts)
    if teacher is None:
        return
    own, other = load_tokenizer(facts.config.model.folder), load_tokenizer(teacher.path, "teacher.path")
    if own.get_vocab() != other.get_vocab():
        raise _refuse(teacher, "has other tokens than the policy: it must score the policy's own", "give a teacher with the same tokenizer")


@rule(Needs.WEIGHTS | Needs.MODEL | Needs.TRAINER)
def tensors_are_those_of_the_teacher(facts: Facts) -> None:
    teacher = _of_teacher(facts)
    if teacher is not None:
        teacher.checkpoint.check(teacher.model)
        teacher.checkpoint.check_scales(teacher.model.tensors().values(), teacher.contract.trainer_format)
