"""The CUDA back end: pages of a card under reserved addresses, and kernels. Nothing here is imported unless a card is
configured. It loads without a card and, except for the kernels, without Triton."""
