"""How large a worker's memory besides parameters and KV is: the activations of one step, and the buffers that are never
dropped.

One flat run of bytes, sized before the first step and counted against the budget. Never dropped: the final norm
and the rotary tables. Activations that are never alive together share their bytes. Pure arithmetic, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jettison.device.dtypes import ITEM_BYTES, StoredDtype, dtype_of_sums
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.shards import align


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """Name -> (offset, shape, type) of every buffer, and the bytes they take together."""

    places: dict[str, tuple[int, tuple[int, ...], StoredDtype]]
    num_bytes: int


def position_bytes(config: DecoderConfig, dtype: StoredDtype) -> int:
    """Bytes of a workspace that each position of ``config.max_model_len`` adds at most: a row of all rotary tables."""
    return 2 * len(config.ropes) * config.rotary_dim * ITEM_BYTES[dtype_of_sums(dtype)]


def plan_workspace(
    config: DecoderConfig, dtype: StoredDtype, max_num_tokens: int, max_num_seqs: int, *, keeps_rows: bool = False
) -> WorkspacePlan:
    """A workspace for steps of these sizes. ``keeps_rows``: with room for rows that a step sheds, as many as it may
    have."""
    places: dict[str, tuple[int, tuple[int, ...], StoredDtype]] = {}

    def place(offset: int, kind: StoredDtype, **shapes: tuple[int, ...]) -> int:
        for name, shape in shapes.items():
            places[name] = (offset, shape, kind)
            offset += align(math.prod(shape) * ITEM_BYTES[kind])
        return offset

    sums = dtype_of_sums(dtype)
    tokens, hidden = max_num_tokens, config.hidden_size
    table = len(config.ropes), config.max_model_len, config.rotary_dim
    shared = place(0, dtype, final_norm=(hidden * (2 if config.has_norm_bias else 1),))
    shared = place(shared, sums, cos=table, sin=table)
    if keeps_rows:
        shared = place(shared, dtype, kept=(tokens, hidden))
    shared = place(shared, dtype, residual=(tokens, hidden), x=(tokens, hidden))
    inner, rows = config.intermediate_size, (max_num_seqs, hidden)
    experts, routed_bytes = config.arithmetic.experts, 0
    if experts is not None:
        pairs, wide = tokens * experts.num_chosen, 2 * experts.shared_size
        start = place(shared, dtype, routed_sum=(tokens, hidden)) if wide else shared
        first = place(start, dtype, routed_activated=(pairs, experts.intermediate_size))
        routed_bytes = max(  # what experts make takes the place of what their first products made
            place(first, dtype, routed_gate_up=(pairs, 2 * experts.intermediate_size)),
            place(first, dtype, routed_each=(pairs, hidden)),
            place(start, dtype, shared_gate_up=(tokens, wide), shared_activated=(tokens, experts.shared_size)),
        )
    num_bytes = max(
        routed_bytes,
        place(shared, dtype, qkv=(tokens, config.qkv_size), attention=(tokens, config.q_size)),
        place(shared, dtype, gate_up=(tokens, config.up_size), activated=(tokens, inner)),
        place(place(shared, dtype, rows=rows), sums, logits=(max_num_seqs, config.vocab_size)),
    )
    return WorkspacePlan(places, num_bytes)
