"""How a text is cut into words before byte pairs are merged, by the name that GGUF gives it (``tokenizer.ggml.pre``).

A row each; the patterns are those of the models' own ``tokenizer.json``. A name without a row is refused: words cut
otherwise give other tokens, and worse answers without a sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class WordRule:
    """One way to cut words, and what goes with it."""

    pattern: str | None = None
    """Of words; None: GPT-2's, which the ``tokenizers`` library has."""
    single_digits: bool = False
    """Whether every digit is a word."""
    composed: bool = False
    """Whether letters and their accents are joined first (NFC)."""
    whole_words: bool = False
    """Whether a word that is a token is taken without its merges."""
    begins: bool = False
    """Whether a text begins with the begin token where the file says nothing."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cuts words, and spells their bytes."""
        parts: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            parts.append(pre_tokenizers.Split(Regex(self.pattern), "isolated"))
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to a text before."""
        return normalizers.NFC() if self.composed else None


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UP_TO_THREE, _ONE = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3 = WordRule(_UP_TO_THREE, whole_words=True, begins=True)
_DIGITS = WordRule(single_digits=True)

WORD_RULES = {
    "gpt-2": WordRule(),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "smaug-bpe": WordRule(_UP_TO_THREE), "dbrx": WordRule(_UP_TO_THREE),
    "qwen2": WordRule(_ONE, composed=True), "megrez": WordRule(_ONE, composed=True),
    "deepseek-r1-qwen": WordRule(_ONE),
    "tekken": WordRule(_TEKKEN, whole_words=True, begins=True),
}  # fmt: skip
