"""The HTTP process: validates, appends to the command log, waits and answers; supervises the engine."""
