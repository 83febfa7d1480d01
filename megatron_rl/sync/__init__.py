"""Moving weights from actor to engines, with the proof."""
