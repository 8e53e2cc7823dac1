"""The commands that a person types, one file each. `cli.py` declares their options and imports one when it runs."""
