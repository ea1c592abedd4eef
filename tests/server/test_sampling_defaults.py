"""Sampling that a model's maker or the operator has said, under what a request says."""

from __future__ import annotations

import json
import logging

import pytest
from batches_util import jsonl, line
from fake_engine import FakeEngine
from test_batch_lines import check

from jettison.config import EngineConfig
from jettison.errors import ConfigError, ModelError
from jettison.server.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
NAMES = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_new_tokens",
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(generation, place="auto", override=None, config=None):
        for name, content in (("generation_config.json", generation), ("config.json", config or {})):
            if content is not None:
                (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return read_sampling_defaults(tmp_path, place, override)

    return read


def values(defaults):
    found = {name: getattr(defaults, name) for name in NAMES - {"max_new_tokens"}} | {
        "max_new_tokens": defaults.max_tokens}
    return {name: value for name, value in found.items() if value is not None}


FILES = [
    {}, QWEN, {"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0}, {"temperature": 0.0},
    {"repetition_penalty": 1.05, "max_new_tokens": 2048, "max_length": 20}, {"top_k": 20.0, "min_p": 0.05},
    {"top_k": -1}, {"top_k": 0}, {"top_k": 50, "temperature": 1.0, "top_p": 1.0}, {"temperature": None, "top_k": None},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"max_new_tokens": 10**9}, {"unknown": {"a": 1}},
]


@pytest.mark.parametrize("generation", FILES, ids=str)
def test_values_are_those_that_vllm_takes(read, tmp_path, generation):
    """It takes these keys of what transformers' GenerationConfig has beyond its defaults."""
    transformers = pytest.importorskip("transformers")
    ours = values(read(generation))
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    assert ours == {name: value for name, value in theirs.items() if name in NAMES and value is not None}


def test_a_folder_without_the_file_has_those_of_its_configuration(read):
    old = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "max_length": 20}
    assert values(read(None, config=old)) == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert values(read({}, config=old)) == {}


def test_the_operator_may_leave_them_out_or_name_others(read, tmp_path):
    assert read(QWEN, "vllm") == NO_DEFAULTS
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 7}')
    assert values(read(QWEN, str(other))) == {"top_k": 7}
    assert values(read(QWEN, str(other / "generation_config.json"))) == {"top_k": 7}
    with pytest.raises(ConfigError, match="--generation-config nowhere: no generation_config"):
        read(QWEN, "nowhere")


def test_what_is_put_over_them(read, caplog):
    override = '{"temperature": 0.1, "top_k": null, "min_p": 0.2}'
    found = read(QWEN, override=override)
    assert values(found) == {"temperature": 0.1, "top_p": 0.95, "min_p": 0.2}
    assert found.origin.endswith("generation_config.json and --override-generation-config")
    assert values(read(QWEN, "vllm", '{"top_p": 0.5}')) == {"top_p": 0.5}
    with caplog.at_level(logging.WARNING):
        assert values(read({}, override='{"do_sample": true, "top_p": 0.5}')) == {"top_p": 0.5}
    assert "do_sample left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "a number from 0 to 2"), ("temperature", 2.1, "a number from 0 to 2"),
        ("temperature", "0.6", "a number"), ("temperature", True, "a number"), ("temperature", [0.6], "a number"),
        ("temperature", 10**400, "a number"), ("top_p", 0, "a number above 0, up to 1"),
        ("top_p", 1.1, "a number above 0"), ("top_k", -2, "a whole number from -1"), ("top_k", 2.5, "a whole number"),
        ("min_p", 1.5, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number from 0.01 to 100"), ("presence_penalty", 3, "a number from -2 to 2"),
        ("max_new_tokens", 0, "a whole number from 1"), ("max_new_tokens", -3, "a whole number from 1"),
        ("max_new_tokens", "all", "a whole number from 1"),
    ],
)  # fmt: skip
def test_what_no_request_could_have_ends_the_start(read, tmp_path, name, value, expected):
    with pytest.raises(ModelError, match=f"{name} is .*, expected {expected}") as caught:
        read({name: value})
    told = str(caught.value)
    assert told.startswith(str(tmp_path / "generation_config.json"))
    assert told.endswith("mend it, or start with --generation-config vllm")
    assert "\n" not in told
    assert read({name: value}, "vllm") == NO_DEFAULTS
    with pytest.raises(ConfigError, match=f"^--override-generation-config: {name} is .*, expected {expected}"):
        read({}, override=json.dumps({name: value}))


