"""Environments and policies of other libraries for `tinsmith_rl`, and ours for them.

Only the adapter of a library imports it.
"""
