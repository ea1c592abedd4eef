"""From a GGUF file's vocabulary to a folder's ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds are known: ``gpt2``, byte-level pairs with their merges, and ``llama``, SentencePiece pieces, whose scores
order the merges. Ids are the file's own, also where it has gaps. Not here: how words are cut (``pretokenizers``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from jettison.errors import ModelError
from jettison.modelfiles.gguf_file import GgufFile
from jettison.modelfiles.pretokenizers import WORD_RULES

_BEGIN = "tokenizer.ggml."
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>",
)  # fmt: skip
"""Control tokens with these texts end an answer, too, as they do where GGUF files are served: a file names one end
token, where its model's folder named several."""

_NOTES = (
    "pre", "fim_", "prefix_token_id", "suffix_token_id", "middle_token_id", "seperator_token_id", "mask_token_id",
    "cls_token_id", "token_type_count", "add_sep_token",
)  # fmt: skip
"""Fields, or beginnings of fields, that change neither the tokens of a text nor its end."""

_LONGEST_TOKEN = 1 << 12
"""Letters. Every way to cut a piece in two is tried."""

_PIECES = (TokenType.NORMAL, TokenType.USER_DEFINED)
"""Kinds of tokens that are made of others."""


@dataclass(frozen=True, slots=True)
class ImportedTokenizer:
    """A tokenizer and what the folder's files say beside it."""

    backend: Tokenizer
    config: dict[str, Any]
    """Contents of ``tokenizer_config.json``."""
    ids: dict[str, Any]
    """What ``config.json`` and ``generation_config.json`` say of tokens, with all end tokens in a list."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]

    def ids(self, *kinds: int) -> dict[str, int]:
        """Text -> id, of all tokens or of some kinds; of two with one text the first counts. What only fills the
        vocabulary up is left out."""
        found: dict[str, int] = {}
        for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            is_filler = kind == TokenType.UNUSED and token == f"[PAD{i}]"
            if (kind in kinds or not kinds) and not is_filler:
                found.setdefault(token, i)
        return found


def import_tokenizer(file: GgufFile, vocab_size: int, context: int) -> ImportedTokenizer:
    """The file's tokenizer. ``vocab_size``: rows of the embedding; ``context``: tokens.

    Raises ModelError, one line that names the field, for a kind or a field that is not known.
    """
    vocabulary = _vocabulary(file, vocab_size)
    kind = file.text(f"{_BEGIN}model")
    if kind == "gpt2":
        tokenizer, begins = _byte_pairs(file, vocabulary)
    elif kind == "llama":
        tokenizer, begins = _pieces(file, vocabulary)
    else:
        raise file.fail(f"{_BEGIN}model {kind[:40]!r} is not supported; supported: gpt2, llama")
    specials = {TokenType.CONTROL, TokenType.UNKNOWN}
    tokenizer.add_tokens([
        AddedToken(token, normalized=False, special=vocabulary.kinds[i] in specials)
        for token, i in vocabulary.ids(*specials, TokenType.USER_DEFINED).items()
    ])  # fmt: skip
    roles = {
        role: i for role, key in _ROLES.items()
        if (i := file.token_id(f"{_BEGIN}{key}", len(vocabulary.tokens))) is not None
    }  # fmt: skip
    begins = file.flag(f"{_BEGIN}add_bos_token", begins) and "bos" in roles
    ends = file.flag(f"{_BEGIN}add_eos_token", False) and "eos" in roles
    _frame(tokenizer, vocabulary, roles, begins, ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": vocabulary.tokens[i] for role, i in roles.items()},
        "add_bos_token": begins,
        "add_eos_token": ends,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **_templates(file),
    }
    ids: dict[str, Any] = {f"{role}_token_id": i for role, i in roles.items() if role in ("bos", "pad")}
    if end_ids := _end_ids(file, vocabulary):
        ids["eos_token_id"] = end_ids
    _refuse_unknown(file)
    return ImportedTokenizer(tokenizer, config, ids)


def _vocabulary(file: GgufFile, vocab_size: int) -> _Vocabulary:
    tokens, kinds = file.texts(f"{_BEGIN}tokens"), file.integers(f"{_BEGIN}token_type")
    if len(tokens) > vocab_size:
        raise file.fail(f"{_BEGIN}tokens are {len(tokens)}, and the embedding has {vocab_size} rows")
    if len(kinds) != len(tokens):
        raise file.fail(f"{_BEGIN}token_type are {len(kinds)} for {len(tokens)} tokens")
    if (longest := max(map(len, tokens), default=0)) > _LONGEST_TOKEN:
        raise file.fail(f"{_BEGIN}tokens has one of {longest} letters; the longest may have {_LONGEST_TOKEN}")
    return _Vocabulary(tokens, kinds)


def _byte_pairs(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A byte-level tokenizer, and whether texts begin with the begin token where the file leaves it open."""
    name = file.text(f"{_BEGIN}pre")
    if name not in WORD_RULES:
        raise file.fail(f"{_BEGIN}pre {name[:40]!r} is not supported; supported: {', '.join(WORD_RULES)}")
    file.expect(f"{_BEGIN}add_space_prefix", False)
    rule, vocab = WORD_RULES[name], vocabulary.ids()
    written = [text.split(" ") for text in file.texts(f"{_BEGIN}merges")]
    try:
        merges = [(left, right) for left, right in written]
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception for a merge of unknown tokens
        raise _wrong_merges(file, error) from None
    tokenizer = Tokenizer(model)
    if (normalizer := rule.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.begins


def _wrong_merges(file: GgufFile, error: Exception) -> ModelError:
    return file.fail(f"{_BEGIN}merges do not fit its tokens ({' '.join(str(error).split())[:120]})")


def _pieces(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A SentencePiece tokenizer: spaces are letters of their own, unknown letters are bytes."""
    scores = file.numbers(f"{_BEGIN}scores")
    if len(scores) != len(vocabulary.tokens):
        raise file.fail(f"{_BEGIN}scores are {len(scores)} for {len(vocabulary.tokens)} tokens")
    unknown = next(iter(vocabulary.ids(TokenType.UNKNOWN)), None)
    begins_spaced = file.flag(f"{_BEGIN}add_space_prefix", True)
    merges = sorted(_merges(vocabulary), key=lambda merge: -scores[merge[2]])
    tokenizer = Tokenizer(models.BPE(
        vocab=vocabulary.ids(), merges=[(left, right) for left, right, _ in merges], unk_token=unknown, fuse_unk=True,
        byte_fallback=bool(vocabulary.ids(TokenType.BYTE)),
    ))  # fmt: skip
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if begins_spaced else spaces
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if begins_spaced else []),
    ])  # fmt: skip
    return tokenizer, True


def _merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str, int]]:
    """Every way to make a piece of two others, with the piece's id; of one piece in the order of its parts' ids."""
    ids = vocabulary.ids(*_PIECES)
    for piece, i in ids.items():
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        parts = sorted((ids[left], ids[right]) for left, right in halves if left in ids and right in ids)
        yield from ((vocabulary.tokens[left], vocabulary.tokens[right], i) for left, right in parts)


def _frame(tokenizer: Tokenizer, vocabulary: _Vocabulary, roles: dict[str, int], begins: bool, ends: bool) -> None:
    """Put the begin and the end token around every text that is encoded with special tokens."""
    used = [role for role, is_used in (("bos", begins), ("eos", ends)) if is_used]
    if not used:
        return
    text = {role: vocabulary.tokens[roles[role]] for role in used}
    begin, end = ([text[role]] if role in text else [] for role in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end], pair=[*begin, "$A", *end, *[f"{token}:1" for token in begin], "$B:1",
                                           *[f"{token}:1" for token in end]],
        special_tokens=[(text[role], roles[role]) for role in used],
    )  # fmt: skip


def _templates(file: GgufFile) -> dict[str, Any]:
    """The chat template, or several with their names."""
    begin = "tokenizer.chat_template"
    named = {name: file.text(f"{begin}.{name}") for name in file.named(f"{begin}.")}
    file.texts("tokenizer.chat_templates", [])  # their names
    default = file.text(begin, "")
    if not named:
        return {"chat_template": default} if default else {}
    every = ({"default": default} if default else {}) | named
    return {"chat_template": [{"name": name, "template": text} for name, text in every.items()]}


def _end_ids(file: GgufFile, vocabulary: _Vocabulary) -> list[int]:
    controls = vocabulary.ids(TokenType.CONTROL)
    found = [file.token_id(f"{_BEGIN}{key}", len(vocabulary.tokens)) for key in _END_IDS]
    found += [controls.get(text) for text in _END_TEXTS]
    return list(dict.fromkeys(i for i in found if i is not None))


def _refuse_unknown(file: GgufFile) -> None:
    known = {f"{_BEGIN}{note}" for note in _NOTES} | {"tokenizer.huggingface.json"}
    for key in file.unread("tokenizer."):
        if not key.startswith(tuple(known)):
            raise file.fail(f"{key} is not known, and may change the tokens of a text")
