"""Measurements of this code: no part of the package. ``python -m benchmarks`` names them."""