@pytest.mark.parametrize("content", ['{"temperature": NaN}', '{"temperature": Infinity}', '{"top_k": 1e999}'])
def test_what_is_no_number_in_json(read, content):
    with pytest.raises(ModelError, match="expected a"):
        read(content)


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"'])
def test_a_broken_file_ends_the_start(read, content):
    with pytest.raises(ModelError, match=r"generation_config\.json: "):
        read(content)


def test_how_they_are_told(read):
    assert str(read(QWEN)) == "temperature 0.6, top_k 20, top_p 0.95"
    assert "says nothing: temperature 0.6, top_k 20, top_p 0.95 (" in read(QWEN).told
    assert NO_DEFAULTS.told is None
    assert str(read({"max_new_tokens": 99})) == "max_tokens 99"
    assert str(read({"max_new_tokens": 1048576})) == "max_tokens 1048576"
    assert str(read({}, override='{"max_new_tokens": 99}')) == "max_tokens 99 (at most)"


def test_settings(tmp_path):
    config = EngineConfig.resolve(model="m", override_generation_config={"temperature": 0.5})
    assert (config.model.generation_config, config.model.override_generation_config) == ("auto", '{"temperature": 0.5}')
    assert EngineConfig.resolve(**config.flat()) == config
    assert EngineConfig.resolve(model="m", override_generation_config="none").model.override_generation_config is None
    for wrong in ("{", "[1]", "0.5", '"x"'):
        with pytest.raises(ConfigError, match="--override-generation-config needs a JSON object"):
            EngineConfig.resolve(model="m", override_generation_config=wrong)


MAKERS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5,
    frequency_penalty=-0.5, max_tokens=50,
)  # fmt: skip
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def asked(serve, path, fields, defaults=MAKERS):
    engine = FakeEngine()
    async with serve(engine, sampling_defaults=defaults) as served:
        answer = await served.post(path, {"model": "fake"} | fields)
    assert answer.status_code == 200, answer.text
    return engine.accepted[0].params


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT),
])  # fmt: skip
async def test_a_requests_own_fields_beat_them(serve, path, fields):
    params = await asked(serve, path, fields)
    assert {name: getattr(params, name) for name in SAMPLING} == {name: getattr(MAKERS, name) for name in SAMPLING}
    own = {
        "temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0}  # fmt: skip
    params = await asked(serve, path, fields | own)
    assert {name: getattr(params, name) for name in SAMPLING} == own | {"top_k": None}
    null = await asked(serve, path, fields | dict.fromkeys(own))
    assert null.temperature == 0.6


async def test_lengths(serve):
    chat, completion = "/v1/chat/completions", {"prompt": "hi"}
    assert (await asked(serve, chat, CHAT)).max_tokens == 50
    assert (await asked(serve, chat, CHAT | {"max_tokens": 60})).max_tokens == 60
    assert (await asked(serve, chat, CHAT | {"max_completion_tokens": 9})).max_tokens == 9
    assert (await asked(serve, "/v1/completions", completion)).max_tokens == 16
    beyond = await asked(serve, chat, CHAT, SamplingDefaults(max_tokens=10_000))
    assert beyond.max_tokens == (await asked(serve, chat, CHAT, NO_DEFAULTS)).max_tokens  # what is left of the context
    bound = SamplingDefaults(max_tokens=10, max_tokens_bound=10)
    assert (await asked(serve, chat, CHAT | {"max_tokens": 60}, bound)).max_tokens == 10
    assert (await asked(serve, chat, CHAT | {"max_tokens": 6}, bound)).max_tokens == 6
    assert (await asked(serve, "/v1/completions", completion, bound)).max_tokens == 10


async def test_a_batchs_check_knows_them(tmp_path, tokenizer_dir):
    body = {"model": "fake", **CHAT}
    content = jsonl(line("a") | {"url": "/v1/chat/completions", "body": body})
    for defaults, longest in ((MAKERS, 50), (NO_DEFAULTS, None)):
        verdict, bad, _ = await check(
            tmp_path, tokenizer_dir, content, "/v1/chat/completions", sampling_defaults=defaults)
        assert bad == []
        assert longest is None or verdict.max_output_tokens == longest
