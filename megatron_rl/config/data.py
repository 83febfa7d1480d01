"""The `[data]` section. See docs/guides/data.md."""

import datetime
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from megatron_rl.config.base import MAX_COUNT, MAX_STEPS, MAX_TOKENS, ConfigSection
from megatron_rl.config.change import EQUAL, EVALUATION, FREELY, NAMED, Change
from megatron_rl.config.hub import HUB_PREFIX, SPLIT_COLON
from megatron_rl.config.reading import check_path
from megatron_rl.plugs import DATA_FORMATS, DATA_SOURCES

FormatName = Annotated[str, AfterValidator(DATA_FORMATS.check_name)]
"""`gsm8k`, `math`, `deepmath`, `aime`, `verl`, or your own as `module:attribute`."""


_PROMPTS = Change(NAMED, "Changes prompts, also those of agents.")
_HELD_OUT = Change(EQUAL, f"Held-out problems are left out of `data.train`, whose problems are compared. {EVALUATION}")
_PROBLEMS = "All rows, the prompt template, and the order are compared. Other problems, if named, are drawn from the same position on."
_SETS = Change(EQUAL, f"{_PROBLEMS} Pass rates are then measured anew. A set whose file has moved keeps its name.")


class ColumnsConfig(ConfigSection):
    """Column names of a data set. `a.b` is the field b of the column a."""

    question: str = ""
    """Column with the question as text."""
    messages: str = ""
    """Column with a chat, used instead of `question`: a list of {role, content}, with tool_calls in messages of the assistant that call
    tools. Requires `data.chat`."""
    answer: str = ""
    """Column with the gold answer: a text, a number, or a list or object, which becomes its JSON text. Optional with `messages`; the
    default is the assistant's final message."""
    tools: str = ""
    """Column with the tools for the chat template: a list of {type, function: {name, description, parameters}}, or that list as JSON text.
    Requires `data.chat`."""
    level: str = ""
    """Column with the difficulty level. Optional."""
    pass_rate: str = ""
    """Column with the fraction of correct answers by some model, from 0 to 1, or null if unknown. Optional."""

    @model_validator(mode="after")
    def _name_question_and_answer(self) -> Self:
        if bool(self.question) == bool(self.messages):
            raise ValueError("must set exactly one of question and messages")
        if self.question and not self.answer:
            raise ValueError("must set answer, because a question column has no gold answer")
        return self


class DataSourceConfig(ConfigSection):
    """One set of problems."""

    source: str = Field(min_length=1)
    """Path of a JSONL, JSON or Parquet file (also `.jsonl.gz`, `.jsonl.zst`), a folder or a pattern of such files, a data set on the hub as
    `hf:OWNER/NAME[@REVISION][:CONFIG]:SPLIT`, with a slice such as `train[:1000]` if wanted, or your own source as `module:attribute`."""
    format: FormatName | None = None
    """Row format. Defaults to `data.format` if `columns` is not set either."""
    columns: ColumnsConfig | None = None
    """Column names, used instead of `format`. Defaults to `data.columns` if `format` is not set either."""
    settings: dict[str, Any] | None = None
    """Keyword arguments of a custom source. Defaults to `data.settings`."""
    keep_columns: tuple[str, ...] | None = None
    """Columns of a row that reach judges. Defaults to `data.keep_columns`."""
    name: str = ""
    """Name of the set in metrics. Defaults to folder and file, hub name and split, or the lowercase attribute of a custom source."""

    @field_validator("source")
    @classmethod
    def _names_a_file(cls, source: str) -> str:
        check_path(source)
        return source

    @model_validator(mode="after")
    def _takes_settings(self) -> Self:
        if self.settings is not None and not self.is_own:
            raise ValueError(f"settings only apply to a custom source (module:attribute), and {self.source!r} is not one")
        return self

    @model_validator(mode="after")
    def _has_one_format(self) -> Self:
        _check_one_format(self.format, self.columns)
        return self

    @property
    def is_own(self) -> bool:
        """Whether the source is the user's own function or class."""
        return DATA_SOURCES.is_own(self.source) and not self.source.startswith(HUB_PREFIX)

    @property
    def label(self) -> str:
        """`name`, or a name derived from `source`: data/gsm8k/test.jsonl and hf:openai/gsm8k:test both become gsm8k/test."""
        return self.label_in(Path())

    def label_in(self, folder: Path) -> str:
        """Return the label that the set has in a working directory."""
        if self.name:
            return self.name
        if self.is_own:
            return self.source.replace(":", ".").rpartition(".")[2].lower()
        if self.source.startswith(HUB_PREFIX):
            repository, *rest = SPLIT_COLON.split(self.source.removeprefix(HUB_PREFIX))
            return "/".join([Path(repository).name, *rest])
        path = (folder / self.source).absolute()
        return f"{path.parent.name}/{Path(path.stem).stem if path.suffix in ('.gz', '.zst') else path.stem}"


