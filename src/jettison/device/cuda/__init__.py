"""The CUDA back end: pages of a card under reserved addresses, kernels. Nothing here is imported unless a card is asked
for; it loads without one, and but for the kernels without Triton."""
