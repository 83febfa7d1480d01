"""The demo: a small model, made here, learns multi-step arithmetic by reinforcement learning, with a calculator where one is configured.

All of it is named in configurations as a user's own would be: `task` is a data source, `reward` a reward, `calculator` an environment.
`warm_start` makes the model beforehand.
"""
