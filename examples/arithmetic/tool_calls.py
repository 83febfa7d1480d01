"""The chat template of a demo's model whose agent runs Python (`python_agent`), and demonstrations of its use."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.types import Problem

AGENT = "examples.arithmetic.python_agent:solve"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def write_question(problem: Problem) -> str:
    """Return what the policy reads first, as `CHAT_TEMPLATE` writes it."""
    return f"<|im_start|>user\n{problem.prompt}<|im_end|>\n<|im_start|>assistant\n"


def write_demonstration(problem: Problem) -> list[str]:
    """Return the turns of a correct answer to a generated problem: the policy's call, the tool's result, the policy's answer."""
    code = f"print({problem.id.partition(':')[2]})"
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    result = f"\n<|im_start|>tool\n{problem.answer}<|im_end|>\n<|im_start|>assistant\n"
    return [f"<tool_call>\n{call}\n</tool_call><|endoftext|>", result, f"#{problem.answer}"]
