"""Problems: where they come from, which are held out, and the order in which the loop sees them.

`load_problems` is the entry. Its parts: `sets` reads one set (`files`, `hub`, `formats`), `own_source` is the user's, `prompt_template`
makes a prompt of a question, `stream` orders and mixes. Questions that differ only in white space and case are the same question.
"""

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
from megatron_rl.data.own_source import ProblemGenerator, check_generator, load_generator
from megatron_rl.data.prompt_template import PromptFormatter, make_prompt_formatter, read_template
from megatron_rl.data.sets import read_problem_set
from megatron_rl.data.stream import ProblemOrder, ProblemStream, compute_fingerprint, mix_orders, shuffle_epochs
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_FIRST_POSITIONS = 64
"""Problems of a generator that are made at once: one that is sure to fail must not do so in the middle of a run."""


def load_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[ProblemStream, list[Problem]]:
    """Return the stream of train problems and the held-out problems (empty where `data.eval` is), with templated prompts.

    Held-out problems come set by set in the order of `data.eval`, each with its set's label as `source`: `data.eval_size` of a set, or
    all when it has fewer, no question twice within a set. The train sets lose every question that any held-out set has, scored or not, and
    repetitions within themselves and of earlier sets; prompts of more than `data.max_prompt_tokens` tokens are left out everywhere.
    All counts are logged as warnings. Raise UserError for bad files, sources or templates, and when a set has nothing left.
    """
    builder = _PromptBuilder.of(cfg.data, tokenizer)
    scored, reserved = _read_held_out(cfg.data, builder)
    return _train_stream(cfg.data, builder, reserved), scored


