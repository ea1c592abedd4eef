"""Tokens that a folder declares beside tokenizer.json, next to what transformers makes of the same folder."""

from __future__ import annotations

import json

import pytest

from jettison.device.model.byte_tokenizer import write_tokenizer
from jettison.device.model.tokenizer_files import read_tokenizer
from jettison.errors import ModelError

ABSENT = object()
TEXT = "a<tool> b <tool>c <t2>xyz<end> <pad><new>Ünder <|im_end|> [img]<o>"


def plain(text, **flags):
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
            "special": False} | flags  # fmt: skip


def typed(text, **flags):
    return {"__type": "AddedToken", **plain(text, **flags)}


@pytest.fixture
def write(tmp_path):
    def write(config, special_map=None, numbered=None, normalizer=None):
        write_tokenizer(tmp_path, 300, 2048)
        path = tmp_path / "tokenizer_config.json"
        values = {key: value for key, value in (json.loads(path.read_text()) | config).items() if value is not ABSENT}
        path.write_text(json.dumps(values))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        for name, content in (("special_tokens_map", special_map), ("added_tokens", numbered)):
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        if normalizer is not None:
            tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
            (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": normalizer}))
        return tmp_path

    return write


CASES = {
    "nothing but tokenizer.json": ({},),
    "one by id": ({"added_tokens_decoder": {"300": plain("<tool>", special=True)}},),
    "several, in the order of their ids": (
        {"added_tokens_decoder": {"302": plain("<end>"), "300": plain("<tool>"), "301": plain("<t2>", special=True)}},),
    "ids with gaps": ({"added_tokens_decoder": {"400": plain("<t2>"), "310": plain("<tool>")}},),
    "an id that is taken": ({"added_tokens_decoder": {"97": plain("<tool>")}},),
    "flags": ({"added_tokens_decoder": {
        "300": plain("<tool>", lstrip=True), "301": plain("<t2>", rstrip=True, special=True),
        "302": plain("xyz", single_word=True, normalized=True), "303": plain("<end>", normalized=True)}},),
    "other flags of a known token": (
        {"added_tokens_decoder": {"260": plain("<|im_end|>", lstrip=True, special=False)}},),
    "an end token that is only there": (
        {"added_tokens_decoder": {"300": plain("<end>")}, "eos_token": "<end>"},),
    "an end token of none of them": ({"added_tokens_decoder": {}, "eos_token": "<new>"},),
    "an end token of the base vocabulary": ({"eos_token": "a"},),
    "named as objects": ({"eos_token": typed("<end>", lstrip=True), "pad_token": typed("<pad>", special=True)},),
    "null": ({"pad_token": None, "eos_token": None, "added_tokens_decoder": {}},),
    "additional_special_tokens": ({"additional_special_tokens": ["<tool>", "<|im_end|>", "<t2>"]},),
    "extra_special_tokens": ({"additional_special_tokens": ABSENT, "extra_special_tokens": ["<t2>", "<tool>"]},),
    "both lists": ({"additional_special_tokens": ["<tool>"], "extra_special_tokens": ["<t2>"]},),
    "a list of objects": ({"additional_special_tokens": [typed("<tool>", rstrip=True), "<t2>"]},),
    "extra_special_tokens by name": ({"extra_special_tokens": {"image_token": "[img]", "other_token": "<o>"}},),
    "parts of the model's own": ({"image_token": "[img]", "boi_token": "<o>"},),
    "parts and a list": ({"image_token": "[img]", "eos_token": "<end>", "additional_special_tokens": ["<t2>"],
                          "added_tokens_decoder": {"300": plain("<tool>"), "301": plain("[img]")}},),
    "added_tokens.json": ({}, None, {"<tool>": 300, "<t2>": 301}),
    "added_tokens.json, out of order": ({"eos_token": "<t2>"}, None, {"<t2>": 301, "<tool>": 300, "<end>": 302}),
    "added_tokens.json is not read beside ids": (
        {"added_tokens_decoder": {"300": plain("<t2>")}}, None, {"<tool>": 300}),
    "special_tokens_map.json": ({"eos_token": ABSENT}, {"eos_token": plain("<end>"), "pad_token": "<pad>"}),
    "special_tokens_map.json counts more": ({"eos_token": "<|im_end|>"}, {"eos_token": "<end>"}),
    "special_tokens_map.json is not read beside ids": (
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {}}, {"eos_token": "<end>"}),
    "special_tokens_map.json with a list": (
        {"additional_special_tokens": ABSENT}, {"additional_special_tokens": ["<tool>", "<t2>"]}),
    "all three files": (
        {"additional_special_tokens": ["<t2>"]}, {"eos_token": plain("<end>", normalized=True), "unk_token": "<o>"},
        {"<tool>": 300, "<end>": 301}),
}  # fmt: skip


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}], ids=["plain", "lower case"])
@pytest.mark.parametrize("case", CASES)
def test_as_transformers_adds_them(write, case, normalizer):
    transformers = pytest.importorskip("transformers")
    folder = write(*CASES[case], normalizer=normalizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(folder)
    added = ours.backend.get_added_tokens_decoder()
    assert {token_id: repr(token) for token_id, token in added.items()} == {
        token_id: repr(token) for token_id, token in theirs.added_tokens_decoder.items()}
    assert ours.backend.encode(TEXT, add_special_tokens=False).ids == theirs(TEXT, add_special_tokens=False).input_ids
    ids = ours.backend.encode(TEXT, add_special_tokens=False).ids
    assert ours.backend.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    for part in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert ours.special_tokens.get(part) == getattr(theirs, part), part
    named = {role: text for role, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert named.items() <= ours.special_tokens.items(), "what a chat template may name"


def test_a_token_as_an_object_without_its_type_is_taken(write):
    files = read_tokenizer(write({"eos_token": {"content": "<end>"}, "additional_special_tokens": [plain("<tool>")]}))
    assert files.special_tokens["eos_token"] == "<end>"
    assert files.backend.encode("<tool><end>").ids == [301, 300]


def test_other_ids_than_the_files_say_are_told(write):
    files = read_tokenizer(write({"added_tokens_decoder": {"310": plain("<tool>"), "300": plain("<t2>")}}))
    (doubt,) = files.doubts
    assert "token '<tool>' is written down as 310, and is 301" in doubt
    assert read_tokenizer(write({}, None, {"<tool>": 300})).doubts == ()


def test_what_each_file_says_is_kept_apart(write):
    files = read_tokenizer(write({"eos_token": "<|im_end|>"}, {"eos_token": "<end>"}))
    assert files.said["tokenizer_config.json"]["eos_token"] == "<|im_end|>"
    assert files.said["special_tokens_map.json"] == {"eos_token": "<end>"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": ["<tool>"]}, "added_tokens_decoder is .*expected an object"),
        ({"added_tokens_decoder": {"one": plain("<tool>")}}, "added_tokens_decoder: 'one' must be an id"),
        ({"added_tokens_decoder": {"300": "<tool>"}}, "added_tokens_decoder: '300' must be an id, and its value"),
        ({"added_tokens_decoder": {"300": {"lstrip": True}}}, "added_tokens_decoder 300 is no token"),
        ({"added_tokens_decoder": {"300": plain("<tool>", lstrip="yes")}}, "added_tokens_decoder 300 is no token"),
        ({"eos_token": 260}, "eos_token is no token"),
        ({"eos_token": "\ud800"}, "eos_token is no token"),
        ({"added_tokens_decoder": {"300": plain("\udfff")}}, "added_tokens_decoder 300 is no token"),
        ({"eos_token": ["<end>"]}, "eos_token is no token"),
        ({"extra_special_tokens": "<tool>"}, "extra_special_tokens is '<tool>', expected a list"),
        ({"additional_special_tokens": "<tool>"}, "additional_special_tokens is '<tool>', expected a list"),
        ({"additional_special_tokens": [7]}, "additional_special_tokens is no token"),
    ],
)  # fmt: skip
def test_what_is_no_token_is_told_in_one_line(write, config, message):
    folder = write(config)
    with pytest.raises(ModelError, match=message) as caught:
        read_tokenizer(folder)
    assert str(caught.value).startswith(str(folder / "tokenizer_config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numbered", [["<tool>"], {"<tool>": "300"}, {"<tool>": True}, {"\ud800": 300}])
def test_a_broken_file_of_ids_is_told(write, numbered):
    with pytest.raises(ModelError, match=r"added_tokens\.json: "):
        read_tokenizer(write({}, None, numbered))


def test_an_empty_token_is_none(write):
    files = read_tokenizer(write({"eos_token": "", "added_tokens_decoder": {"300": plain("")}}))
    assert (files.doubts, files.special_tokens.get("eos_token")) == ((), None)
    assert files.backend.get_vocab_size() == 300


def test_a_byte_order_mark_is_passed_over(write):
    path = write({"added_tokens_decoder": {"300": plain("<tool>")}}) / "tokenizer_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_tokenizer(path.parent).backend.encode("<tool>").ids == [300]
