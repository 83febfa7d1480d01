"""An agent with a tool, written with the `openai` package alone: the policy may run Python in a sandbox before it answers.

    [agent]
    name = "examples.arithmetic.python_agent:solve"
    tool_parser = "qwen25"

The package finds the run's endpoint by itself, in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from examples.arithmetic.sandbox import run_python
from megatron_rl.types import Problem

MOST_TURNS = 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python code and return what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


def solve(problem: Problem) -> None:
    """Work on a problem until the policy answers without a call."""
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    for _ in range(MOST_TURNS):
        message: Any = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call_tool(call.function.arguments)})


def call_tool(arguments: str) -> str:
    """Return the tool's reply to a call, also to one that makes no sense."""
    try:
        code = json.loads(arguments)["code"]
        return run_python(code) if isinstance(code, str) else "code must be a text"
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
