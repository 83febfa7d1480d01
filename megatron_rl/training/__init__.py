"""The RL loop and what a run needs around it: session, state, checkpoints, resume."""
