"""The CUDA back end: pages of a card under reserved addresses. Nothing here is imported unless a card is asked for."""
