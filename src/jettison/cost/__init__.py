"""What steps, transfers and remaps cost, predicted."""
