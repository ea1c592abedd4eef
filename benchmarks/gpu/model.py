"""A model of random weights in CUDA kernels, as a runner would have it: layers, embedding, head, steps in parts.

Not a benchmark by itself (``kernels.py``). Without a GPU it is a toy, in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from jettison.device.cuda.kernels import CudaKernels
from jettison.device.kernels.operands import LayerConstants, LayerWeights

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16
CONTEXT = 1024 if GPU else 20
SHAPES = {
    "7b": {"hidden": 3584, "heads": 28, "kv_heads": 4, "inner": 18944, "layers": 28, "dim": 128, "vocab": 152064},
    "14b": {"hidden": 5120, "heads": 40, "kv_heads": 8, "inner": 13824, "layers": 48, "dim": 128, "vocab": 152064},
}
if not GPU:
    SHAPES = {"7b": {"hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "layers": 2, "dim": 16, "vocab": 128}}


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(*shape, device=DEVICE, dtype=DTYPE).normal_(0, scale)


def products(m: dict) -> dict[str, tuple[int, int]]:
    q, kv = m["heads"] * m["dim"], m["kv_heads"] * m["dim"]
    return {"qkv": (q + 2 * kv, m["hidden"]), "o": (m["hidden"], q), "gate_up": (2 * m["inner"], m["hidden"]),
            "down": (m["hidden"], m["inner"])}  # fmt: skip


class Model:
    """A worker's layers with an embedding and a head, as a runner has them."""

    def __init__(self, kernels: CudaKernels, m: dict, rows: int, tokens: int) -> None:
        self.kernels, self.m, self.rows = kernels, m, rows
        self.width = -(-(CONTEXT + 1) // 16)
        blocks = max(rows * self.width, -(-tokens // 16))
        self.layers = []
        for _ in range(m["layers"]):
            tensors = {f"{name}_weight": randn(*shape, scale=0.02) for name, shape in products(m).items()}
            tensors |= {n: torch.ones(m["hidden"], device=DEVICE, dtype=DTYPE) for n in ("input_norm", "post_norm")}
            tensors["qkv_bias"] = randn(products(m)["qkv"][0], scale=0.02)
            self.layers.append(LayerWeights(tensors, randn(blocks, 2, m["kv_heads"], 16, m["dim"])))
        self.embed, self.head = (randn(m["vocab"], m["hidden"], scale=0.02) for _ in range(2))
        positions = torch.arange(max(tokens, CONTEXT) + 8, device=DEVICE, dtype=torch.float32)
        angles = torch.outer(positions, 1e6 ** (-torch.arange(0, m["dim"], 2, device=DEVICE) / m["dim"])).repeat(1, 2)
        self.constants = LayerConstants(angles.cos(), angles.sin(), 1e-6, m["dim"] ** -0.5)
        self.tables = torch.randperm(blocks).to(torch.int32).numpy()

    def prepare(self, queries: list[int], contexts: list[int]) -> list:
        """The step's parts: one for each layer, embedding with the first, head and argmax with the last."""
        kernels, m, tokens, rows = self.kernels, self.m, sum(queries), len(queries)
        width = self.width if rows > 1 else len(self.tables)
        lens = np.array(queries, np.int32), np.array(contexts, np.int32)
        tables = self.tables[: rows * width].reshape(rows, width)
        plan = kernels.rows(m["heads"], self.layers[0].arena, tables, *lens, tokens)
        sizes = {"residual": m["hidden"], "x": m["hidden"], "qkv": products(m)["qkv"][0],
                 "attention_flat": m["heads"] * m["dim"], "gate_up": 2 * m["inner"], "activated": m["inner"]}
        b = SimpleNamespace(**{name: torch.empty(tokens, n, device=DEVICE, dtype=DTYPE) for name, n in sizes.items()})
        b.q = b.qkv[:, : m["heads"] * m["dim"]].view(tokens, m["heads"], m["dim"])
        b.attention = b.attention_flat.view(b.q.shape)
        ids, chosen = torch.zeros((2, tokens), dtype=torch.int64, device=DEVICE)
        logits = torch.empty(rows, m["vocab"], device=DEVICE)
        final = self.layers[0].input_norm

        def layer(index: int) -> None:
            w = self.layers[index]
            if index == 0:
                kernels.gather_rows(self.embed, ids, b.residual)
                kernels.rms_norm(b.residual, w.input_norm, 1e-6, b.x)
            else:
                kernels.add_rms_norm(b.x, b.residual, w.input_norm, 1e-6, b.x)
            kernels.attend_rows(w, b, self.constants, plan)
            kernels.feed_forward(w, b, self.constants)
            if index == m["layers"] - 1:
                kernels.add_rms_norm(b.x, b.residual, final, 1e-6, b.x)
                kernels.linear(b.x[-rows:], self.head, None, logits)
                kernels.argmax(logits, chosen[:rows])

        return [lambda index=index: layer(index) for index in range(m["layers"])]
