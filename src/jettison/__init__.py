"""Jettison: an LLM serving system whose memory is elastic."""

__version__ = "0.1.0"
