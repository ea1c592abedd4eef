"""One worker's process: its loop, its links to peers, and what it does to its device. Decides nothing."""
