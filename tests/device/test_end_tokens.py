"""Which tokens end a text, by what the files of a folder say; and a real engine that obeys."""

from __future__ import annotations

import json

import pytest

from jettison.config import EngineConfig
from jettison.device.model.byte_tokenizer import EOS, EOS_ID, TURN_END
from jettison.device.model.end_tokens import read_end_tokens
from jettison.errors import ConfigError, ModelError
from jettison.live.engine.local_cluster import LocalCluster
from jettison.types import SamplingParams
from puppet import ABSENT, DEFAULT, TURN_END_ID, chain_of, tokens_of, write_puppet

NEW = {"content": "<end_of_turn>", "special": True}


def ends(folder, generation_config="auto"):
    found = read_end_tokens(folder, 272, generation_config)
    return {end.token_id: end.sources for end in found.tokens}, list(found.left_out)


BASE = {EOS_ID: ("generation_config.json", "config.json")}
TURN = {TURN_END_ID: ("tokenizer_config.json",)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": TURN_END}}, BASE | TURN),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": TURN_END}}}, BASE | TURN),
        ({"tokenizer_config": {"eos_token": {"content": TURN_END, "lstrip": False}}}, BASE | TURN),
        ({"tokenizer_config": {"eos_token": None}}, BASE),
        ({"tokenizer_config": {"eos_token": ABSENT}}, BASE),
        ({"generation": {"eos_token_id": [EOS_ID, TURN_END_ID]}, "tokenizer_config": {"eos_token": EOS}},
         {EOS_ID: (*BASE[EOS_ID], "tokenizer_config.json"), TURN_END_ID: ("generation_config.json",)}),
        ({"generation": {"eos_token_id": TURN_END_ID}, "tokenizer_config": {"eos_token": None}},
         {TURN_END_ID: ("generation_config.json",), EOS_ID: ("config.json",)}),
        ({"generation": {"eos_token_id": None}, "config": {"eos_token_id": [EOS_ID, 12]},
          "tokenizer_config": {"eos_token": None}}, {12: ("config.json",), EOS_ID: ("config.json",)}),
        ({"generation": {"eos_token_id": ABSENT}, "config": {"eos_token_id": ABSENT},
          "tokenizer_config": {"eos_token": TURN_END}}, TURN),
        ({"tokenizer_config": {"eos_token": "<end_of_turn>", "added_tokens_decoder": {"261": NEW}}},
         BASE | {261: ("tokenizer_config.json",)}),
        ({"tokenizer_config": {"eos_token": "<|eot_id|>"}}, BASE | {261: ("tokenizer_config.json",)}),
        ({"generation": {"eos_token_id": [EOS_ID, EOS_ID]}, "tokenizer_config": {"eos_token": None}}, BASE),
    ],
    ids=["another", "typed", "an object", "null", "absent", "a list", "contradicting", "null and a list",
         "by the tokenizer alone", "added by id", "added by its name", "doubled"],
)  # fmt: skip
def test_all_files_count(tmp_path, files, expected):
    assert ends(write_puppet(tmp_path / "puppet", {}, **files)) == (expected, [])


def test_special_tokens_map_counts(tmp_path):
    folder = write_puppet(tmp_path / "puppet", {}, tokenizer_config={"eos_token": EOS})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": TURN_END}}))
    assert ends(folder)[0][TURN_END_ID] == ("special_tokens_map.json",)
    (folder / "tokenizer_config.json").unlink()
    assert ends(folder)[0] == BASE | {TURN_END_ID: ("special_tokens_map.json",)}


def test_added_tokens_json_counts(tmp_path):
    folder = write_puppet(tmp_path / "puppet", {}, tokenizer_config={"eos_token": "<end_of_turn>"})
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 261, "<end_of_turn>": 262}))
    assert ends(folder) == (BASE | {262: ("tokenizer_config.json",)}, [])


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"generation": {"eos_token_id": [EOS_ID, 272]}},
         "generation_config.json: eos_token_id 272 is none of the model's 272 tokens, and ends nothing"),
        ({"generation": {"eos_token_id": [EOS_ID, -1]}}, "eos_token_id -1 is none of"),
        ({"generation": {"eos_token_id": [EOS_ID, 10**400]}}, "eos_token_id 10000000000000000000 is none of"),
        ({"tokenizer_config": {"eos_token": "<end_of_turn>", "added_tokens_decoder": {
            str(261 + at): {"content": f"<extra {at}>"} for at in range(11)} | {"272": NEW}}},
         "tokenizer_config.json: eos_token '<end_of_turn>' is none of the model's 272 tokens, and ends nothing"),
    ],
    ids=["beyond the embedding", "negative", "huge", "added beyond the embedding"],
)  # fmt: skip
def test_what_the_model_does_not_have_is_told_and_left_out(tmp_path, files, told):
    files = {"tokenizer_config": {"eos_token": None}} | files
    found, left_out = ends(write_puppet(tmp_path / "puppet", {}, **files))
    assert (found, len(left_out)) == (BASE, 1)
    assert told in left_out[0]


