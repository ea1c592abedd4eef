"""The tokens that end a text: all that the folder's files name, with the files that name each.

vLLM takes the tokenizer's end token and the ids of ``generation_config.json``. Here ``config.json`` counts, too,
because a fine-tune that changed one of the three files seldom changed all. This module only reads files.

Not here: the template. The token that it writes after an answer need not end one, as a model may go on with another
part of the answer.
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
    """One token that ends a text."""

    token_id: int
    text: str | None
    """The token in the vocabulary's spelling; None for one that only the model has."""
    sources: tuple[str, ...]
    """Files that name it."""


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The end tokens of a folder."""

    tokens: tuple[EndToken, ...]
    left_out: tuple[str, ...]
    """A line for each named token that the model does not have, or that has another id than the folder states."""
    num_ids: int = 0
    """One more than the tokenizer's largest id; 0 without a tokenizer."""

    @property
    def ids(self) -> frozenset[int]:
        """Ids of all end tokens."""
        return frozenset(token.token_id for token in self.tokens)

    def __str__(self) -> str:
        shown = [f"{token.token_id} {token.text or ''}".rstrip() + f" ({', '.join(token.sources)})"
                 for token in self.tokens[:_MAX_SHOWN]]  # fmt: skip
        more = [f"{len(self.tokens) - _MAX_SHOWN} more"] if len(self.tokens) > _MAX_SHOWN else []
        return ", ".join([*shown, *more]) or "none: answers end at their length, or by what a request names"


def read_end_tokens(
    model_dir: Path, vocab_size: int, generation_config: str = "auto", tokenizer_dir: Path | None = None
) -> EndTokens:
    """The end tokens of a folder. ``vocab_size``: rows of the model's embedding. ``generation_config``: see
    ``generation_file``. ``tokenizer_dir``: another folder with the tokenizer.

    A folder without ``tokenizer.json`` has the tokens of its configuration only. Raises ModelError for a broken file,
    ConfigError for a place without one. Unchanged files are not read again: a vocabulary takes half a second, and
    measurements assemble a model hundreds of times.
    """
    tokenizer_dir = tokenizer_dir or model_dir
    places = [model_dir, tokenizer_dir]
    if generation_config not in (AUTO, NEUTRAL):
        places.append(Path(generation_config))
    return _read(model_dir, tokenizer_dir, vocab_size, generation_config, tuple(_marks(places)))


def _marks(folders: list[Path]) -> Iterator[tuple[int, int, int] | None]:
    """Marks of the files, which tell whether they have changed since they were read."""
    for folder in folders:
        for name in ("", MODEL_CONFIG, NAME, TOKENIZER, CONFIG, SPECIAL_MAP, ADDED):
            try:
                stat = (folder / name).stat()
                yield stat.st_ino, stat.st_size, stat.st_mtime_ns
            except OSError:
                yield None


@lru_cache(maxsize=8)
def _read(
    model_dir: Path, tokenizer_dir: Path, vocab_size: int, generation_config: str, marks: tuple[object, ...]
) -> EndTokens:
    has_tokenizer = (tokenizer_dir / TOKENIZER).is_file()
    files = read_tokenizer(tokenizer_dir) if has_tokenizer else None
    sources: dict[int, list[str]] = {}
    left_out = list(files.doubts) if files else []
    prefix = "" if tokenizer_dir == model_dir else f"{tokenizer_dir}/"
    for source, token_id, what in _named(model_dir, generation_config, files, prefix):
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
    return EndTokens(tuple(tokens), tuple(told), files.num_ids if files else 0)


def _named(
    model_dir: Path, generation_config: str, files: TokenizerFiles | None, prefix: str
) -> Iterator[tuple[str, int | None, str]]:
    """(file, id, the token's spelling in the file). ``prefix``: of the tokenizer's files, where they are elsewhere."""
    generation = read_generation(model_dir, generation_config)
    for keys in (generation, JsonObject.read(model_dir / MODEL_CONFIG)):
        for token_id in keys.token_ids("eos_token_id"):
            name = keys.path.name if keys.path.parent == model_dir else str(keys.path)
            yield name, token_id, f"eos_token_id {str(token_id)[:20]}"
    if files is not None:
        for source, parts in files.said.items():
            if (text := parts.get("eos_token")) is not None:
                yield prefix + source, files.backend.token_to_id(text), f"eos_token {text[:40]!r}"
