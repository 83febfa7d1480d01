"""The demo: a small model learns multi-step arithmetic by RL. `warm_start` makes the model; the other modules are plugs."""
