"""The command `megatron-rl` with engines of `planted_server`, which read the file of its variable: `python -m planted_run train`."""

import os
from pathlib import Path

import planted_server

from megatron_rl.cli.main import main

if __name__ == "__main__":
    planted_server.launch_planted(Path(os.environ[planted_server.FILE_VARIABLE]))
    main()
