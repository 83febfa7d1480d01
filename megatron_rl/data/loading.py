"""Loads the training and held-out problems of a configuration, with finished prompts and without overlap."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig, DataSourceConfig, TrainDataSourceConfig
from megatron_rl.data.files import SOURCE_FIX
from megatron_rl.data.left_out import HELD_OUT, REPEATED, TOO_LONG, UNANSWERED, LeftOut
from megatron_rl.data.orders import ProblemOrder, check_difficulty, compute_fingerprint, order_by_difficulty, shuffle_epochs
from megatron_rl.data.own_source import ProblemGenerator, check_generator, load_generator
from megatron_rl.data.prompt_template import describe_format, list_oddities, make_prompt_formatter, read_template
from megatron_rl.data.sets import ProblemSet, make_key, make_question_key, read_set
from megatron_rl.data.stream import ProblemStream, mix_orders
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.prompt_tokens import check_prompt, encode_prompt
from megatron_rl.hf.special_text import find_special_text, put_marks, split_marks
from megatron_rl.types import Problem

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_FIRST_PROBLEMS = 3  # problems of each training set that user code is tried on
_CHECKED_POSITIONS = 64  # problems that a generator makes immediately, so that an unusable generator fails before the run


def load_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[ProblemStream, list[Problem]]:
    """Return the stream of training problems and the held-out problems, whose prompts are templated.

    Held-out problems are in the order of `data.eval`, `data.eval_size` of each set, or all if it has fewer. Rows are left out if they have
    no gold answer, if they equal an earlier row of the set or of an earlier training set in everything that reaches policy and judge, if
    they are held out (`data.overlap`), or if their prompt has more than `data.max_prompt_tokens` tokens. Their numbers are logged with an
    example.

    Raises:
        UserError: A file, source or template is invalid, a set has no problems left, or it loses more rows than `data.max_left_out` allows.
    """
    with as_user_error():
        return _Loader(cfg.data, tokenizer).read()


def load_held_out(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Return the held-out problems of `load_problems` without reading `data.train`."""
    with as_user_error():
        return _Loader(cfg.data, tokenizer).read_held_out()


def check_data(data: DataConfig, model: Path) -> tuple[ProblemStream, list[Problem]]:
    """Load all problems once, so that errors are raised before a long startup. Return the training problems, and the first problems of each
    training set with the held-out problems. `model`: checkpoint folder with the tokenizer."""
    from megatron_rl.hf.tokenizer import load_tokenizer

    read_template(data)
    if not data.train:
        raise UserError("data.train", None, "is required for training", SOURCE_FIX)
    loader = _Loader(data, load_tokenizer(model), quiet=True)
    with as_user_error():
        held_out = loader.read_held_out()
        orders = [loader.order(source) for source in data.train]
    first = [order.at(position) for order in orders for position in range(_FIRST_PROBLEMS)]
    return loader.mix(orders), [*first, *held_out]


def _uses_difficulty(source: DataSourceConfig) -> TypeGuard[TrainDataSourceConfig]:
    return isinstance(source, TrainDataSourceConfig) and (source.needs_pass_rates or source.curriculum != "none")


