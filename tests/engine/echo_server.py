"""`megatron-rl serve`, and its engine's process, whose responses are the last message of their request, whatever the model says."""

import json
import os
import sys
from functools import partial

from megatron_rl.cli import main as cli
from rollout_sglang import launch_args, server
from rollout_sglang.process import EngineProcess

SAMPLING = "sampling "  # a message that begins with it is answered with the sampling parameters


def echo(original, chat, request, ret, *args, **named):
    for item in ret:
        item["text"] = request.messages[-1].content
    return original(chat, request, ret, *args, **named)


def show_sampling(original, request, *args, **named):
    values = original(request, *args, **named)
    if request.messages[-1].content.startswith(SAMPLING):
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        request.messages[-1].content = SAMPLING + json.dumps({name: values.get(name) for name in names})
    return values


def plant():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    build, to_sampling = OpenAIServingChat._build_chat_response, ChatCompletionRequest.to_sampling_params
    OpenAIServingChat._build_chat_response = lambda *args, **named: echo(build, *args, **named)
    ChatCompletionRequest.to_sampling_params = lambda *args, **named: show_sampling(to_sampling, *args, **named)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        launch_args.EngineProcess = partial(EngineProcess, module="echo_server")
        cli.main()
    else:
        plant()
        server.main(sys.argv[1:])
