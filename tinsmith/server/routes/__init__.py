"""The routes of the Tinker API, below /api/v1; one file for each kind of resource."""
