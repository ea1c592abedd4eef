"""Summaries, tables, plots."""
