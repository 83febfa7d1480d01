"""The command `megatron-rl` with a trainer that loads the tensors ONE and OTHER of the environment into each other's place."""

import os

from support.exchanged import exchange

from megatron_rl.cli.main import main
from megatron_rl.hf.read import HFCheckpoint

if __name__ == "__main__":
    for name in ("read_into", "read_blocks"):
        setattr(HFCheckpoint, name, exchange(getattr(HFCheckpoint, name), os.environ["ONE"], os.environ["OTHER"]))
    main()
