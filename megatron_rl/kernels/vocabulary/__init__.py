"""Log-probs and entropies over a sharded vocabulary."""
