"""`python -m megatron_rl`: the same program as the `megatron-rl` script, as torchrun wants it."""

from megatron_rl.cli.main import main

if __name__ == "__main__":
    main()
