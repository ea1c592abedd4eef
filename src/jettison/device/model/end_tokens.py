"""Which tokens end a text: all that the folder's files name, and which file names each.

The tokenizer's end token and the ids of ``generation_config.json`` are what vLLM takes; ``config.json`` is added, since
a fine-tune that changed one of the three seldom changed all. Files are read, nothing more.

Not here: the template. What it writes behind an answer need not end one (a model may go on with another part of it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jettison.device.model.generation_file import AUTO, MODEL_CONFIG, NAME, NEUTRAL, read_generation
from jettison.device.model.jsonfile import JsonObject
from jettison.device.model.tokenizer_files import (
    ADDED,
    CONFIG,
    SPECIAL_MAP,
    TOKENIZER,
    TokenizerFiles,
    read_tokenizer,
)

_MAX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class EndToken:
    """One of them."""

    token_id: int
    text: str | None
    """As the vocabulary spells it; None for one that only the model has."""
    sources: tuple[str, ...]
    """Files that name it."""


@dataclass(frozen=True, slots=True)
class EndTokens:
    """What a folder says of its end."""

    tokens: tuple[EndToken, ...]
    left_out: tuple[str, ...]
    """What it names and the model does not have, and tokens that are numbered otherwise than it says: a line each."""

    @property
    def ids(self) -> frozenset[int]:
        """Of all."""
        return frozenset(token.token_id for token in self.tokens)

    def __str__(self) -> str:
        shown = [f"{token.token_id} {token.text or ''}".rstrip() + f" ({', '.join(token.sources)})"
                 for token in self.tokens[:_MAX_SHOWN]]  # fmt: skip
        more = [f"{len(self.tokens) - _MAX_SHOWN} more"] if len(self.tokens) > _MAX_SHOWN else []
        return ", ".join([*shown, *more]) or "none: answers end at their length, or by what a request names"


def read_end_tokens(model_dir: Path, vocab_size: int, generation_config: str = "auto") -> EndTokens:
    """``vocab_size``: rows of the model's embedding. ``generation_config``: see ``generation_file``.

    A folder without ``tokenizer.json`` has those of its configuration. Raises ModelError for a broken file, ConfigError
    for a place without one. Files that have not changed since the last call are not read again: a vocabulary takes half
    a second, and measurements assemble a model hundreds of times.
    """
    places = [model_dir] if generation_config in (AUTO, NEUTRAL) else [model_dir, Path(generation_config)]
    return _read(model_dir, vocab_size, generation_config, tuple(_marks(places)))


def _marks(folders: list[Path]) -> Iterator[tuple[int, int, int] | None]:
    """What tells whether a file is the one that was read."""
    for folder in folders:
        for name in ("", MODEL_CONFIG, NAME, TOKENIZER, CONFIG, SPECIAL_MAP, ADDED):
            try:
                stat = (folder / name).stat()
                yield stat.st_ino, stat.st_size, stat.st_mtime_ns
            except OSError:
                yield None


@lru_cache(maxsize=8)
def _read(model_dir: Path, vocab_size: int, generation_config: str, marks: tuple[object, ...]) -> EndTokens:
    has_tokenizer = (model_dir / TOKENIZER).is_file()
    files = read_tokenizer(model_dir) if has_tokenizer else None
    sources: dict[int, list[str]] = {}
    left_out = list(files.doubts) if files else []
    for source, token_id, what in _named(model_dir, generation_config, files):
        if token_id is None:
            left_out.append(f"{source}: {what} is not in the vocabulary, and ends nothing")
        elif not 0 <= token_id < vocab_size:
            left_out.append(f"{source}: {what} is none of the model's {vocab_size} tokens, and ends nothing")
        elif source not in sources.setdefault(token_id, []):
            sources[token_id].append(source)
    tokens = (
        EndToken(token_id, files.backend.id_to_token(token_id) if files else None, tuple(names))
        for token_id, names in sorted(sources.items())
    )
    told = list(dict.fromkeys(left_out))
    if len(told) > _MAX_SHOWN:
        told = [*told[:_MAX_SHOWN], f"{model_dir}: {len(told) - _MAX_SHOWN} more of the kind"]
    return EndTokens(tuple(tokens), tuple(told))


def _named(
    model_dir: Path, generation_config: str, files: TokenizerFiles | None
) -> Iterator[tuple[str, int | None, str]]:
    """(file, id, as it is written there)."""
    generation = read_generation(model_dir, generation_config)
    for keys in (generation, JsonObject.read(model_dir / MODEL_CONFIG)):
        for token_id in keys.token_ids("eos_token_id"):
            name = keys.path.name if keys.path.parent == model_dir else str(keys.path)
            yield name, token_id, f"eos_token_id {str(token_id)[:20]}"
    if files is not None:
        for source, parts in files.said.items():
            if (text := parts.get("eos_token")) is not None:
                yield source, files.backend.token_to_id(text), f"eos_token {text[:40]!r}"
