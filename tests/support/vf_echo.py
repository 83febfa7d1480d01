"""A taskset for the `verifiers` package, whose reward is the share of the policy's last reply that the answer names."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str
    bonus: float = 0.0


class Task(vf.Task[Data]):
    @vf.reward
    async def named(self, trace) -> float:
        return 0.5 * (self.data.answer in trace.last_reply) + self.data.bonus


class Echo(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return []


__all__ = ["Echo"]
