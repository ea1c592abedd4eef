"""Jettison: an LLM serving system whose memory is elastic.

``from jettison import LLM, SamplingParams`` is the engine for scripts and notebooks; it is imported when it is asked
for, as it brings torch.
"""

__version__ = "0.1.0"

_OFFERED = ("LLM", "SamplingParams", "RequestOutput", "CompletionOutput")


def __getattr__(name: str) -> object:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = "llm" if name == "LLM" else "llm_types"
    return getattr(import_module(f"{__name__}.server.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
