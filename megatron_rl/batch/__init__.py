"""Training samples, and how they are packed, sent and replayed."""