def _check_one_format(format: str | None, columns: ColumnsConfig | None) -> None:
    if format is not None and columns is not None:
        raise ValueError(f"format {format} and columns exclude each other; leave one of them out")


class TrainDataSourceConfig(DataSourceConfig):
    """One set of a training mixture."""

    weight: float = Field(1.0, ge=1e-6, le=1e6)
    """Share of this set in the stream, relative to the weights of the other sets."""
    curriculum: Literal["none", "level", "pass_rate"] = "none"
    """Order within each epoch: shuffled, lowest level first, or highest pass rate first."""
    pass_rate: Literal["column", "measured"] = "column"
    """Source of a problem's pass rate: `columns.pass_rate`, or the fraction of correct responses in its most recent group of this run."""
    pass_rate_low: float = Field(0.0, ge=0, lt=1)
    """Minimum pass rate of the problems in an epoch. Problems with an unknown pass rate are always included."""
    pass_rate_high: float = Field(1.0, gt=0, le=1)
    """Maximum pass rate of the problems in an epoch."""
    recheck_every: int = Field(0, ge=0, le=MAX_STEPS)
    """Period in epochs at which an epoch contains all problems, because measured pass rates may have changed. With 0, excluded problems
    stay excluded."""

    @property
    def filters(self) -> bool:
        return (self.pass_rate_low, self.pass_rate_high) != (0.0, 1.0)

    @property
    def needs_pass_rates(self) -> bool:
        return self.filters or self.curriculum == "pass_rate"

    @model_validator(mode="after")
    def _difficulty(self) -> Self:
        if self.pass_rate_low >= self.pass_rate_high:
            raise ValueError(f"pass_rate_low ({self.pass_rate_low}) must be less than pass_rate_high ({self.pass_rate_high})")
        if self.pass_rate == "measured" and not self.needs_pass_rates:
            raise ValueError('the measured pass rate is not used; set pass_rate_low, pass_rate_high or curriculum = "pass_rate"')
        if self.recheck_every and not (self.filters and self.pass_rate == "measured"):
            raise ValueError('recheck_every only applies to a filter by measured pass rates; set pass_rate = "measured" and a bound')
        return self


def _as_tables(value: Any) -> Any:
    """Convert a string to one source, and an empty string to no sources."""
    if isinstance(value, str):
        return ({"source": value},) if value else ()
    if not isinstance(value, list | tuple):
        raise ValueError('must be one source in quotes, or a list of tables such as [{source = "PATH", format = "gsm8k"}]')
    return tuple(value)


