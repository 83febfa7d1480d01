"""How rewards become advantages, and log-probs become a loss: one piece a file, composed by the configuration."""
