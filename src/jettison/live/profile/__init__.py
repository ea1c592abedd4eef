"""Measuring this machine for the cost model, and reading what live runs recorded. Fitting is ``cost``'s."""
