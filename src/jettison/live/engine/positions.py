"""How many positions of a context the instances' memory could ever hold, and what rotary tables for them take.

A table has a row for each position. A model's context may be a hundred times what memory holds: rows that no request
can reach would be paid for in each instance, and never be dropped. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PositionRoom:
    """What decides it: memory that is no parameters, no activations and no table is KV."""

    num_instances: int
    parameter_bytes: int
    """Of one copy. A request runs in a group, which has exactly one."""
    fixed_bytes: int
    """Workspace of an instance without its tables."""
    row_bytes: int
    """Of the tables, a position."""
    kv_block_bytes: int
    """In all layers."""
    block_size: int
    context: int
    """More positions than this are never served."""

    def positions(self, memory_bytes: int) -> int:
        """Most positions of one request where each instance has so much memory: rows that the tables need.

        All instances merged into one pipeline hold most. With B blocks and the tables for them the memory is used up
        but for less than one more: the tables have rows for B + 1, so that they never are what bounds a request.
        """
        free = self.num_instances * (memory_bytes - self.fixed_bytes) - self.parameter_bytes
        block = self.kv_block_bytes + self.num_instances * self.row_bytes * self.block_size
        return min(self.context, (max(0, free // block) + 1) * self.block_size)
