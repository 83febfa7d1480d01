"""The section `[data]`: where problems come from and how they are asked. Imports without torch. See docs/guides/data.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.plugs import DATA_FORMATS, DATA_SOURCES

FormatName = Annotated[str, AfterValidator(DATA_FORMATS.check_name)]
"""`gsm8k`, `math`, `deepmath`, `aime`, or your own as module:attribute."""


class ColumnsConfig(ConfigSection):
    """Names of the columns of a row; `a.b` is the field b of the column a."""

    question: str = ""
    """A text."""
    messages: str = ""
    """Instead of `question`, a chat: a list of {role, content}, with tool_calls where the assistant called tools. Needs `data.chat`."""
    answer: str = ""
    """The gold answer, a text or a number; with `messages` it may be left out: then it is what the assistant says last."""
    tools: str = ""
    """The tools that the chat template tells the policy of: a list of {type, function: {name, description, parameters}}, or its JSON text.
    Needs `data.chat`."""
    level: str = ""
    """Difficulty; none where it is empty."""
    pass_rate: str = ""
    """Share of correct answers, of some model, from 0 to 1; null where it is not known."""

    @model_validator(mode="after")
    def _name_question_and_answer(self) -> ColumnsConfig:
        if bool(self.question) == bool(self.messages):
            raise ValueError("must name one of question and messages")
        if self.question and not self.answer:
            raise ValueError("must name the answer's column, for a question has none")
        return self

    @property
    def needed(self) -> frozenset[str]:
        """Columns that hold what is named."""
        names = filter(None, (self.question, self.messages, self.answer, self.tools, self.level, self.pass_rate))
        return frozenset(column for name in names for column in (name, name.partition(".")[0]))


class DataSourceConfig(ConfigSection):
    """One set of problems."""

    source: str = Field(min_length=1)
    """The path of a JSONL, JSON or Parquet file, `hf:OWNER/NAME[@REVISION][:CONFIG]:SPLIT` from the hub, or your own as
    `module:attribute`."""
    format: FormatName | None = None
    """Format of the rows; `data.format` where neither this nor `columns` is given."""
    columns: ColumnsConfig | None = None
    """Instead of a format, the names of the rows' columns; `data.columns` where neither is given."""
    settings: dict[str, Any] | None = None
    """Keyword arguments of a source of your own; `data.settings` where it is not given."""
    name: str = ""
    """The set's name in metrics; where it is not given the folder and file, the name on the hub and the split, or the attribute in lower
    case."""

    @model_validator(mode="after")
    def _takes_settings(self) -> DataSourceConfig:
        if self.settings is not None and not self.is_own:
            raise ValueError(f"settings are for a source of your own, which {self.source!r} is not")
        return self

    @model_validator(mode="after")
    def _has_one_format(self) -> DataSourceConfig:
        _check_one_format(self.format, self.columns)
        return self

    @property
    def is_own(self) -> bool:
        """Whether this is the user's own function or class."""
        return DATA_SOURCES.is_own(self.source) and not self.source.startswith(HUB_PREFIX)

    @property
    def label(self) -> str:
        """`name`, or one derived from `source`: data/gsm8k/test.jsonl and hf:openai/gsm8k:test are both gsm8k/test."""
        if self.name:
            return self.name
        if self.is_own:
            return self.source.replace(":", ".").rpartition(".")[2].lower()
        if self.source.startswith(HUB_PREFIX):
            repository, *rest = self.source.removeprefix(HUB_PREFIX).split(":")
            return "/".join([Path(repository).name, *rest])
        path = Path(self.source).absolute()
        return f"{path.parent.name}/{path.stem}"


def _check_one_format(format: str | None, columns: ColumnsConfig | None) -> None:
    if format is not None and columns is not None:
        raise ValueError(f"format {format} and columns exclude each other: leave one out")


