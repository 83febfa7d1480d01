"""An agent with a tool, written with the `openai` package: the policy may call a calculator before it answers.

    [agent]
    name = "examples.arithmetic.tool_agent:solve"
    tool_parser = "qwen25"

The package finds the run's endpoint in OPENAI_BASE_URL and OPENAI_API_KEY. This module also has the chat template of the demo's model, and
worked examples for its warm start.
"""

import json
from pathlib import Path
from typing import Any

from examples.arithmetic.calculator import evaluate_expression
from megatron_rl.types import Problem

AGENT = "examples.arithmetic.tool_agent:solve"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MAX_TURNS = 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Return the value of an integer expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]


def solve(problem: Problem) -> None:
    """Converse with the policy until it answers without a tool call."""
    from openai import OpenAI  # the warm start does not need it

    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    for _ in range(MAX_TURNS):
        message: Any = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call_tool(call.function.arguments)})


def call_tool(arguments: str) -> str:
    """Return the reply to a tool call. A malformed call is answered with its error."""
    try:
        expression = json.loads(arguments)["expression"]
        return str(evaluate_expression(expression)) if isinstance(expression, str) else "expression must be a string"
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def write_question(problem: Problem) -> str:
    """Return the prompt as `CHAT_TEMPLATE` writes it."""
    return f"<|im_start|>user\n{problem.prompt}<|im_end|>\n<|im_start|>assistant\n"


def write_demonstration(problem: Problem) -> list[str]:
    """Return the turns of a correct answer: the policy's call, the tool's reply, the policy's answer."""
    call = json.dumps({"name": "calculate", "arguments": {"expression": problem.id.partition(":")[2]}})
    reply = f"\n<|im_start|>tool\n{problem.answer}<|im_end|>\n<|im_start|>assistant\n"
    return [f"<tool_call>\n{call}\n</tool_call><|endoftext|>", reply, f"#{problem.answer}"]
