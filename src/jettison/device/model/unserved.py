"""Architectures that are refused by name, and why: those that people come with and that need more than a switch.

Not here: those that are served (``families``).
"""

from __future__ import annotations

_RECURRENT = (
    "some of its layers keep a recurrent state (linear attention, a state space or a convolution) in place of KV, "
    "which no block holds and no move carries"
)
_GEMMA = "its layers share KV and head sizes differ between them, and each has embeddings of its own"
_LATENT = "its KV is latent (MLA), one compressed row for all heads"

REASONS = {
    **dict.fromkeys((
        "qwen3next", "qwen35", "qwen36", "qwen4exp", "granitemoehybrid", "nemotronh", "jamba", "bamba", "falconh1",
        "falconmamba", "mamba", "rwkv", "lfm2", "lfm3", "recurrentgemma", "zamba", "olmohybrid", "kimilinear",
        "minimaxtext", "minimaxm1", "bailinghybrid", "bailingmoelinear", "xlstm", "phi4flash", "plamo2", "hymba",
        "glm5next",
    ), _RECURRENT),
    "gemma3n": _GEMMA,
    "gemma4": _GEMMA,
    **dict.fromkeys(("deepseekv2", "deepseekv3", "glm4moelite", "minicpm3", "kimik2"), _LATENT),
}  # fmt: skip
"""How a name begins, without its underscores and small: the reason."""


def why_not_served(name: str) -> str | None:
    """Of an architecture (``Qwen3NextForCausalLM``) or a model type (``qwen3_next``); None: nothing is known of it."""
    stem = name.partition("For")[0].replace("_", "").lower()
    return next((reason for start, reason in REASONS.items() if stem.startswith(start)), None)
