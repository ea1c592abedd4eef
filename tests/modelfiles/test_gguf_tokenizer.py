"""A tokenizer that went through a GGUF file cuts texts as it did, and writes them back."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_written import add_field
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jettison.device.model.tokenizer_files import read_tokenizer
from jettison.errors import ModelError
from jettison.modelfiles.gguf_file import GgufFile
from jettison.modelfiles.gguf_tokenizer import ImportedTokenizer, import_tokenizer
from jettison.modelfiles.pretokenizers import WORD_RULES

TEXT = """The harbour master's log, 12 March 1907: 1,240 crates came ashore before noon, 35 more at dusk. We'd seen
nothing like it; they'll say the tide did it!!   Ships of every kind lay in rows... "Who ordered all this?" asked the
clerk (twice). L'été dernier, déjà; Größe, naïve, smörgåsbord. 船は港に戻った。Корабль вернулся в порт. 12345678901
    def load(crates):\n        return [crate for crate in crates if crate.weight > 250]\n\n\n\tend\r\n
"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CUTS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES],
}
"""As these models' own ``tokenizer.json`` have it."""


@dataclass(frozen=True)
class Pair:
    original: Tokenizer
    imported: ImportedTokenizer


def written(path: Path, fields: dict[str, Any]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add_field(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def byte_pairs(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A trained byte-level tokenizer with special and user's tokens behind its vocabulary, and its fields."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[name])
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    kinds = dict.fromkeys(SPECIALS, gguf.TokenType.CONTROL) | {"<tool>": gguf.TokenType.USER_DEFINED}
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)] + [f"[PAD{size + i}]" for i in range(3)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(gguf.TokenType.UNUSED if token.startswith("[PAD") else kinds.get(token, gguf.TokenType.NORMAL))
            for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": tokens.index(SPECIALS[1]),
        "tokenizer.ggml.eos_token_id": tokens.index(SPECIALS[2]),
        "tokenizer.ggml.padding_token_id": tokens.index(SPECIALS[0]),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip


@pytest.fixture(scope="module", params=CUTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    original, fields = byte_pairs(request.param)
    file = written(tmp_path_factory.mktemp("bpe") / "model.gguf", fields)
    return Pair(original, import_tokenizer(file, len(fields["tokenizer.ggml.tokens"]), 512))


@given(st.one_of(st.text(max_size=60), st.text(alphabet="the harbour 0123'sld!\n\r\t  éü<|im_end|>", max_size=60)))
@example(TEXT)
@example("<|im_start|>user\nA <tool> of 12345<|im_end|> \n<|endoftext|>")
def test_byte_pairs_are_the_originals(pair: Pair, text: str) -> None:
    own, theirs = pair.imported.backend, pair.original
    ids = own.encode(text).ids
    assert ids == theirs.encode(text).ids
    for skip in (False, True):
        assert own.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_keep_their_ids_and_their_kind(pair: Pair) -> None:
    own, theirs = pair.imported.backend, pair.original
    assert {token: own.token_to_id(token) for token in (*SPECIALS, "<tool>")} == {
        token: theirs.token_to_id(token) for token in (*SPECIALS, "<tool>")
    }
    assert {t.content: t.special for t in own.get_added_tokens_decoder().values()} == {
        t.content: t.special for t in theirs.get_added_tokens_decoder().values()
    }
    assert own.id_to_token(theirs.get_vocab_size()) is None, "what fills the vocabulary up is no token"
    end, begin, pad = (theirs.token_to_id(SPECIALS[i]) for i in (2, 1, 0))
    assert pair.imported.ids == {"bos_token_id": begin, "eos_token_id": [end, pad], "pad_token_id": pad}
    assert pair.imported.config["eos_token"] == "<|im_end|>" and pair.imported.config["model_max_length"] == 512
    assert pair.imported.config["chat_template"] == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("name", "says", "expected"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("qwen2", True, True)],
)
def test_a_text_begins_as_the_file_says(name: str, says: bool | None, expected: bool, tmp_path: Path) -> None:
    _, fields = byte_pairs(name)
    file = written(tmp_path / "model.gguf", fields | {"tokenizer.ggml.add_bos_token": says})
    imported = import_tokenizer(file, len(fields["tokenizer.ggml.tokens"]), 512)
    begin = [fields["tokenizer.ggml.bos_token_id"]] if expected else []
    ids = imported.backend.encode("the harbour").ids
    assert ids == begin + imported.backend.encode("the harbour", add_special_tokens=False).ids
    assert imported.config["add_bos_token"] is expected


def test_several_chat_templates(tmp_path: Path) -> None:
    _, fields = byte_pairs("gpt-2")
    file = written(tmp_path / "model.gguf", fields | {
        "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}",
    })  # fmt: skip
    imported = import_tokenizer(file, len(fields["tokenizer.ggml.tokens"]), 512)
    assert imported.config["chat_template"] == [
        {"name": "default", "template": fields["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def pieces() -> dict[str, Any]:
    """Fields of a SentencePiece vocabulary: bytes, letters, and pieces with the scores of their rank."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300))
    ranked = [token for token, _ in sorted(words.get_vocab().items(), key=lambda item: item[1]) if len(token) > 1]
    letters = sorted(set("▁").union(*ranked))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *ranked, *letters, "[INST]"]
    kind = gguf.TokenType
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(ranked + letters)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(each) for each in [*kinds, kind.USER_DEFINED]],
        "tokenizer.ggml.scores": [
            *[0.0] * 259, *(-float(i) for i in range(len(ranked))), *[-1000.0] * len(letters), -1000.0],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def merged(text: str, fields: dict[str, Any]) -> list[int]:
    """Ids by SentencePiece's rule, plainly: join the neighbours whose piece has the best score, the first of equals."""
    tokens = fields["tokenizer.ggml.tokens"]
    normal = {
        token: i for i, token in enumerate(tokens) if fields["tokenizer.ggml.token_type"][i] == gguf.TokenType.NORMAL
    }
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [a + b for a, b in itertools.pairwise(parts)]
        joined = [(-fields["tokenizer.ggml.scores"][normal[pair]], i) for i, pair in enumerate(pairs) if pair in normal]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([normal[part]] if part in normal else [3 + byte for byte in part.encode()])]


@given(st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=30),
    st.text(alphabet="the harbour master's log, 12!  \n", max_size=40),
))  # fmt: skip
@example(TEXT)
@example("船 é\t")
def test_pieces_are_joined_by_their_scores(pieces_imported: tuple[dict, ImportedTokenizer], text: str) -> None:
    fields, imported = pieces_imported
    assume(not any(token in text for token in ("<s>", "</s>", "<unk>", "[INST]")))
    ids = imported.backend.encode(text).ids
    assert ids == [1, *merged(text, fields)]
    assert imported.backend.decode(ids) == text


def test_pieces_around_special_tokens(pieces_imported: tuple[dict, ImportedTokenizer]) -> None:
    fields, imported = pieces_imported
    inst = fields["tokenizer.ggml.tokens"].index("[INST]")
    ids = imported.backend.encode("[INST]the master</s>", add_special_tokens=False).ids
    assert ids == [inst, *merged("the master", fields), 2]
    assert imported.ids == {"bos_token_id": 1, "eos_token_id": [2]}
    assert imported.config["unk_token"] == "<unk>" and imported.config["add_bos_token"] is True


@pytest.fixture(scope="module")
def pieces_imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, ImportedTokenizer]:
    fields = pieces()
    path = tmp_path_factory.mktemp("pieces") / "model.gguf"
    return fields, import_tokenizer(written(path, fields), len(fields["tokenizer.ggml.tokens"]), 512)


def test_without_a_space_before_the_text(tmp_path: Path) -> None:
    fields = pieces() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}
    imported = import_tokenizer(written(tmp_path / "model.gguf", fields), len(fields["tokenizer.ggml.tokens"]), 512)
    ids = imported.backend.encode(" the").ids
    assert ids == [1, *merged("the", fields), 2], "its own space is the letter that else is put before"
    assert imported.backend.decode(ids) == " the"


