"""Parsing, validation and provenance of the configuration."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.config import KEYS, EngineConfig, ServerConfig, format_bytes, parse_bytes
from jettison.config.files import parse_yaml
from jettison.errors import ConfigError


def complaint(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.resolve(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_folder_is_all_that_is_needed():
    config = EngineConfig.resolve(model="models/tiny")
    assert config.model.model == "models/tiny"
    assert config.model.served_model_name == "tiny"
    assert config.instances == 1
    assert set(config.provenance) == set(KEYS)
    assert [key for key, source in config.provenance.items() if source != "default"] == ["model"]


def test_values_reach_their_fields():
    config = EngineConfig.resolve(
        model="m", instances=2, memory="256MiB", page_size="4KiB", overload="recompute", shutdown_timeout="2.5",
        api_key=["a", "b"], max_model_len="auto", max_num_queued_reqs="none", enable_prefix_caching="off",
    )
    assert config.instances == 2
    assert config.memory.memory_bytes == 256 << 20
    assert config.memory.page_bytes == 4096
    assert not config.memory.enable_prefix_caching
    assert config.overload.policy == "recompute"
    assert config.server.shutdown_timeout_s == 2.5
    assert config.server.api_keys == ("a", "b")
    assert config.model.max_model_len is None
    assert config.scheduler.max_num_queued_reqs is None


@pytest.mark.parametrize(
    ("given", "seed"), [({}, 0), ({"seed": 7}, 7), ({"seed": "none"}, None), ({"seed": None}, None)]
)
def test_a_seed_may_be_none(given, seed):
    assert EngineConfig.resolve(model="m", **given).model.seed == seed


def test_flag_beats_environment_beats_file_beats_default():
    file = {"model": "m", "max-num-seqs": 7, "max_model_len": 64, "api_key": "from-file"}
    environ = {"JETTISON_API_KEY": "from-env"}
    config = EngineConfig.resolve(file=file, environ=environ, max_num_seqs=9)
    assert (config.scheduler.max_num_seqs, config.provenance["max_num_seqs"]) == (9, "flag")
    assert (config.model.max_model_len, config.provenance["max_model_len"]) == (64, "file")
    assert (config.server.api_keys, config.provenance["api_key"]) == (("from-env",), "env")
    assert (config.memory.block_size, config.provenance["block_size"]) == (16, "default")
    assert EngineConfig.resolve(file=file, environ=environ, api_key="x").server.api_keys == ("x",)
    assert EngineConfig.resolve(file=file, environ={"JETTISON_API_KEY": ""}).server.api_keys == ("from-file",)


def test_the_environment_of_vllm_keeps_the_server_closed():
    config = EngineConfig.resolve(model="m", environ={"VLLM_API_KEY": "theirs", "JETTISON_API_KEY": ""})
    assert (config.server.api_keys, config.provenance["api_key"]) == (("theirs",), "env")
    both = {"VLLM_API_KEY": "theirs", "JETTISON_API_KEY": "ours"}
    assert EngineConfig.resolve(model="m", environ=both).server.api_keys == ("ours",)
    assert EngineConfig.resolve(model="m", environ=both, api_key="flag").server.api_keys == ("flag",)


def test_what_depends_on_other_keys_is_worked_out():
    assert EngineConfig.resolve(model="m", instances=2, num_cores=7).num_threads == 3
    assert EngineConfig.resolve(model="m", instances=4, num_cores=2).num_threads == 1
    assert EngineConfig.resolve(model="m", num_threads=5, num_cores=2).num_threads == 5
    assert EngineConfig.resolve(model="m", max_num_batched_tokens=32).scheduler.max_num_seqs == 32
    assert EngineConfig.resolve(model="m", max_num_batched_tokens=4096).scheduler.max_num_seqs == 256


@pytest.mark.parametrize(("given", "expected"), [
    ({}, ("freest", True)),
    ({"rebalance": False}, ("freest", False)),
    ({"dispatch": "fewest-requests"}, ("fewest-requests", False)),
    ({"dispatch": "fewest-requests", "rebalance": True}, ("fewest-requests", True)),
    ({"file": {"dispatch": "fewest-requests"}}, ("fewest-requests", False)),
    ({"file": {"dispatch": "fewest-requests", "rebalance": "yes"}}, ("fewest-requests", True)),
])  # fmt: skip
def test_who_counts_requests_rebalances_only_where_that_is_said(given, expected):
    config = EngineConfig.resolve(model="m", **given)
    assert (config.overload.dispatch, config.overload.rebalance) == expected
    assert EngineConfig.resolve(**config.flat()) == config


def test_a_value_survives_the_way_through_json():
    config = EngineConfig.resolve(model="m", memory="3MiB", api_key=["k"], max_num_queued_reqs=None, num_threads=2)
    assert EngineConfig.resolve(**json.loads(json.dumps(config.flat()))) == config


def test_a_resolved_configuration_cannot_be_changed():
    config = EngineConfig.resolve(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.instances = 3
    with pytest.raises(TypeError):
        config.provenance["model"] = "file"


def test_an_api_key_is_not_printed():
    assert "secret" not in repr(EngineConfig.resolve(model="m", api_key="secret"))
    assert "host" in repr(ServerConfig())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["no model folder"]),
        ({"model": ""}, ["--model", "not empty"]),
        ({"model": "m", "memroy": "1GiB"}, ["unknown key 'memroy'", "did you mean 'memory'"]),
        ({"model": "m", "file": {"blocksize": 1}}, ["configuration file", "'blocksize'", "'block_size'"]),
        ({"model": "m", "file": {3: 1}}, ["unknown key 3"]),
        ({"model": "m", "file": {"block-size": 1, "block_size": 2}}, ["'block_size'", "twice"]),
        ({"model": "m", "file": {"port": "http"}}, ["configuration file: port", "65535", "'http'"]),
        ({"model": "m", "memory": "1 banana"}, ["--memory", "256MiB", "banana"]),
        ({"model": "m", "memory": "1KiB"}, ["--memory", "at least 64KiB"]),
        ({"model": "m", "memory": True}, ["--memory", "True"]),
        ({"model": "m", "memory": "-5"}, ["--memory"]),
        ({"model": "m", "memory": "1MiB", "page_size": "2MiB"}, ["--memory 1MiB", "--page-size 2MiB"]),
        ({"model": "m", "page_size": 5000}, ["--page-size", "multiple of 4KiB"]),
        ({"model": "m", "page_size": 12288}, ["--page-size", "power of two"]),
        ({"model": "m", "page_size": 1024}, ["--page-size", "4KiB"]),
        ({"model": "m", "dtype": "float46"}, ["--dtype", "did you mean 'float64'"]),
        ({"model": "m", "overload": "pray"}, ["--overload", "drop, recompute, swap, migrate or pipeline", "'pray'"]),
        ({"model": "m", "launcher": "slurm"}, ["--launcher", "must be local or ray", "'slurm'"]),
        ({"model": "m", "ray_address": "h:6379"}, ["--ray-address is for --launcher ray"]),
        ({"model": "m", "ray_placement": "spread"}, ["--ray-placement is for --launcher ray"]),
        ({"model": "m", "lease": 3.0}, ["--lease is for --launcher ray"]),
        ({"model": "m", "launcher": "ray", "lease": 0.1}, ["--lease", ">= 0.5"]),
        ({"model": "m", "launcher": "ray", "ray_address": "127.0.0.1"}, ["--ray-address needs HOST:PORT", "0.1'"]),
        ({"model": "m", "launcher": "ray", "ray_address": "h:66000"}, ["--ray-address needs HOST:PORT"]),
        ({"model": "m", "launcher": "ray", "ray_address": "ray://h:1"}, ["--ray-address needs HOST:PORT"]),
        ({"model": "m", "otlp_traces_endpoint": "foo"}, ["--otlp-traces-endpoint needs http://HOST:PORT", "'foo'"]),
        ({"model": "m", "file": {"launcher": "slurm"}}, ["configuration file: launcher", "must be local or ray"]),
        ({"model": "m", "instances": 0}, ["--instances", "0"]),
        ({"model": "m", "instances": None}, ["--instances", "None"]),
        ({"model": "m", "instances": "two"}, ["--instances", "'two'"]),
        ({"model": "m", "instances": 1.5}, ["--instances", "1.5"]),
        ({"model": "m", "restore_threshold": "nan"}, ["--restore-threshold", "0 to 1"]),
        ({"model": "m", "restore_threshold": 1.5}, ["--restore-threshold", "0 to 1"]),
        ({"model": "m", "admission_watermark": "lots"}, ["--admission-watermark"]),
        ({"model": "m", "checkpoint_free": 1.01}, ["--checkpoint-free", "0 to 1"]),
        ({"model": "m", "checkpoint_free": -0.1}, ["--checkpoint-free", "0 to 1"]),
        ({"model": "m", "price_batch_token": -0.1}, ["--price-batch-token", ">= 0"]),
        ({"model": "m", "price_device_second": "much"}, ["--price-device-second"]),
        ({"model": "m", "batch_floor": -1}, ["--batch-floor", ">= 0"]),
        ({"model": "m", "fill_after_eviction": 2}, ["--fill-after-eviction", "true or false"]),
        ({"model": "m", "enable_prefix_caching": 2}, ["--enable-prefix-caching", "true or false"]),
        ({"model": "m", "api_key": [""]}, ["--api-key"]),
        ({"model": "m", "api_key": "clé"}, ["--api-key", "ASCII"]),
        ({"model": "m", "api_key": 7}, ["--api-key"]),
        ({"model": "m", "max_num_seqs": 600, "max_num_batched_tokens": 512},
         ["--max-num-seqs 600", "--max-num-batched-tokens 512"]),
        ({"model": "m", "environ": {"JETTISON_API_KEY": " x"}}, ["JETTISON_API_KEY"]),
        ({"model": "m", "structured_outputs_config": {"backend": 1}}, ["--structured-outputs-config", "not backend"]),
        ({"model": "m", "structured_outputs_config": '{"disable_any_whitespace": 3}'}, ["true or false"]),
        ({"model": "m", "environ": {"VLLM_API_KEY": " x"}}, ["VLLM_API_KEY"]),
    ],
)
def test_a_wrong_value_is_named(arguments, words):
    message = complaint(**arguments)
    assert all(word in message for word in words), message


def test_a_missing_model_can_be_let_through():
    assert EngineConfig.resolve(needs_model=False, port=1).model.model == ""


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("17", 17), ("1 KiB", 1024), ("1.5GiB", 3 << 29), ("2mb", 2_000_000), ("3TiB", 3 << 40), (9, 9),
     ("4.1GB", 4_100_000_000), ("8.2 GB", 8_200_000_000)],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_a_mapping_of_a_file_may_bring_another_and_say_some_of_it_anew():
    text = "a: &a {one: 1, two: 1}\nb: {inner: &b {<<: *a, two: 2, three: 2}}\nc: {<<: [*b, *a], three: 3}"
    told = parse_yaml(text, "FILE")
    assert told["b"]["inner"] == {"one": 1, "two": 2, "three": 2} and told["c"] == {"one": 1, "two": 2, "three": 3}
    for twice in ("{one: 1, one: 2}", "{<<: *a, two: 2, two: 3}", "{1: 1, 1: 2}"):
        with pytest.raises(ConfigError, match=r"^FILE, line 2: key '?(one|two|1)'? is given twice"):
            parse_yaml(f"a: &a {{one: 1}}\nb: {twice}", "FILE")


@pytest.mark.parametrize("text", ["", "MiB", "1.0001KiB", "1 GiBs", "0x10", "1e3", None, 1.5, "-1", "1,5GiB"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="needs a size"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_reads_back(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text(), max_size=2)


@given(name=st.sampled_from(sorted(KEYS)), value=VALUES)
def test_any_value_is_either_taken_or_refused_by_name(name, value):
    try:
        config = EngineConfig.resolve(**{"model": "m", name: value})
    except ConfigError as error:
        refused = str(error)
    else:
        refused = None
        assert EngineConfig.resolve(**config.flat()) == config
    assert refused is None or KEYS[name].flag in refused


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_key_explains_itself_and_shows_a_default_that_reads_back(key):
    assert key.text.endswith(".") or key.text.endswith(")."), key.text
    assert key.metavar
    if key.name != "model" and not key.is_repeatable:
        assert key.parse(key.show(key.default)) == key.default


def test_how_many_are_awake():
    assert EngineConfig.resolve(model="m").sleep.min_awake == 2
    few = EngineConfig.resolve(model="m", instances=4, max_awake=1).sleep
    assert (few.min_awake, few.max_awake) == (1, 1)
    with pytest.raises(ConfigError, match="--min-awake 3 is above --max-awake 2"):
        EngineConfig.resolve(model="m", instances=4, min_awake=3, max_awake=2)


def test_how_many_have_a_process():
    fixed = EngineConfig.resolve(model="m", instances=3)
    assert (fixed.scale.min_instances, fixed.scale.max_instances, fixed.most_instances) == (None, None, 3)
    assert fixed.sleep.mode == "never"
    grows = EngineConfig.resolve(model="m", instances=2, max_instances=3, num_cores=6)
    assert (grows.instances, grows.scale.min_instances, grows.most_instances, grows.num_threads) == (2, 2, 3, 2)
    assert (grows.sleep.mode, grows.sleep.min_awake) == ("auto", 2)
    assert EngineConfig.resolve(model="m", min_instances=2, max_instances=4).instances == 2
    shrinks = EngineConfig.resolve(model="m", instances=4, min_instances=1, min_awake=2)
    assert (shrinks.most_instances, shrinks.sleep.min_awake) == (4, 2)
    assert "--min-awake 2 keeps more instances than --min-instances 1" in str(shrinks.scale.why_more_stay(2))
    least = EngineConfig.resolve(model="m", instances=1, min_instances=1, max_instances=3)
    assert least.sleep.min_awake == 1 and least.scale.why_more_stay(1) is fixed.scale.why_more_stay(2) is None
    assert EngineConfig.resolve(**grows.flat()) == grows
    same = EngineConfig.resolve(model="m", instances=2, min_instances=2, max_instances=2, sleep="never")
    assert same.sleep.mode == "never", "none comes or goes"


@pytest.mark.parametrize(
    ("given", "told"),
    [({"min_instances": 3, "max_instances": 2}, "--min-instances 3 is above --max-instances 2"),
     ({"instances": 4, "max_instances": 3}, "--instances 4 is above --max-instances 3"),
     ({"instances": 1, "min_instances": 2}, "--instances 1 is below --min-instances 2"),
     ({"instances": 2, "max_instances": 4, "overload": "pipeline"}, "--overload pipeline keeps its instances in pairs"),
     ({"instances": 2, "max_instances": 3, "sleep": "never"}, "--sleep never lets no instance be given back")],
)
def test_numbers_of_instances_that_contradict_each_other(given, told):
    with pytest.raises(ConfigError, match=told) as refused:
        EngineConfig.resolve(model="m", **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "is_told"),
    [({}, True), ({"min_awake": 3}, True), ({"min_awake": 1}, False), ({"instances": 3}, False),
     ({"sleep": "never"}, False)],
)
def test_who_asks_for_sleep_is_told_that_all_are_to_stay_awake(given, is_told):
    config = EngineConfig.resolve(model="m", **{"instances": 2, "sleep": "auto"} | given)
    assert (config.sleep.why_none_sleeps(config.instances) is not None) == is_told


def test_an_admin_key_is_shown_to_nobody():
    config = EngineConfig.resolve(model="m", admin_key=["secret-one"])
    assert config.server.admin_keys == ("secret-one",) and "secret-one" not in repr(config)