class DataConfig(ConfigSection):
    """Which problems are used and how they are asked."""

    on_resume = Change(EQUAL, _PROBLEMS)

    train: Annotated[tuple[TrainDataSourceConfig, ...], BeforeValidator(_as_tables), _SETS] = ()
    """Training problems: one `source` as a string, or several as tables `[[data.train]]` with weights. Required for training."""
    eval: Annotated[tuple[DataSourceConfig, ...], BeforeValidator(_as_tables), _HELD_OUT] = ()
    """Held-out sets, in the same form as `train`; an empty string disables evaluation. Their questions are removed from `train`."""
    format: FormatName | None = None
    """Default row format of all sources. Sources that generate problems need no format."""
    columns: ColumnsConfig | None = None
    """Default column names of all sources, used instead of `format`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Default keyword arguments of custom sources."""
    keep_columns: tuple[str, ...] | None = None
    """Columns of a row that reach reward functions, environments and agents as `problem.columns`, or all if not set. Fewer columns need
    less memory. Two rows are duplicates only if these columns are equal too."""
    max_left_out: Annotated[float, Change(FREELY, "Only decides whether a start is refused.")] = Field(0.05, ge=0, le=1)
    """Largest fraction of a set's rows that may be left out because they repeat, are held out, have no gold answer, or have a prompt that
    is too long. If more would be left out, the run is refused. 1 allows any number."""
    overlap: Literal["question", "row", "allow"] = "question"
    """Which training problems are left out because they are held out. `question`: those that ask the policy the same, letter by letter.
    `row`: those whose answer and columns are equal too, for tasks with one prompt and many hidden answers. `allow`: none."""
    prompt_template: str = "{question}"
    """Text around each question. Must contain `{question}`."""
    prompt_template_file: Path | None = None
    """UTF-8 text file with the template, used instead of `prompt_template`."""
    chat: bool = False
    """Whether to apply the tokenizer's chat template, with the templated question as the user message, up to the start of the assistant's
    response. Without it, the tokenizer adds its own special tokens, such as a BOS token, as in `tokenizer(prompt)`."""
    chat_template_kwargs: Annotated[dict[str, Any], _PROMPTS] = Field(default_factory=dict)
    """Keys for the chat template, such as `{enable_thinking = false}` or `{reasoning_effort = "low"}`, for training, evaluation and
    agents. A key that the template does not use is refused."""
    date: Annotated[datetime.date, _PROMPTS] = Field(datetime.date(2026, 1, 1), strict=False)
    """The date that a chat template gets if it asks for today's. It is fixed, so that a run that is resumed on another day has the same
    prompts."""
    special_text: Annotated[Literal["plain", "token", "refuse"], _PROMPTS] = "plain"
    """How to treat text that looks like a control token, such as `<|im_end|>`, in rows, and in messages of users, tools and environments.
    `plain`: it is encoded as text. `token`: it becomes the token, so a message can forge a turn. `refuse`: the row, the request or the
    environment's message is refused. `prompt_template`, `system_prompt` and the chat template always write tokens."""
    system_prompt: str = ""
    """System message for `chat`. It replaces a system message at the start of a row's `messages`. If empty, that message is kept."""
    max_prompt_tokens: int = Field(512, ge=1, le=MAX_TOKENS)
    """Maximum prompt length in tokens. Problems with longer prompts are dropped, and their number is logged."""
    eval_size: Annotated[int, _HELD_OUT] = Field(128, ge=1, le=MAX_COUNT)
    """Number of problems of each held-out set to evaluate."""
    eval_every: Annotated[int, Change(FREELY, "Decides which steps are evaluated.")] = Field(5, ge=1, le=MAX_STEPS)
    """RL steps between evaluations. The initial policy (step 0) and the last step are always evaluated."""
    seed: int = 0
    """Random seed of the problems' order and of the evaluated subset."""

    @model_validator(mode="after")
    def _sets_have_names_of_their_own(self) -> Self:
        for field, sources in (("train", self.train), ("eval", self.eval)):
            for label, count in Counter(source.label for source in sources).items():
                if count > 1:
                    raise ValueError(f"{count} sets of {field} have the name {label!r}; set a unique name for each")
        return self

    @model_validator(mode="after")
    def _columns(self) -> Self:
        _check_one_format(self.format, self.columns)
        if not self.chat and "verl" in {self.format, *(each.format for each in (*self.train, *self.eval))}:
            raise ValueError('format = "verl" needs chat = true, because only a chat template uses roles')
        for columns in filter(None, (self.columns, *(each.columns for each in (*self.train, *self.eval)))):
            if columns.messages and not self.chat:
                raise ValueError(f"columns.messages = {columns.messages!r} needs chat = true, because only a chat template uses roles")
            if columns.tools and not self.chat:
                raise ValueError(f"columns.tools = {columns.tools!r} needs chat = true, because only a chat template uses tools")
        return self

    @model_validator(mode="after")
    def _template(self) -> Self:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} must contain {{question}}")
        if self.prompt_template_file and self.prompt_template != type(self).model_fields["prompt_template"].default:
            raise ValueError("prompt_template and prompt_template_file exclude each other; leave one of them out")
        if self.system_prompt and not self.chat:
            raise ValueError("system_prompt needs chat = true, because only a chat template uses a system message")
        return self
