"""Tinsmith: a self-hosted server for the Tinker training and sampling API."""

__version__ = "0.1.0"
