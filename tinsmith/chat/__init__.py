"""Conversations as text and tokens: chat templates, tool calls, and text that comes token by token. Knows no torch."""
