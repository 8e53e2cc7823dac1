"""Reinforcement learning on any Tinker server, through its SDK, with environments that may show images.

An environment (`env.py`) and a model's chat template (`chat.py`) make a conversation of tokens and images.
`rollouts.py` plays episodes with a policy and records them as trajectories (`trajectory.py`). Their rewards become
advantages and training data (`datums.py`), which the trainer (`trainer.py`) sends to the server. docs/rl.md is the
guide.
"""
