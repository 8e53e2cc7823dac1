"""The routes of the Tinker API, one file for each kind of resource. All paths are relative to /api/v1."""
