"""The work of the commands that a person types, a file each. `cli.py` declares their options and imports one when it is run."""
