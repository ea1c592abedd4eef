"""The loop of one group: queues by class, step plans, dispatch; and requests that have no group."""
