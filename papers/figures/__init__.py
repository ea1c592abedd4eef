"""One module a group of figures: which runs, which rows, which plots, and why ours differs."""