class TrainDataSourceConfig(DataSourceConfig):
    """One set of a mixture to train on."""

    weight: float = Field(1.0, ge=1e-6, le=1e6)
    """Share of this set in the stream, in proportion to the others' weights."""
    curriculum: Literal["none", "level", "pass_rate"] = "none"
    """Each epoch begins with the problems of the lowest level, or of the highest pass rate."""
    pass_rate: Literal["column", "measured"] = "column"
    """A problem's pass rate: that of `columns.pass_rate`; or, once the run has asked it, the share of correct answers in its last group."""
    pass_rate_low: float = Field(0.0, ge=0, lt=1)
    """An epoch leaves out problems of lower pass rates than this; not those whose rate is unknown."""
    pass_rate_high: float = Field(1.0, gt=0, le=1)
    """And those of higher ones."""
    recheck_every: int = Field(0, ge=0)
    """measured: every so many epochs one has all problems, as their rates may have changed; 0: what is left out stays out."""

    @property
    def filters(self) -> bool:
        return (self.pass_rate_low, self.pass_rate_high) != (0.0, 1.0)

    @property
    def needs_pass_rates(self) -> bool:
        return self.filters or self.curriculum == "pass_rate"

    @model_validator(mode="after")
    def _difficulty(self) -> TrainDataSourceConfig:
        if self.pass_rate_low >= self.pass_rate_high:
            raise ValueError(f"pass_rate_low ({self.pass_rate_low}) must be below pass_rate_high ({self.pass_rate_high})")
        if self.pass_rate == "measured" and not self.needs_pass_rates:
            raise ValueError('nothing uses the pass rate that is measured: set pass_rate_low, pass_rate_high or curriculum = "pass_rate"')
        if self.recheck_every and not (self.filters and self.pass_rate == "measured"):
            raise ValueError('recheck_every asks what a measured pass rate left out: set pass_rate = "measured" and a bound')
        return self


def _as_tables(value: Any) -> Any:
    """Turn a plain text into one source, an empty one into none."""
    if isinstance(value, str):
        return ({"source": value},) if value else ()
    if not isinstance(value, list | tuple):
        raise ValueError('must be one source in quotes, or a list of tables such as [{source = "PATH", format = "gsm8k"}]')
    return tuple(value)


class DataConfig(ConfigSection):
    """Where problems come from."""

    train: Annotated[tuple[TrainDataSourceConfig, ...], BeforeValidator(_as_tables)] = ()
    """A `source` in one text, or several as tables `[[data.train]]` with their weights. Only training needs it."""
    eval: Annotated[tuple[DataSourceConfig, ...], BeforeValidator(_as_tables)] = ()
    """Held-out sets, as `train`; an empty text for no evaluation. `train` loses every question that one of them holds."""
    format: FormatName | None = None
    """Format of rows where the source names none; generated problems need none."""
    columns: ColumnsConfig | None = None
    """Instead of a format, the names of the rows' columns, where the source names none."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of sources of your own that name none."""
    prompt_template: str = "{question}"
    """Text around each question; must hold `{question}`."""
    prompt_template_file: Path | None = None
    """A UTF-8 text file that is the template instead."""
    chat: bool = False
    """The templated question is the user's message in the tokenizer's chat template, which ends where the assistant begins."""
    system_prompt: str = ""
    """chat: the system's message before it, in place of one that a row's `messages` begin with; empty for theirs, or none."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer problems are left out, counted and logged."""
    eval_size: int = Field(128, ge=1)
    """Problems of each held-out set that an evaluation scores."""
    eval_every: int = Field(5, ge=1)
    """RL steps between evaluations; the first (step 0) and the last step are always evaluated."""
    seed: int = 0

    @model_validator(mode="after")
    def _sets_have_names_of_their_own(self) -> DataConfig:
        for field, sources in (("train", self.train), ("eval", self.eval)):
            for label, count in Counter(source.label for source in sources).items():
                if count > 1:
                    raise ValueError(f"{count} sets of {field} are called {label!r}: give each a name of its own")
        return self

    @model_validator(mode="after")
    def _columns(self) -> DataConfig:
        _check_one_format(self.format, self.columns)
        for columns in filter(None, (self.columns, *(each.columns for each in (*self.train, *self.eval)))):
            if columns.messages and not self.chat:
                raise ValueError(f"columns.messages = {columns.messages!r} needs chat = true: roles have no place outside a chat template")
            if columns.tools and not self.chat:
                raise ValueError(f"columns.tools = {columns.tools!r} needs chat = true: tools have no place outside a chat template")
        return self

    @model_validator(mode="after")
    def _template(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} must hold {{question}}")
        if self.prompt_template_file and "prompt_template" in self.model_fields_set:
            raise ValueError("prompt_template and prompt_template_file exclude each other: leave one out")
        if self.system_prompt and not self.chat:
            raise ValueError("system_prompt needs chat = true: without a chat template there is no place for it")
        return self
