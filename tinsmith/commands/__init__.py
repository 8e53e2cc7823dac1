"""The commands that a person types, related ones in one file.

`cli.py` declares their options and imports one when it runs.
"""
