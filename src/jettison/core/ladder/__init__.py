"""When: each way to make supply of memory meet demand is a rung, one file each. How it is done is not decided here."""
