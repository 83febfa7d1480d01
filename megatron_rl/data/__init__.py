"""Problems: reads sets of problems, separates held-out from training problems, and orders and mixes the training sets."""

from megatron_rl.data.loading import check_data, load_held_out, load_problems
from megatron_rl.data.orders import ProblemOrder
from megatron_rl.data.stream import ProblemStream

__all__ = ["ProblemOrder", "ProblemStream", "check_data", "load_held_out", "load_problems"]
