"""The loop of one group: queues by class, blocks, step plans."""