def test_scores_are_needed(tmp_path: Path) -> None:
    fields = pieces() | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(ModelError, match=r"tokenizer.ggml.scores are 1 for \d+ tokens"):
        import_tokenizer(written(tmp_path / "model.gguf", fields), 10_000, 512)
    with pytest.raises(ModelError, match=r"tokenizer.ggml.tokens are \d+, and the embedding has 10 rows"):
        import_tokenizer(GgufFile(tmp_path / "model.gguf"), 10, 512)


def test_a_token_without_end_is_refused(tmp_path: Path) -> None:
    fields = pieces()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"][:-1], "é" * 1_000_000]
    with pytest.raises(ModelError, match=r"tokenizer.ggml.tokens has one of 1000000 letters; the longest may have"):
        import_tokenizer(written(tmp_path / "model.gguf", fields), 10_000, 512)


@pytest.mark.parametrize("name", WORD_RULES)
def test_every_word_rule_is_a_tokenizer_that_is_read(name: str, tmp_path: Path) -> None:
    _, fields = byte_pairs("gpt-2")
    file = written(tmp_path / "model.gguf", fields | {"tokenizer.ggml.pre": name})
    imported = import_tokenizer(file, len(fields["tokenizer.ggml.tokens"]), 512)
    imported.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(imported.config))
    files = read_tokenizer(tmp_path)
    assert files.is_byte_level and not files.doubts
    assert files.backend.decode(files.backend.encode(TEXT, add_special_tokens=False).ids) == TEXT
    assert files.special_tokens["eos_token"] == "<|im_end|>"
