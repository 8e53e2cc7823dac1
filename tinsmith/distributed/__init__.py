"""Several workers that compute together."""