class _PromptBuilder:
    """Turns questions into prompts and checks their tokens."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._format_prompt, self._tokenizer, self._data = make_prompt_formatter(data, tokenizer), tokenizer, data

    def apply_template(self, problem: Problem) -> Problem:
        if self._data.special_text == "refuse":
            others = [message for message in problem.history if message["role"] != "assistant"]
            if found := find_special_text(self._tokenizer).find([problem.prompt, others, problem.tools]):
                rule = f"problem {problem.id} holds {found!r}, which looks like a control token"
                raise UserError("data.special_text", "refuse", rule, 'remove it, or write "plain" to encode it as text')
        prompt, positions = split_marks(self._format_prompt(problem.prompt, problem.history, problem.tools))
        return dataclasses.replace(problem, prompt=prompt, text_positions=positions, history=(), tools=())

    def check_lengths(self, problems: Sequence[Problem]) -> list[bool]:
        """Return for each templated prompt whether it is short enough. Raise UserError like `check_prompt`."""
        chat, prompts = self._data.chat, [problem.prompt for problem in problems]
        ids = self._tokenizer(prompts, add_special_tokens=not chat)["input_ids"]
        for index, problem in enumerate(problems):
            if problem.text_positions:
                ids[index] = encode_prompt(self._tokenizer, put_marks(problem.prompt, problem.text_positions), chat)
            check_prompt(self._tokenizer, problem.prompt, ids[index], chat)
        return [len(ids_T) <= self._data.max_prompt_tokens for ids_T in ids]

    def build(self, problems: Sequence[Problem], name: str, left_out: LeftOut) -> tuple[list[Problem], list[bool]]:
        """Return the problems of the set `name` with templated prompts, without those that are too long, and which of them remain."""
        templated, most = [self.apply_template(problem) for problem in problems], self._data.max_prompt_tokens
        if marked := [problem.id for problem in templated if problem.text_positions]:
            text = "%s: %d prompts hold text that looks like a control token, which is encoded as text by data.special_text (such as %s)"
            left_out.warn(text, name, len(marked), marked[0])
        fits = self.check_lengths(templated)
        kept = [problem for problem, short in zip(templated, fits, strict=True) if short]
        if not kept:
            rule = f"all {len(templated)} prompts of {name} are longer than that many tokens"
            raise UserError("data.max_prompt_tokens", most, rule, "raise it or shorten the template")
        if len(kept) < len(templated):
            left_out.add(TOO_LONG.format(most), templated[fits.index(False)].id, len(templated) - len(kept))
        return kept, fits


class _Loader:
    """Reads the sets of a configuration: first the held-out ones, then the training sets in their order."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, quiet: bool = False) -> None:
        """`quiet`: log no numbers."""
        self._data, self._builder, self._quiet = data, _PromptBuilder(data, tokenizer), quiet
        self._format = describe_format(data, tokenizer)
        for oddity in () if quiet else list_oddities(data, tokenizer):
            _log.warning("%s", oddity)
        self._reserved: dict[bytes, str] = {}  # overlap key and id of each held-out problem
        self._seen: dict[bytes, str] = {}  # row key and id of each training problem

    def read(self) -> tuple[ProblemStream, list[Problem]]:
        """Return the stream of training problems and the held-out problems to score."""
        scored, sources = self.read_held_out(), self._data.train
        return self.mix([self.order(source) for source in sources]), scored

    def mix(self, orders: Sequence[ProblemOrder]) -> ProblemStream:
        """Return the stream of the training sets' orders."""
        stream = mix_orders(orders, [source.weight for source in self._data.train])
        template, *chat = self._format
        stream.templates = {"data.prompt_template_file": compute_fingerprint(template), "data.chat": compute_fingerprint(*chat)}
        return stream

    def read_held_out(self) -> list[Problem]:
        """Return the held-out problems to score."""
        data, scored = self._data, list[Problem]()
        for source in data.eval:
            name = f"data.eval ({source.label})"
            left_out = LeftOut(name, data, self._quiet)
            if generator := load_generator(source, data, "data.eval"):
                check_generator(generator, data, "data.eval")
                candidates = [dataclasses.replace(problem, source=source.label) for problem in generator.held_out(data.eval_size)]
                keys, total = [make_key(problem, problem.columns) for problem in candidates], len(candidates)
            else:
                found, total = self._read(source, "data.eval", left_out)
                candidates, keys = _drop_repeated(found.problems, found.keys, {}, left_out)
            self._reserved |= {self._overlap_key(*each): each[0].id for each in zip(candidates, keys, strict=True)}
            usable, _ = self._builder.build(candidates, name, left_out)
            left_out.report(total)
            if len(usable) > data.eval_size:
                usable = random.Random(f"{data.seed}/eval").sample(usable, data.eval_size)
            elif len(usable) < data.eval_size and not self._quiet:
                _log.warning("%s: %d held-out problems, fewer than data.eval_size = %d", name, len(usable), data.eval_size)
            scored += usable
        return scored

    def order(self, source: TrainDataSourceConfig) -> ProblemOrder:
        """Return the order of a training set."""
        if generator := load_generator(source, self._data, "data.train"):
            check_generator(generator, self._data, "data.train")
            if _uses_difficulty(source):
                rule = "generates problems without end, so it has no epochs that pass rates or a curriculum could apply to"
                raise UserError("data.train", source.source, rule, "remove curriculum and the bounds, or use a function that yields rows")
            return self._order_generated(generator, source)
        name, seed = f"data.train ({source.label})", f"{self._data.seed}/{source.label}"
        left_out = LeftOut(name, self._data, self._quiet)
        found, total = self._read(source, "data.train", left_out)
        if _uses_difficulty(source):
            check_difficulty(found.problems, source)
        problems, keys = self._drop_held_out(found, left_out)
        if not problems:
            fix = 'use different files, or set data.overlap = "row" if equal questions with other answers are other problems'
            raise UserError("data.train", source.source, "all of its questions are also in data.eval", fix)
        problems, keys = _drop_repeated(problems, keys, self._seen, left_out)
        if not problems:
            raise UserError("data.train", source.source, "all of its problems are in an earlier set", "remove it")
        problems, fits = self._builder.build(problems, name, left_out)
        left_out.report(total)
        identity = (*self._format, *itertools.compress(keys, fits))
        if _uses_difficulty(source):
            return order_by_difficulty(problems, source, seed, identity)
        return shuffle_epochs(problems, seed, identity)

    def _read(self, source: DataSourceConfig, field: str, left_out: LeftOut) -> tuple[ProblemSet, int]:
        """Return a set and the number of its rows."""
        found = read_set(source, self._data, field)
        if found.unanswered:
            left_out.add(UNANSWERED, f"row {found.unanswered[0]}", len(found.unanswered))
        return found, len(found.problems) + len(found.unanswered)

    def _overlap_key(self, problem: Problem, key: bytes) -> bytes:
        """Return the key by which a training problem is held out. `key`: that of the row."""
        return key if self._data.overlap == "row" else make_question_key(problem, bool(self._data.system_prompt))

    def _find_held_out(self, problem: Problem, key: bytes) -> str | None:
        """Return the id of the held-out problem that a training problem repeats, or None."""
        return None if self._data.overlap == "allow" else self._reserved.get(self._overlap_key(problem, key))

    def _drop_held_out(self, found: ProblemSet, left_out: LeftOut) -> tuple[list[Problem], list[bytes]]:
        problems, keys = [], []
        for problem, key in zip(found.problems, found.keys, strict=True):
            if held_out := self._find_held_out(problem, key):
                left_out.add(HELD_OUT, f"{problem.id}, which is {held_out}")
            else:
                problems.append(problem)
                keys.append(key)
        return problems, keys

    def _order_generated(self, generator: ProblemGenerator, source: DataSourceConfig) -> ProblemOrder:
        def accept(problem: Problem) -> bool:
            held_out = self._find_held_out(problem, make_key(problem, problem.columns))
            return held_out is None and self._builder.check_lengths([self._builder.apply_template(problem)])[0]

        def problem_at(position: int) -> Problem:
            problem = generator.train_problem(position, accept)
            return dataclasses.replace(self._builder.apply_template(problem), source=source.label)

        for position in range(_CHECKED_POSITIONS):
            problem_at(position)
        reserved = () if self._data.overlap == "allow" else sorted(self._reserved)
        facts = *self._format, self._data.max_prompt_tokens, reserved
        return ProblemOrder(problem_at, compute_fingerprint(*generator.fingerprint, *facts))


def _drop_repeated(
    problems: Sequence[Problem], keys: Sequence[bytes], seen: dict[bytes, str], left_out: LeftOut
) -> tuple[list[Problem], list[bytes]]:
    """Return the first problem of each key that is not in `seen`, with its key, and add the keys to `seen`."""
    kept, kept_keys = [], []
    for problem, key in zip(problems, keys, strict=True):
        if key in seen:
            left_out.add(REPEATED, f"{problem.id}, which equals {seen[key]}")
            continue
        seen[key] = problem.id
        kept.append(problem)
        kept_keys.append(key)
    return kept, kept_keys
