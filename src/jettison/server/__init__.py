"""OpenAI-compatible HTTP."""
