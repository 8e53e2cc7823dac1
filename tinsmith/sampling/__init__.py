"""Samples tokens and their log-probabilities for prompts."""