def test_a_name_without_a_token_is_told(tmp_path):
    """What transformers does not read (the map beside ids) does not get into the vocabulary."""
    folder = write_puppet(tmp_path / "puppet", {}, tokenizer_config={"added_tokens_decoder": {}})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    (told,) = ends(folder)[1]
    assert told == "special_tokens_map.json: eos_token '<nowhere>' is not in the vocabulary, and ends nothing"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("config", "eos_token_id", "257"), ("generation", "eos_token_id", [[257]]), ("generation", "eos_token_id", True),
     ("generation", "eos_token_id", 257.0), ("tokenizer_config", "eos_token", 257)],
)  # fmt: skip
def test_what_is_no_token_is_refused(tmp_path, name, key, value):
    folder = write_puppet(tmp_path / "puppet", {}, **{name: {key: value}})
    with pytest.raises(ModelError, match=rf"config\.json: {key} is") as caught:
        ends(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_has_those_of_its_configuration(tmp_path):
    folder = write_puppet(tmp_path / "puppet", {})
    (folder / "tokenizer.json").unlink()
    found = read_end_tokens(folder, 272)
    assert ([end.token_id for end in found.tokens], found.tokens[0].text) == ([EOS_ID], None)


def test_another_folders_generation_config(tmp_path):
    folder = write_puppet(tmp_path / "puppet", {}, tokenizer_config={"eos_token": None})
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": 300}')
    (other / "config.json").write_text('{"eos_token_id": 12}')
    assert ends(folder, "vllm") == (BASE, [])
    assert "eos_token_id 300" in ends(folder, str(other))[1][0]
    assert ends(folder, str(other))[0] == {EOS_ID: ("config.json",)}
    (other / "generation_config.json").unlink()
    assert ends(folder, str(other))[0] == {12: (str(other / "config.json"),), EOS_ID: ("config.json",)}
    with pytest.raises(ConfigError, match=r"--generation-config .*: no generation_config\.json there"):
        ends(folder, str(tmp_path / "nowhere"))


def test_how_they_are_told(tmp_path):
    folder = write_puppet(tmp_path / "puppet", {}, tokenizer_config={"eos_token": TURN_END})
    assert str(read_end_tokens(folder, 272)) == (
        "257 <|endoftext|> (generation_config.json, config.json), 260 <|im_end|> (tokenizer_config.json)")
    many = write_puppet(tmp_path / "many", {}, generation={"eos_token_id": list(range(40))})
    assert str(read_end_tokens(many, 272)).endswith(", 29 more")
    few = read_end_tokens(many, 20).left_out
    assert (len(few), few[-1]) == (13, f"{many}: 10 more of the kind")
    none = {"eos_token_id": None}
    nothing = write_puppet(tmp_path / "none", {}, config=none, generation=none, tokenizer_config={"eos_token": None})
    assert "none: answers end at their length" in str(read_end_tokens(nothing, 272))


def test_an_engine_obeys_all_of_them(tmp_path):
    """Of each kind of request: the union ends it, keeps away for min_tokens, and does not for ignore_eos."""
    folder = write_puppet(
        tmp_path / "puppet", chain_of("\n", "Hi", TURN_END_ID, "User") | chain_of("?", "Yo", EOS_ID, "x"),
        tokenizer_config={"eos_token": TURN_END})
    asked = {
        "turn end": ("\n", {}), "end of text": ("?", {}), "ignored": ("\n", {"ignore_eos": True}),
        "later": ("\n", {"min_tokens": 4}), "named": ("\n", {"stop_token_ids": (ord("i"),)}),
        "named, ignored": ("\n", {"stop_token_ids": (ord("s"),), "ignore_eos": True}),
    }  # fmt: skip
    with LocalCluster(EngineConfig.resolve(model=str(folder), memory="32MiB", num_threads=1)) as cluster:
        for name, (prompt, params) in asked.items():
            cluster.submit(name, tokens_of(prompt), SamplingParams(max_tokens=8, temperature=0.0, **params))
        cluster.run()
        done = {name: completion.token_ids for name, completion in cluster.completions.items()}
    assert done["turn end"] == tokens_of("Hi", TURN_END_ID)
    assert done["end of text"] == tokens_of("Yo", EOS_ID)
    assert done["ignored"] == [*tokens_of("Hi", TURN_END_ID, "User"), DEFAULT]
    assert TURN_END_ID not in done["later"][:4]
    assert done["named"] == tokens_of("Hi")
    assert done["named, ignored"] == tokens_of("Hi", TURN_END_ID, "Us")
