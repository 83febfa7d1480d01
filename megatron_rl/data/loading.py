"""Loads the training and held-out problems of a configuration, with finished prompts and without overlap."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig, DataSourceConfig, TrainDataSourceConfig
from megatron_rl.data.files import SOURCE_FIX
from megatron_rl.data.orders import ProblemOrder, check_difficulty, compute_fingerprint, order_by_difficulty, shuffle_epochs
from megatron_rl.data.own_source import ProblemGenerator, check_generator, load_generator
from megatron_rl.data.prompt_template import make_prompt_formatter, read_template
from megatron_rl.data.sets import read_problem_set
from megatron_rl.data.stream import ProblemStream, mix_orders
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_CHECKED_POSITIONS = 64  # problems that a generator makes immediately, so that an unusable generator fails before the run


def load_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[ProblemStream, list[Problem]]:
    """Return the stream of training problems and the held-out problems, whose prompts are templated.

    Held-out problems are in the order of `data.eval`, `data.eval_size` of each set, or all if it has fewer. Dropped are: repeated questions
    within a set, training questions that occur in an earlier training set or in any held-out set, and prompts of more than
    `data.max_prompt_tokens` tokens. Questions that differ only in white space and case are equal. All counts are logged as warnings.

    Raises:
        UserError: A file, source or template is invalid, or a set has no problems left.
    """
    data, builder = cfg.data, _PromptBuilder(cfg.data, tokenizer)
    scored, reserved = _read_held_out(data, builder)
    seen: set[str] = set()
    orders = []
    for source in data.train:
        if generator := load_generator(source, data, "data.train"):
            orders.append(_order_generated(generator, source, data, builder, reserved))
        else:
            orders.append(_order_set(source, data, builder, reserved, seen))
    return mix_orders(orders, [source.weight for source in data.train]), scored


def load_held_out(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Return the held-out problems of `load_problems` without reading `data.train`."""
    return _read_held_out(cfg.data, _PromptBuilder(cfg.data, tokenizer))[0]


def check_data(data: DataConfig, model: Path) -> None:
    """Read every set and the template, so that errors are raised before a long startup. `model`: checkpoint folder with the tokenizer."""
    read_template(data)
    chats: list[Problem] = []
    if not data.train:
        raise UserError("data.train", None, "is required for training", SOURCE_FIX)
    for field, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for source in sources:
            if generator := load_generator(source, data, field):
                check_generator(generator, source, data, field)
                if _uses_difficulty(source):
                    rule = "generates problems without end, so it has no epochs that pass rates or a curriculum could apply to"
                    raise UserError(field, source.source, rule, "remove curriculum and the bounds, or use a function that yields rows")
            else:
                problems = read_problem_set(source, data, field, quiet=True)
                chats += [problem for problem in problems if problem.history or problem.tools]
                if _uses_difficulty(source):
                    check_difficulty(problems, source)
    if data.chat:
        from megatron_rl.hf.tokenizer import load_tokenizer

        format_prompt = make_prompt_formatter(data, load_tokenizer(model))
        for problem in chats:
            format_prompt(problem.prompt, problem.history, problem.tools)


def normalize_question(question: str) -> str:
    """Return the question without differences in white space and case."""
    return " ".join(question.split()).casefold()


def _make_key(problem: Problem) -> str:
    """Return a key of the question with its tools and earlier messages. Equal questions have equal keys."""
    calls = [message["tool_calls"] for message in problem.history if "tool_calls" in message]
    tools = [json.dumps(part, sort_keys=True) for part in (*calls, *problem.tools)]
    return normalize_question(" ".join([*tools, *(message["content"] for message in problem.history), problem.prompt]))


def _uses_difficulty(source: DataSourceConfig) -> TypeGuard[TrainDataSourceConfig]:
    return isinstance(source, TrainDataSourceConfig) and (source.needs_pass_rates or source.curriculum != "none")


