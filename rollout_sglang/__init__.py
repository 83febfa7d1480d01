"""All code that depends on SGLang: launcher and client of engines, code inside their processes, and hooks on SGLang."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.hf.routing_record import RoutingShape
    from megatron_rl.rollout.engine import Engine
    from megatron_rl.types import Generation, RemoteColumns


class SGLangLauncher:
    """See `EngineLauncher`. Imports inside methods, because SGLang imports this package before its stub modules are in place."""

    def check(self, config: Config) -> None:
        from rollout_sglang.hooks import blackwell
        from rollout_sglang.server_options import ATTENTION, check, check_attention, check_graphs, check_parsers

        options = dict(config.rollout.sglang)
        blackwell.check_options(options)
        default = blackwell.ATTENTION if blackwell.is_blackwell() else ""
        if check_attention(config, options.get(ATTENTION, default)):
            options.pop(ATTENTION, None)
        check(options)
        check_graphs(config)
        if config.agent is not None:
            check_parsers(config.agent)

    def __call__(self, config: Config, model_path: Path, log_dir: Path, number: int = 0, *, empty: bool = False, seed: int = 0) -> Engine:
        from rollout_sglang.engine import SGLangEngine
        from rollout_sglang.launch_args import EngineLaunchSpec

        return SGLangEngine(EngineLaunchSpec(config, model_path, log_dir, number, empty, seed))

    def serve(
        self, config: Config, model_path: Path, log_dir: Path, port: int, api_key: str, greeting: str, options: Mapping[str, Any]
    ) -> NoReturn:
        from rollout_sglang.launch_args import EngineLaunchSpec, EngineServer
        from rollout_sglang.serving import OPTIONS_VARIABLE

        arguments = ["--served-model-name", config.model.name, "--sampling-defaults", "openai"]
        os.environ[OPTIONS_VARIABLE] = json.dumps(options)
        if config.agent is not None:
            names = {"--tool-call-parser": config.agent.tool_parser, "--reasoning-parser": config.agent.reasoning_parser}
            arguments += [word for name, value in names.items() if value for word in (name, value)]
        spec = EngineLaunchSpec(config, model_path, log_dir, arguments=tuple(arguments), port=port, api_key=api_key)
        EngineServer(spec).serve(greeting)

    def fetch_columns(self, config: Config, columns_B: Sequence[RemoteColumns], routing: RoutingShape | None) -> list[Generation]:
        from rollout_sglang.remote_columns import fetch_columns

        recorded = config.rollout.to_sampling().record_kept_tokens
        return fetch_columns(columns_B, recorded, routing, config.rollout.request_timeout)

    def rehearsal_command(self) -> list[str]:
        return [sys.executable, "-m", "rollout_sglang.rehearsal.rank"]


launch = SGLangLauncher()  # the entry point `sglang` of the group `megatron_rl.rollout`
