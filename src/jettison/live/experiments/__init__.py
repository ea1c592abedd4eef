"""Overload experiments over servers of their own: for the demo, the benchmarks and the validation."""
