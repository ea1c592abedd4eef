"""The simulator: the same core in virtual time, over modelled devices, links and memory."""
