"""Processes, sockets and clocks around the core."""
