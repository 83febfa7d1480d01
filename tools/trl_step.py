"""A step of TRL's GRPO with the quickstart's model and sizes, to compare its seconds with `time/step` of the quickstart.

    python tools/trl_step.py examples/arithmetic/models/quickstart --steps 4

In an environment of its own: pip install torch==2.13.0 trl==1.16.0.

TRL trains in FP32 and generates with transformers. A step has 256 completions of at most 24 tokens for 32 prompts and two updates, like the
quickstart's. Rewards are zero or one at random, because only the time counts. Prints wall and CPU seconds per step.
"""

import argparse
import random
import tempfile
import time

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GENERATION_BATCH, UPDATES = 256, 2


class Clock(TrainerCallback):
    """Notes the time after each optimizer step."""

    def __init__(self) -> None:
        self.times = [(time.perf_counter(), time.process_time())]

    def on_step_end(self, *_: object, **__: object) -> None:
        self.times.append((time.perf_counter(), time.process_time()))


def write_question(rng: random.Random) -> str:
    """Return a question of the shape of `examples.arithmetic.task`."""
    return "".join([str(rng.randrange(10)), *(f"{rng.choice('+-')}{rng.randrange(10)}" for _ in range(rng.randint(2, 5)))]).ljust(11) + "="


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    rng, clock = random.Random(0), Clock()
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        learning_rate=5e-5,
        max_steps=UPDATES * options.steps,
        per_device_train_batch_size=GENERATION_BATCH // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=8,
        max_completion_length=24,
        beta=0.001,
        temperature=1.0,
        save_strategy="no",
        report_to=[],
    )
    GRPOTrainer(
        options.model,
        reward_funcs=lambda completions, **_: [float(rng.random() < 0.5) for _ in completions],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": write_question(rng)} for _ in range(1000)]),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[clock],
    ).train()
    for number, (before, after) in enumerate(zip(clock.times[::UPDATES], clock.times[UPDATES::UPDATES], strict=False), 1):
        print(f"step {number}: {after[0] - before[0]:.1f} s, {after[1] - before[1]:.1f} CPU s")


if __name__ == "__main__":
    main()
