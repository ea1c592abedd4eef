"""Addresses that a device reserves: one range for each shard and the workspace, and one of the whole budget for each
layer's KV. No page is mapped here (``device.memory``)."""

from __future__ import annotations

from jettison.device.pages import Arena, PagePool
from jettison.errors import BudgetError, MappingError
from jettison.memory.pagemap import WORKSPACE, Owner, PageSizes, kv_owner, shard_owner
from jettison.types import ModelShape


def check_addresses(pool: PagePool, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> None:
    """Raise BudgetError, with the budget, where no process on this machine could reserve the addresses of a device with
    such a pool. The pool is closed.

    The addresses are many times the budget, because every layer's KV arena could take all of it.
    """
    try:
        reserve_spans(pool, workspace_bytes, shape, sizes)
    finally:
        pool.close()


def span_bytes(budget_bytes: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> int:
    """Bytes of addresses that such a device reserves."""
    return sum(_span_pages(budget_bytes // sizes.page_bytes, workspace_bytes, shape, sizes).values()) * sizes.page_bytes


def _span_pages(num_pages: int, workspace_bytes: int, shape: ModelShape, sizes: PageSizes) -> dict[Owner, int]:
    """Pages of each range of addresses: one for each shard and the workspace, and one of the whole budget for each
    layer."""
    spans = {WORKSPACE: -(-workspace_bytes // sizes.page_bytes)}
    spans |= {shard_owner(shard): sizes.shard_pages[shard] for shard in shape.shard_bytes}
    return spans | {kv_owner(layer): num_pages for layer in shape.all_layers.layers()}


def reserve_spans(
    pool: PagePool, workspace_bytes: int, shape: ModelShape, sizes: PageSizes
) -> dict[Owner, Arena]:
    """The ranges of ``span_bytes``, reserved. Raises BudgetError."""
    try:
        spans = _span_pages(pool.num_pages, workspace_bytes, shape, sizes)
        return {owner: pool.reserve(num_pages) for owner, num_pages in spans.items()}
    except MappingError as error:
        budget_bytes = pool.num_pages * sizes.page_bytes
        message = f"the system has no addresses for a memory budget of {budget_bytes} bytes: {error}"
        raise BudgetError(message) from error
