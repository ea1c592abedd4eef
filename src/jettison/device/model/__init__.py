"""The decoder: its configuration, the layout and reading of its parameters, and its arithmetic.

Not here: the memory (``device.memory``), the kernels (``device.kernels``), and requests.
"""
