"""Environments and policies of other libraries as ours, and ours as theirs. Each module needs its library and nothing else does."""
