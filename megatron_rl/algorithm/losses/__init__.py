"""Policy losses, one a file."""
