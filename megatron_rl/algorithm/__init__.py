"""One algorithm per file: how rewards become advantages, and how log-probs become a loss."""
