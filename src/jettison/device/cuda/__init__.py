"""The CUDA back end. Loads without a GPU, and but for the Triton kernels without Triton."""
