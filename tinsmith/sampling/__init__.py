"""From prompts to tokens and their log-probabilities."""
