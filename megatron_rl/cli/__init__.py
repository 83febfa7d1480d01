"""The command line: `main` defines the commands, and each other module implements one of them."""
