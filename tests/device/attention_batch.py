"""Batches of rows for tests of attention: random contents, dense attention written out."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import torch

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.library import supported_variants

VARIANTS = ["torch", *(f"native-{name}" for name in supported_variants())]


class Batch:
    """Rows with random contents in an arena whose every unwritten element is NaN."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 8,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        """``lens``: (tokens in the cache, tokens of the chunk) of each row."""
        generator = torch.Generator().manual_seed(seed)
        self.lens, self.dtype, self.block_size = lens, dtype, block_size
        self.query_lens = np.array([query for _, query in lens], dtype=np.int32)
        self.context_lens = np.array([context for context, _ in lens], dtype=np.int32)
        blocks = [-(-(context + query) // block_size) for context, query in lens]
        ids = torch.randperm(sum(blocks) + 3, generator=generator).numpy().astype(np.int32)
        self.block_tables = np.zeros((len(lens), max(blocks) + 1), dtype=np.int32)
        start = 0
        for row, count in enumerate(blocks):
            self.block_tables[row, :count] = ids[start : start + count]
            start += count
        self.arena = torch.full((len(ids), 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
        tokens = int(self.query_lens.sum())
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator, dtype=torch.float64)
        fused = fused.to(dtype)
        q, k, v = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        self.q = q.unflatten(1, (heads, head_dim))
        self.k = k.unflatten(1, (kv_heads, head_dim))
        self.v = v.unflatten(1, (kv_heads, head_dim))
        past = (len(lens), 2, int(self.context_lens.max()), kv_heads, head_dim)
        self.past = torch.randn(past, generator=generator, dtype=torch.float64).to(dtype)
        for row, context in enumerate(self.context_lens.tolist()):
            for position in range(context):
                block = self.block_tables[row, position // block_size]
                self.arena[block, :, :, position % block_size] = self.past[row, :, position]
        self.scale = head_dim**-0.5

    def write(self, kernels: Kernels) -> None:
        kernels.write_kv(self.k, self.v, self.arena, self.block_tables, self.query_lens, self.context_lens)

    def attend(self, kernels: Kernels, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        out = torch.full_like(self.q, math.nan)
        kernels.attention(
            self.q, self.arena, self.block_tables, self.query_lens, self.context_lens, out, self.scale,
            window=window, softcap=softcap,
        )  # fmt: skip
        return out

    def forget(self, window: int) -> None:
        """Overwrite with NaN what no token of the chunks sees, being before every window."""
        for row, context in enumerate(self.context_lens.tolist()):
            for position in range(context + 1 - window):
                block = self.block_tables[row, position // self.block_size]
                self.arena[block, :, :, position % self.block_size] = math.nan

    def expected(self, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Dense attention, row by row, in float64, on the CPU wherever the batch is."""
        q, k, v = (tensor.cpu().double() for tensor in (self.q, self.k, self.v))
        out = torch.empty(q.shape, dtype=torch.float64)
        group = q.shape[1] // k.shape[1]
        start = 0
        for row, (context, query) in enumerate(self.lens):
            chunk = slice(start, start + query)
            keys = torch.cat((self.past[row, 0, :context].double(), k[chunk])).repeat_interleave(group, 1)
            values = torch.cat((self.past[row, 1, :context].double(), v[chunk])).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[chunk], keys) * self.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            at, behind = torch.arange(context + query), context + torch.arange(query).unsqueeze(1)
            seen = (at <= behind) & (at > behind - window) if window else at <= behind
            scores = scores.masked_fill(~seen, -math.inf)
            if sinks is not None:
                sink = sinks.double().view(-1, 1, 1).expand(-1, query, 1)
                scores = torch.cat((scores, sink), 2)
            weights = scores.softmax(2)[:, :, : context + query]
            out[chunk] = torch.einsum("hqk,khd->qhd", weights, values)
            start += query
        return out


@st.composite
def batches(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.integers(1, 3))
    return {
        "lens": draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=4)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16, 20, 32, 64, 80, 96, 128])),
        "block_size": draw(st.sampled_from([1, 3, 8, 16, 32])),
        "seed": draw(st.integers(0, 1000)),
    }
