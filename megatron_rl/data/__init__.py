"""Problems: where they come from, what is held out, and the order in which the loop sees them.

`load_problems` is the entry; `tokenizer`, `arithmetic`, `jsonl` and `stream` are its parts.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import Config
from megatron_rl.config_data import Data
from megatron_rl.data import arithmetic, jsonl
from megatron_rl.data.stream import ProblemStream, fingerprint, shuffled_epochs
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

__all__ = ["ProblemStream", "load_problems"]

_log = logging.getLogger(__name__)


def load_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[ProblemStream, list[Problem]]:
    """The stream of train problems and the held-out problems (empty when `data.eval` is None), prompts templated.

    Held-out problems are distinct: `data.eval_size` of them, or a file's all when it has fewer. Prompts of more than
    `data.max_prompt_tokens` tokens are left out, and so is every train problem whose prompt the held-out source holds; both counts
    are logged. Raises UserError for bad files, bad levels, and when nothing is left to train on or to evaluate.
    """
    data = cfg.data

    def fits(prompts: list[str]) -> list[bool]:
        return [len(ids_T) <= data.max_prompt_tokens for ids_T in tokenizer(prompts)["input_ids"]]

    held_out, reserved_prompts = _held_out(data, fits)
    return _train_stream(data, fits, reserved_prompts), held_out


_Fits = Callable[[list[str]], list[bool]]


def _held_out(data: Data, fits: _Fits) -> tuple[list[Problem], set[str]]:
    """The problems to score, and every prompt that training must not see: for a file all of its prompts, scored or not."""
    if data.eval is None:
        return [], set()
    if data.eval == arithmetic.SOURCE:
        candidates = _templated(arithmetic.generate(data.eval_size, data.levels, data.seed, "eval"), data)
    else:
        candidates = _templated(jsonl.read_jsonl(Path(data.eval), data.format, "data.eval"), data)
    distinct = {problem.prompt: problem for problem in candidates}
    usable = _without_long_prompts(list(distinct.values()), data, fits, "data.eval")
    if len(usable) > data.eval_size:
        usable = random.Random(f"{data.seed}/eval").sample(usable, data.eval_size)
    elif len(usable) < data.eval_size:
        _log.warning("data.eval = %s: %d held-out problems, fewer than data.eval_size = %d", data.eval, len(usable), data.eval_size)
    return usable, set(distinct)


def _train_stream(data: Data, fits: _Fits, reserved_prompts: set[str]) -> ProblemStream:
    if data.train == arithmetic.SOURCE:
        return _generated_stream(data, fits, reserved_prompts)
    problems = _templated(jsonl.read_jsonl(Path(data.train), data.format, "data.train"), data)
    allowed = [problem for problem in problems if problem.prompt not in reserved_prompts]
    if len(allowed) < len(problems):
        _log.warning("data.train = %s: left out %d problems that data.eval also holds", data.train, len(problems) - len(allowed))
    if not allowed:
        raise UserError("data.train", data.train, "every problem of it is also in data.eval", "give another file for one of them")
    return shuffled_epochs(_without_long_prompts(allowed, data, fits, "data.train"), data.seed)


def _generated_stream(data: Data, fits: _Fits, reserved_prompts: set[str]) -> ProblemStream:
    def templated(problem: Problem) -> Problem:
        return dataclasses.replace(problem, prompt=_apply_template(data.prompt_template, problem.prompt))

    def accept(problem: Problem) -> bool:
        prompt = templated(problem).prompt
        return prompt not in reserved_prompts and fits([prompt])[0]

    def problem_at(position: int) -> Problem:
        return templated(arithmetic.train_problem(position, data.levels, data.seed, accept))

    arithmetic.check_levels(data.levels)
    for position in range(len(data.levels)):  # a level that can never fit fails now, not in the middle of a run
        problem_at(position)
    order = (data.levels, data.seed, data.prompt_template, data.max_prompt_tokens, sorted(reserved_prompts))
    return ProblemStream(problem_at, fingerprint(*order))


def _apply_template(template: str, question: str) -> str:
    """Plain replacement: braces in a question or elsewhere in the template mean nothing."""
    return template.replace("{question}", question)


def _templated(problems: list[Problem], data: Data) -> list[Problem]:
    return [dataclasses.replace(problem, prompt=_apply_template(data.prompt_template, problem.prompt)) for problem in problems]


def _without_long_prompts(problems: list[Problem], data: Data, fits: _Fits, field: str) -> list[Problem]:
    kept = [problem for problem, fit in zip(problems, fits([p.prompt for p in problems]), strict=True) if fit]
    dropped = len(problems) - len(kept)
    if not kept:
        rule = f"all {dropped} prompts of {field} are longer than that many tokens"
        raise UserError("data.max_prompt_tokens", data.max_prompt_tokens, rule, "raise it or shorten data.prompt_template")
    if dropped:
        _log.warning("%s: left out %d of %d problems with prompts over %d tokens", field, dropped, len(problems), data.max_prompt_tokens)
    return kept
