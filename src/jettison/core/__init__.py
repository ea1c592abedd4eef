"""The sans-I/O heart: (event, now) -> actions."""
