"""The command `megatron-rl` with engines of `planted_tensors`, which read the file of its variable: `python -m planted_train train`."""

import os
from pathlib import Path

import planted_tensors

from megatron_rl.cli.main import main

if __name__ == "__main__":
    planted_tensors.launch_planted(Path(os.environ[planted_tensors.FILE_VARIABLE]))
    main()
