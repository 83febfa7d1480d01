"""OpenAI's interfaces of completions: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.forms import Count, Few, Form, Function, Messages, Model, Object
from megatron_rl.rollout.agents.messages import TEXT, ConversationMessage, PolicyRequest


class _StreamOptions(Model):
    include_usage: bool | None = None


class OpenAIForm(Form):
    """What OpenAI's interfaces share."""

    labels: ClassVar[tuple[str, ...]] = (
        *("store", "metadata", "user", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
    stream_options: _StreamOptions = _StreamOptions()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options.include_usage)


class _CompletionsForm(OpenAIForm):
    prefix: ClassVar[str]  # of a response's id
    kinds: ClassVar[tuple[str, str]]  # of object: a response, and a part of its stream

    @classmethod
    def write_parts(cls, said: ConversationMessage, streamed: bool) -> list[Object]:
        """Return what differs between the two interfaces, and if `streamed`, its empty end, too."""
        raise NotImplementedError

    @classmethod
    def describe(cls, turn: Turn, request: PolicyRequest) -> Object:
        return cls._describe(turn, request, cls.write_parts(turn.messages[-1], False)[0])

    @classmethod
    def list_events(cls, turn: Turn, request: PolicyRequest) -> list[Object]:
        chunks = [{**cls._describe(turn, request, part), "object": cls.kinds[1]} for part in cls.write_parts(turn.messages[-1], True)]
        for chunk in chunks[:-1]:
            chunk["choices"][0] |= {"finish_reason": None, "matched_stop": None}
        if request.include_usage:
            return [*({**chunk, "usage": None} for chunk in chunks), {**chunks[-1], "choices": []}]
        return [{name: value for name, value in chunk.items() if name != "usage"} for chunk in chunks]

    @classmethod
    def _describe(cls, turn: Turn, request: PolicyRequest, part: Object) -> Object:
        """Return a response with one choice, and its end as SGLang describes it: the stop text or the end token."""
        before, sampled = turn.prompt_tokens, turn.generation.output_ids_T
        token = int(sampled[-1]) if len(sampled) and turn.generation.finish_reason == "stop" else None
        finish = "tool_calls" if turn.messages[-1].tool_calls else turn.generation.finish_reason
        usage = {"prompt_tokens": before, "completion_tokens": len(sampled), "total_tokens": before + len(sampled)}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish, "matched_stop": turn.stop or token}
        start = {"id": f"{cls.prefix}-{turn.number}", "object": cls.kinds[0], "created": int(time.time()), "model": request.model}
        return {**start, "choices": [choice], "usage": usage}


class _Tool(Model):
    type: Literal["function"]
    function: Function


_Function = Annotated[_Tool, AfterValidator(lambda tool: tool.function)]


class ChatForm(_CompletionsForm):
    path, prefix, kinds = "/v1/chat/completions", "chatcmpl", ("chat.completion", "chat.completion.chunk")
    max_tokens: Count | None = Field(None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    tools: Few[_Function] = ()
    parallel_tool_calls: bool = True

    @classmethod
    def write_parts(cls, said: ConversationMessage, streamed: bool) -> list[Object]:
        message: Object = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
        message |= {"reasoning_content": said.thought} if said.thought else {}
        if said.tool_calls:
            index = (lambda number: {"index": number}) if streamed else lambda _: {}
            message["tool_calls"] = [{**index(number), **call.to_openai()} for number, call in enumerate(said.tool_calls)]
        return [{"delta": message}, {"delta": {}}] if streamed else [{"message": message}]


def _as_messages(prompt: Any) -> list[ConversationMessage]:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("must be one text")
    return [ConversationMessage(TEXT, texts[0])]


class TextForm(_CompletionsForm):
    """/v1/completions, with OpenAI's default of 16 tokens."""

    path, prefix, kinds = "/v1/completions", "cmpl", ("text_completion", "text_completion")
    messages: Annotated[Messages, BeforeValidator(_as_messages)] = Field(validation_alias="prompt")
    max_tokens: Count = 16

    @classmethod
    def write_parts(cls, said: ConversationMessage, streamed: bool) -> list[Object]:
        return [{"text": said.content}, {"text": ""}]