class _PromptBuilder:
    """Turns questions into prompts and checks their lengths."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.format_prompt, self._tokenizer, self._max_tokens = make_prompt_formatter(data, tokenizer), tokenizer, data.max_prompt_tokens

    def apply_template(self, problem: Problem) -> Problem:
        prompt = self.format_prompt(problem.prompt, problem.history, problem.tools)
        return dataclasses.replace(problem, prompt=prompt, history=(), tools=())

    def check_lengths(self, problems: Sequence[Problem]) -> list[bool]:
        """Return for each templated prompt whether it is short enough."""
        ids = self._tokenizer([problem.prompt for problem in problems], add_special_tokens=False)["input_ids"]
        return [len(ids_T) <= self._max_tokens for ids_T in ids]

    def build(self, problems: Sequence[Problem], name: str) -> list[Problem]:
        """Return the problems of the set `name` with templated prompts, without those that are too long."""
        templated = [self.apply_template(problem) for problem in problems]
        kept = [problem for problem, fits in zip(templated, self.check_lengths(templated), strict=True) if fits]
        dropped = len(templated) - len(kept)
        if not kept:
            rule = f"all {dropped} prompts of {name} are longer than that many tokens"
            raise UserError("data.max_prompt_tokens", self._max_tokens, rule, "raise it or shorten the template")
        if dropped:
            _log.warning("%s: dropped %d of %d problems with prompts over %d tokens", name, dropped, len(templated), self._max_tokens)
        return kept


def _read_held_out(data: DataConfig, builder: _PromptBuilder) -> tuple[list[Problem], set[str]]:
    """Return the held-out problems to score, and the keys of all held-out problems."""
    scored: list[Problem] = []
    reserved: set[str] = set()
    for source in data.eval:
        name = f"data.eval ({source.label})"
        if generator := load_generator(source, data, "data.eval"):
            candidates = [dataclasses.replace(problem, source=source.label) for problem in generator.held_out(data.eval_size)]
        else:
            candidates = _drop_repeated(read_problem_set(source, data, "data.eval"), set(), name)
        reserved |= {_make_key(problem) for problem in candidates}
        usable = builder.build(candidates, name)
        if len(usable) > data.eval_size:
            usable = random.Random(f"{data.seed}/eval").sample(usable, data.eval_size)
        elif len(usable) < data.eval_size:
            _log.warning("%s: %d held-out problems, fewer than data.eval_size = %d", name, len(usable), data.eval_size)
        scored += usable
    return scored, reserved


def _drop_repeated(problems: list[Problem], seen: set[str], name: str) -> list[Problem]:
    """Return the first problem of each question that is not in `seen`, and add the keys to `seen`."""
    kept = []
    for problem in problems:
        if (key := _make_key(problem)) not in seen:
            seen.add(key)
            kept.append(problem)
    if len(kept) < len(problems):
        _log.warning("%s: dropped %d problems with repeated questions", name, len(problems) - len(kept))
    return kept


def _order_set(
    source: TrainDataSourceConfig, data: DataConfig, builder: _PromptBuilder, reserved: set[str], seen: set[str]
) -> ProblemOrder:
    name = f"data.train ({source.label})"
    problems = read_problem_set(source, data, "data.train")
    allowed = [problem for problem in problems if _make_key(problem) not in reserved]
    if len(allowed) < len(problems):
        _log.warning("%s: dropped %d problems that are also in data.eval", name, len(problems) - len(allowed))
    if not allowed:
        raise UserError("data.train", source.source, "all of its problems are also in data.eval", "use different files")
    distinct = _drop_repeated(allowed, seen, name)
    if not distinct:
        raise UserError("data.train", source.source, "all of its problems are in an earlier set", "remove it")
    usable, seed = builder.build(distinct, name), f"{data.seed}/{source.label}"
    return order_by_difficulty(usable, source, seed) if _uses_difficulty(source) else shuffle_epochs(usable, seed)


def _order_generated(
    generator: ProblemGenerator, source: DataSourceConfig, data: DataConfig, builder: _PromptBuilder, reserved: set[str]
) -> ProblemOrder:
    def accept(problem: Problem) -> bool:
        return _make_key(problem) not in reserved and builder.check_lengths([builder.apply_template(problem)])[0]

    def problem_at(position: int) -> Problem:
        problem = generator.train_problem(position, accept)
        return dataclasses.replace(builder.apply_template(problem), source=source.label)

    for position in range(_CHECKED_POSITIONS):
        problem_at(position)
    prompt = builder.format_prompt("{question}")
    return ProblemOrder(problem_at, compute_fingerprint(*generator.fingerprint, prompt, data.max_prompt_tokens, sorted(reserved)))
