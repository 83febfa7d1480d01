"""Run the `megatron-rl` script as `python -m megatron_rl`, for example under torchrun."""

from megatron_rl.cli.main import main

if __name__ == "__main__":
    main()
