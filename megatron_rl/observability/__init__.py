"""What a run writes while it goes on: logs, metrics, heartbeats, signals."""
