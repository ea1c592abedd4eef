"""Model folders made from what a user has: GGUF files of one's own, and models of the Python index.

No torch: folders are written with numpy, and what serves them (``device.model``) reads them like any other.
"""
