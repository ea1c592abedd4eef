"""The ladder: when memory falls short of demand, its rungs decide which mechanism of ``core.moving`` starts, and when.
Each rung is one way to make supply meet demand, and has a file of its own. Nothing here moves KV or parameters."""
