"""A policy over letters for tests of agents: a tokenizer with a chat template, and an engine whose answers a test defines."""

import json
import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np

from megatron_rl.batch.kept_tokens import make_kept_tokens
from megatron_rl.config.agent import AgentConfig
from megatron_rl.rollout.engine import ParsedToolCalls
from megatron_rl.types import Generation, Problem

PAIR = 1000
"""Token PAIR + n is the letter n twice: whoever tokenises "aa" gets it, so tokens [97, 97] do not survive a detour over text."""
END = "~"
BOS = ord("^")
AGENTS = "support.agent_programs"


class ChatTokenizer:
    """A tokenizer of letters. `<u>hello~<a>` is a user's message and the beginning of the policy's message, which ends with the special
    token `~`."""

    added_tokens_decoder: ClassVar[dict] = {}
    name_or_path, chat_template, eos_token_id, special_tokens_map = "letters", "yes", ord(END), {"eos_token": END}

    def encode(self, text, add_special_tokens):
        ids = [BOS] if add_special_tokens else []
        for letter in text:
            if ids and ids[-1] == ord(letter) and letter != END:
                ids[-1] += PAIR
            else:
                ids.append(ord(letter))
        return ids

    def decode(self, ids, skip_special_tokens):
        text = "".join(chr(token % PAIR) * (1 + token // PAIR) for token in ids)
        return text.replace(END, "") if skip_special_tokens else text

    def convert_tokens_to_ids(self, token):
        return None

    def apply_chat_template(self, chat, tools, tokenize, add_generation_prompt, **options):
        assert not tokenize and add_generation_prompt
        names = "".join(tool["function"]["name"] for tool in tools or ())
        parts = [f"[{names}]" if names else ""]
        for message in chat:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            assert all(isinstance(call["arguments"], dict) for call in calls), "templates expect objects"
            parts.append(f"<{message['role'][0]}>{message['content']}{json.dumps(calls) if calls else ''}{END}")
        return "".join(parts) + "<a>"


class Policy:
    """An engine that answers a prompt with `reply(text)`, one token per letter, up to the token limit. It records all prompts."""

    version = 5

    def __init__(self, reply):
        self.reply, self.asked, self.lock = reply, [], threading.Lock()

    def generate(self, prompts_B, samplings, abort=None):
        (prompt,), (sampling,) = prompts_B, samplings
        with self.lock:
            self.asked.append((prompt.tolist(), sampling))
        said = self.reply(ChatTokenizer().decode(prompt.tolist(), skip_special_tokens=False))
        ids = np.array([ord(letter) for letter in said + END], np.int32)[: sampling.max_new_tokens]
        finish = "stop" if len(ids) == len(said) + 1 else "length"
        total = len(prompt) + len(ids)
        generation = Generation(ids, -ids.astype(np.float32), finish, self.version, cached_tokens=1)
        generation.routed_experts_T = np.full((total - 1, 1, 1), len(self.asked), np.uint8)
        return [replace(generation, kept_tokens=make_kept_tokens([[token, 1] for token in ids.tolist()]))]

    def parse_tool_calls(self, text, tools, parser):
        """Parse `so!python:1+1` as a call of python with the expression. A `!` alone is an invalid call, and `!!` breaks the parser."""
        assert parser == "letters" and json.loads(tools)[0]["function"]["name"] == "python"
        before, mark, call = text.partition("!")
        name, colon, expression = call.partition(":")
        if call.startswith("!"):
            return None
        return ParsedToolCalls(before, [(name, json.dumps({"code": expression}))] if mark and colon else [])


PROBLEM = Problem("7", "q", "5")


def config(**settings):
    return AgentConfig.model_validate({"name": f"{AGENTS}:ask", **settings})
