"""The command `megatron-rl` with a trainer that loads two tensors into each other's place: `ONE=... OTHER=... python -m exchanged_train`."""

import os

from test_loaded_values import exchange

from megatron_rl.cli.main import main
from megatron_rl.hf.read import HFCheckpoint

if __name__ == "__main__":
    for name in ("read_into", "read_blocks"):
        setattr(HFCheckpoint, name, exchange(getattr(HFCheckpoint, name), os.environ["ONE"], os.environ["OTHER"]))
    main()
