"""The arithmetic of sampling on a device, for all rows at once: draws, and log-probabilities. It only launches.

Weights are rounded to float32 from an exponential in double, and summed as whole multiples of 2^-40: such sums are
exact in any order, so no token depends on the batch or on how a card adds. The host (``device.sampler``) rounds its
sums, so the two may differ where a draw falls on an edge within about 1e-8.

Here is what comes before: changes of logits, and the choice between Triton's kernels on a card (``drawkernels``,
``logprobkernels``) and the same in PyTorch (``plaindraws``). Not here: what rows ask for, and records of it
(``sampler``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jettison.device.cuda import plaindraws

_SCRATCH_BYTES = 128 << 20
"""Of the card's memory beside the budget, for the rows that are worked on together."""

Columns = Mapping[str, Tensor]
"""What rows ask for, by name, on the device."""


def rows_at_once(vocab_size: int, *, is_adjusted: bool) -> int:
    """Rows that are worked on together: weights take four bytes, changed logits as many again."""
    return max(1, _SCRATCH_BYTES // ((8 if is_adjusted else 4) * vocab_size))


def uses_kernels(logits: Tensor) -> bool:
    """Whether Triton's kernels work on these rows."""
    return logits.is_cuda


def draw(logits: Tensor, tokens: Tensor, of: Columns, *, is_adjusted: bool) -> None:
    """Draw tokens of some rows of ``logits`` [n, vocab_size] into ``tokens[of["slots"]]``. ``tokens``: int64 [n], the
    likeliest of each row, or negative where there is none, and then it stays.

    ``of``, for each of the rows: ``slots``, ``lines`` (the row's index, or its place in the part where ``is_adjusted``)
    ``temperature`` (negative: greedy), ``uniform``, ``min_p``, ``top_k`` (0: all), ``top_p`` (above 1: all). With
    ``is_adjusted`` what changes logits: ``bias``, ``ban``, ``repetition`` and ``count``, each as places (``.at``) in
    the flat logits of these rows, and values (``.by``); and ``allowed``, as rows of the part (``.at``) and for each of
    them a bit for every token, in int32 (``.bits``)."""
    if is_adjusted:
        logits = _adjusted(logits, of)
        at_best = logits.argmax(1)
    else:
        at_best = tokens[of["slots"]]
    if uses_kernels(logits):
        from jettison.device.cuda import drawkernels

        drawkernels.draw(logits, of["lines"], at_best, of, tokens)
    else:
        plaindraws.draw(logits, of["lines"], at_best, of, tokens)


def describe(
    logits: Tensor, tokens: Tensor, num_top: int, reported: Tensor | None = None, lines: Tensor | None = None
) -> dict[str, Tensor]:
    """Log-probabilities and ranks of ``tokens`` [m], the ``num_top`` likeliest and the ``reported`` [m, k] ones of the
    rows ``lines`` [m] of ``logits`` [n, vocab_size]; None: of all."""
    lines = torch.arange(len(logits), device=logits.device) if lines is None else lines
    num_top = min(num_top, logits.shape[1])
    if uses_kernels(logits):
        from jettison.device.cuda import logprobkernels

        if num_top <= logprobkernels.MOST_TOP:
            return _named(logits, lines, logprobkernels.describe(logits, lines, tokens, num_top), reported)
    size = max(1, _SCRATCH_BYTES // (16 * logits.shape[1]))  # doubles, and what is made of them
    parts = [slice(start, start + size) for start in range(0, len(lines), size)]
    pieces = [plaindraws.describe(logits, lines[part], tokens[part], num_top) for part in parts]
    made = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return _named(logits, lines, made, reported)


def _named(logits: Tensor, lines: Tensor, made: dict[str, Tensor], reported: Tensor | None) -> dict[str, Tensor]:
    """``made`` without what is empty, and with ``reported`` in the place of ``base``."""
    base = made.pop("base")
    made = {name: tensor for name, tensor in made.items() if tensor.numel()}
    if reported is not None:
        made["reported"] = logits[lines[:, None], reported].double() - base[:, :1] - base[:, 1:]
    return made


def _adjusted(logits: Tensor, of: Columns) -> Tensor:
    """Logits of ``of["slots"]`` in at least float32 after bias, bans and penalties, in the host's order; places of one
    kind are distinct, or get one value."""
    work = logits.index_select(0, of["slots"]).to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    flat = work.view(-1)
    if "bias.at" in of:
        at = of["bias.at"]
        flat[at] = flat[at] + of["bias.by"].to(work.dtype)
    if "allowed.at" in of:
        lines, words = of["allowed.at"], of["allowed.bits"]
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
        is_allowed = (bits & 1).view(len(words), -1)[:, : work.shape[1]] == 1
        work[lines] = work[lines].masked_fill(~is_allowed, -torch.inf)
    if "ban.at" in of:
        at = of["ban.at"]
        kept = flat[at]
        flat[at] = -torch.inf
        is_lifted = (work.amax(1) == -torch.inf)[at // work.shape[1]]  # as some token has to be drawn
        flat[at] = torch.where(is_lifted, kept, -torch.inf)
    if "repetition.at" in of:
        at, by = of["repetition.at"], of["repetition.by"].to(work.dtype)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / by, values * by)
    if "count.at" in of:
        at = of["count.at"]
        flat[at] = flat[at] - of["count.by"].to(work.dtype)
    return work
