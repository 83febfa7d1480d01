"""Policy losses, one per file."""
