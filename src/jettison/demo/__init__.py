"""``jettison demo``: a day on four small instances, or the burst alone on two, served twice and compared."""
