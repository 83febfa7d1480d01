"""Tokenizers with a given chat template, whose control tokens are found in the template's text."""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.hf.tokenizer import load_tokenizer

_CONTROL = re.compile(
    r"<\|[\w▁ ]+\|>|<｜[\w▁]+｜>|</?(?:s|sop|eop|bos|eos|think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call"
    r"|start_of_turn|end_of_turn|SPECIAL_\d+|TOOLCALL|TOOL_RESPONSE)>|\]~!b\[|\]~b\]|\[e~\[|\[/?[A-Z_]{3,}\]|\[gMASK\]|｜DSML｜"
)
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def make_chat_tokenizer(folder: Path, template: str, ends: tuple[str, ...], bos: str = ""):
    """Save a tokenizer of bytes in a new folder and return it. `ends`: its end tokens, the first of which is tokenizer.eos_token. The tags
    of tool calls and thoughts are added tokens that are not special, as in published tokenizers."""
    names = dict.fromkeys([*ends, *([bos] if bos else []), *_CONTROL.findall(template)])
    vocab = {letter: number for number, letter in enumerate(_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name in names:
        tokenizer.add_tokens([AddedToken(name, special=not re.fullmatch(r"</?[a-z_:]{4,}>", name), normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends[0], bos_token=bos or None, chat_template=template)
    fast.save_pretrained(folder)
    numbers = [fast.convert_tokens_to_ids(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": numbers}))
    return load_tokenizer(folder)


def _generate(start):
    return "{% if add_generation_prompt %}" + start + "{% endif %}"


_CHATML = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}""" + _generate("<|im_start|>assistant\n<think>\n")
_HEADERS = """{{ bos_token }}{% for t in tools or [] %}{% if loop.first %}<|start_header_id|>system<|end_header_id|>

{% endif %}{{ t | tojson }}{% if loop.last %}<|eot_id|>{% endif %}{% endfor %}{% for m in messages %}<|start_header_id|>\
{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}\
""" + _generate("<|start_header_id|>assistant<|end_header_id|>\n\n")
_ROLES = """[gMASK]<sop>{% if tools %}<|system|>
{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}\
<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% else %}<|{{ m.role }}|>
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}""" + _generate("<|assistant|>")
_ROLES += "{# <|user|> #}"  # as published templates, which write each role's token by its name
_CHANNELS = """{% set ns = namespace(name='') %}<|start|>system<|message|>Be helpful.{{ tools | tojson if tools else '' }}<|end|>\
{% for m in messages %}{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.name }}\
<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
{% elif m.role == 'assistant' %}{% set ns.name = '' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
{{ '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}\
{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no previous call') }}{% endif %}<|start|>functions.{{ ns.name }} \
to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}""" + _generate("<|start|>assistant")
_BRACKETS = """{% set ns = namespace(called=false) %}]~!b[{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai
{{ m.content }}{% if m.tool_calls %}
<minimax:tool_call>
{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}\
<parameter name="{{ k }}">{{ v }}</parameter>{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% set ns.called = m.tool_calls is defined %}{% elif m.role == 'tool' %}{% if not ns.called %}{{ raise_exception('no previous call') }}\
{% endif %}]~b]tool
<response>{{ m.content }}</response>[e~[
{% else %}]~b]{{ m.role }}
{{ m.content }}{{ tools | tojson if tools and loop.first else '' }}[e~[
{% endif %}{% endfor %}""" + _generate("]~b]ai\n<think>\n")
_BARS = """{{ bos_token }}{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}\
{% elif m.role == 'system' %}{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>\
{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<｜Assistant｜></think>{% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}\
<｜tool▁call▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜></think>{% endif %}"""
_INSTRUCTIONS = """{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}\
{% if m.role == 'user' %}{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}\
{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}\
{% endfor %}{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% elif m.role == 'tool' %}\
{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_RESULTS]{{ m.tool_call_id }}\
{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": (_CHATML, ("<|im_end|>", "<|endoftext|>")),
    "headers": (_HEADERS, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "roles": (_ROLES, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "channels": (_CHANNELS, ("<|return|>", "<|endoftext|>", "<|call|>")),
    "brackets": (_BRACKETS, ("[e~[",)),
    "bars": (_BARS, ("<｜end▁of▁sentence｜>",)),
    "instructions": (_INSTRUCTIONS, ("</s>",)),
}
"""Reduced templates with the structure of those of Qwen, Llama 3, GLM, gpt-oss, MiniMax-M2, DeepSeek-V3.1, and Mistral, and their end
tokens."""
