"""The command line: `main` has the commands, every other module what one of them does."""
