"""Reinforcement learning with environments that see: the client side, which talks to any Tinker server through its SDK.

Data flow: an environment (`env.py`) and a model's chat template (`chat.py`) make a conversation of tokens and pictures; the generator
(`generator.py`) plays it with a policy and keeps what was sampled (`trajectory.py`); advantages (`advantages.py`) make training data of it
(`datums.py`); the trainer (`trainer.py`) sends them to the server. docs/rl.md is the guide.
"""
