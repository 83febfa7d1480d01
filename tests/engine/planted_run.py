"""The command `megatron-rl` with engines of `planted_server` or `planted_tensors`, whichever has its variable: `python -m planted_run
train`."""

import os
from pathlib import Path

import planted_server
import planted_tensors

from megatron_rl.cli.main import main

if __name__ == "__main__":
    planted = next(module for module in (planted_server, planted_tensors) if module.FILE_VARIABLE in os.environ)
    planted.launch_planted(Path(os.environ[planted.FILE_VARIABLE]))
    main()
