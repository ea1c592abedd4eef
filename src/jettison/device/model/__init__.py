"""The decoder: its configuration, how its parameters lie in memory, how they are read, and its arithmetic.

Not here: who owns the memory (``device.memory``), how a product is computed (``device.kernels``), and requests.
"""