def load_held_out(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Return the held-out problems of `load_problems`, without a look at `data.train`."""
    return _read_held_out(cfg.data, _PromptBuilder.of(cfg.data, tokenizer))[0]


def check_data(data: DataConfig, model: Path) -> None:
    """Read every set and the template once, so that their errors appear now and not after minutes of start-up.

    `model` is the folder of the checkpoint with the tokenizer.
    """
    read_template(data)
    chats: list[Problem] = []
    if not data.train:
        raise UserError("data.train", None, "names no problems", SOURCE_FIX)
    for field, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for source in sources:
            if generator := load_generator(source, data, field):
                check_generator(generator, source, data, field)
                _check_endless(source)
            else:
                problems = read_problem_set(source, data, field, quiet=True)
                chats += [problem for problem in problems if problem.history or problem.tools]
                if _has_difficulty(source):
                    from megatron_rl.data.epochs import check_difficulty

                    check_difficulty(problems, source)
    if data.chat:
        from megatron_rl.hf.tokenizer import load_tokenizer

        format_prompt = make_prompt_formatter(data, load_tokenizer(model))
        for problem in chats:
            format_prompt(problem.prompt, problem.history, problem.tools)


def _has_difficulty(source: DataSourceConfig) -> TypeGuard[TrainDataSourceConfig]:
    return isinstance(source, TrainDataSourceConfig) and (source.needs_pass_rates or source.curriculum != "none")


def _check_endless(source: DataSourceConfig) -> None:
    if _has_difficulty(source):
        rule = "generates problems without end: it has no epochs that pass rates or a curriculum could choose and order"
        raise UserError("data.train", source.source, rule, "leave out curriculum and the bounds, or name a function of rows")


def normalize_question(question: str) -> str:
    """Return what two spellings of the same question have in common."""
    return " ".join(question.split()).casefold()


def _find_key(problem: Problem) -> str:
    """Return what two spellings of the same problem have in common, its tools and the messages before its question included."""
    calls = [message["tool_calls"] for message in problem.history if "tool_calls" in message]
    tools = [json.dumps(part, sort_keys=True) for part in (*calls, *problem.tools)]
    return normalize_question(" ".join([*tools, *(message["content"] for message in problem.history), problem.prompt]))


@dataclasses.dataclass(frozen=True)
class _PromptBuilder:
    """Makes prompts of bare questions, and leaves out those that are too long."""

    format_prompt: PromptFormatter
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    @classmethod
    def of(cls, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> _PromptBuilder:
        return cls(make_prompt_formatter(data, tokenizer), tokenizer, data.max_prompt_tokens)

    def apply_template(self, problem: Problem) -> Problem:
        prompt = self.format_prompt(problem.prompt, problem.history, problem.tools)
        return dataclasses.replace(problem, prompt=prompt, history=(), tools=())

    def check_lengths(self, problems: Sequence[Problem]) -> list[bool]:
        """Return for each templated prompt whether it is short enough."""
        ids = self.tokenizer([problem.prompt for problem in problems], add_special_tokens=False)["input_ids"]
        return [len(ids_T) <= self.max_tokens for ids_T in ids]

    def build(self, problems: Sequence[Problem], source: str) -> list[Problem]:
        """Return the problems with prompts instead of questions; those that are too long are left out and counted."""
        templated = [self.apply_template(problem) for problem in problems]
        kept = [problem for problem, fits in zip(templated, self.check_lengths(templated), strict=True) if fits]
        dropped = len(templated) - len(kept)
        if not kept:
            rule = f"all {dropped} prompts of {source} are longer than that many tokens"
            raise UserError("data.max_prompt_tokens", self.max_tokens, rule, "raise it or shorten the template")
        if dropped:
            _log.warning("%s: left out %d of %d problems with prompts over %d tokens", source, dropped, len(templated), self.max_tokens)
        return kept


def _read_held_out(data: DataConfig, builder: _PromptBuilder) -> tuple[list[Problem], set[str]]:
    """Return the held-out problems to score, and the keys of all that are held out."""
    scored: list[Problem] = []
    reserved: set[str] = set()
    for source in data.eval:
        candidates = _candidates(source, data)
        reserved |= {_find_key(problem) for problem in candidates}
        scored += _sample(builder.build(candidates, f"data.eval ({source.label})"), source, data)
    return scored, reserved


def _candidates(source: DataSourceConfig, data: DataConfig) -> list[Problem]:
    """Return the distinct questions of a held-out set."""
    if generator := load_generator(source, data, "data.eval"):
        return [dataclasses.replace(problem, source=source.label) for problem in generator.held_out(data.eval_size)]
    return _distinct(read_problem_set(source, data, "data.eval"), set(), f"data.eval ({source.label})")


def _sample(usable: list[Problem], source: DataSourceConfig, data: DataConfig) -> list[Problem]:
    if len(usable) > data.eval_size:
        return random.Random(f"{data.seed}/eval").sample(usable, data.eval_size)
    if len(usable) < data.eval_size:
        text = "data.eval (%s): %d held-out problems, fewer than data.eval_size = %d"
        _log.warning(text, source.label, len(usable), data.eval_size)
    return usable


def _distinct(problems: list[Problem], seen: set[str], source: str) -> list[Problem]:
    """Return the first problem of each question that is not in `seen`, and extend `seen`; the others are counted."""
    kept = []
    for problem in problems:
        if (key := _find_key(problem)) not in seen:
            seen.add(key)
            kept.append(problem)
    if len(kept) < len(problems):
        _log.warning("%s: left out %d problems whose question came before", source, len(problems) - len(kept))
    return kept


def _train_stream(data: DataConfig, builder: _PromptBuilder, reserved: set[str]) -> ProblemStream:
    seen: set[str] = set()
    orders = []
    for source in data.train:
        if generator := load_generator(source, data, "data.train"):
            orders.append(_generated(generator, source, data, builder, reserved))
        else:
            orders.append(_from_set(source, data, builder, reserved, seen))
    return mix_orders(orders, [source.weight for source in data.train])


def _from_set(source: TrainDataSourceConfig, data: DataConfig, builder: _PromptBuilder, reserved: set[str], seen: set[str]) -> ProblemOrder:
    name = f"data.train ({source.label})"
    problems = read_problem_set(source, data, "data.train")
    allowed = [problem for problem in problems if _find_key(problem) not in reserved]
    if len(allowed) < len(problems):
        _log.warning("%s: left out %d problems that data.eval also holds", name, len(problems) - len(allowed))
    if not allowed:
        raise UserError("data.train", source.source, "every problem of it is also in data.eval", "give another file for one of them")
    distinct = _distinct(allowed, seen, name)
    if not distinct:
        raise UserError("data.train", source.source, "every problem of it is in a set before it", "leave it out")
    usable, seed = builder.build(distinct, name), f"{data.seed}/{source.label}"
    if not _has_difficulty(source):
        return shuffle_epochs(usable, seed)
    from megatron_rl.data.epochs import order_by_difficulty

    return order_by_difficulty(usable, source, seed)


def _generated(
    generator: ProblemGenerator, source: DataSourceConfig, data: DataConfig, builder: _PromptBuilder, reserved: set[str]
) -> ProblemOrder:
    def accept(problem: Problem) -> bool:
        return _find_key(problem) not in reserved and builder.check_lengths([builder.apply_template(problem)])[0]

    def problem_at(position: int) -> Problem:
        problem = generator.train_problem(position, accept)
        return dataclasses.replace(builder.apply_template(problem), source=source.label)

    for position in range(_FIRST_POSITIONS):
        problem_at(position)
    prompt = builder.format_prompt("{question}")
    return ProblemOrder(problem_at, compute_fingerprint(*generator.fingerprint, prompt, data.max_prompt_tokens, sorted(reserved)))
