"""Folders of Hugging Face's hub cache, by every name that leads to one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jettison.config import EngineConfig
from jettison.config.hubcache import download_hint, model_folder, model_name
from jettison.device.model.hf_config import read_config
from jettison.errors import ConfigError, ModelError

HASH, OTHER = "0" * 39 + "a", "0" * 39 + "b"


@pytest.fixture
def repository(tmp_path):
    """A downloaded revision, as the cache lays it out: files are links into ``blobs``."""
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    snapshot = folder / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(HASH)
    (folder / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    return folder


@pytest.mark.parametrize("end", ["", "/", "//", "/."])
@pytest.mark.parametrize("part", ["snapshots/" + HASH, "snapshots", ""])
def test_a_snapshot_is_called_as_its_model_is(repository, part, end):
    config = EngineConfig.resolve(model=str(repository / part) + end)
    assert config.model.served_model_name == "Qwen/Qwen3-0.6B"
    assert os.path.samefile(config.model.model, repository / "snapshots" / HASH)
    assert EngineConfig.resolve(**config.flat()) == config


def test_links_lead_to_the_same_name(repository, tmp_path):
    (tmp_path / "current").symlink_to(repository / "snapshots" / HASH)
    (tmp_path / "cache").symlink_to(repository.parent)
    assert model_name(str(tmp_path / "current")) == "Qwen/Qwen3-0.6B"
    assert model_name(str(tmp_path / "cache" / repository.name / "snapshots" / HASH)) == "Qwen/Qwen3-0.6B"


def test_from_inside_a_snapshot(repository, monkeypatch):
    monkeypatch.chdir(repository / "snapshots" / HASH)
    assert model_name(".") == model_name("./") == "Qwen/Qwen3-0.6B"


def test_other_folders_keep_their_names(repository, tmp_path):
    assert model_name(str(tmp_path / "tiny")) == model_name(str(tmp_path / "tiny/")) == "tiny"
    assert model_name(str(tmp_path / "snapshots" / HASH)) == HASH
    assert model_folder(str(tmp_path / "tiny")) == str(tmp_path / "tiny")
    (tmp_path / "link").symlink_to(tmp_path / "tiny")
    assert model_name(str(tmp_path / "link")) == "link"
    chosen = EngineConfig.resolve(model=str(repository), served_model_name="mine")
    assert chosen.model.served_model_name == "mine"


def test_a_model_without_an_organization(tmp_path):
    (tmp_path / "models--gpt2" / "snapshots" / HASH).mkdir(parents=True)
    assert model_name(str(tmp_path / "models--gpt2" / "snapshots" / HASH)) == "gpt2"


def test_of_several_snapshots_the_main_one(repository):
    (repository / "snapshots" / OTHER).mkdir()
    assert model_folder(str(repository)).endswith(HASH)
    (repository / "refs" / "main").write_text(OTHER + "\n")
    assert model_folder(str(repository)).endswith(OTHER)
    (repository / "refs" / "main").unlink()
    told = "2 snapshots, and refs/main names none of them; name the folder of one, or its --revision"
    with pytest.raises(ConfigError, match=told):
        EngineConfig.resolve(model=str(repository))


def test_a_repository_without_a_snapshot(repository):
    (repository / "snapshots" / HASH / "config.json").unlink()
    (repository / "snapshots" / HASH).rmdir()
    with pytest.raises(ConfigError, match="no snapshot"):
        model_folder(str(repository))


def test_a_folder_that_is_only_called_so_is_a_model(tmp_path):
    folder = tmp_path / "models--a--b"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert model_folder(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("named", "repo"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("hf:/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("https:/hf.co/gpt2", "gpt2"),
    ],
)  # fmt: skip
def test_a_name_of_the_hub_gets_a_hint(named, repo, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert f"cache {tmp_path}: after `hf download {repo}` the same command" in download_hint(named)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"no such folder; name a Hugging Face model folder.*hf download {repo}`"):
        read_config(Path(named))


VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """No cache is named, and the user's own is empty."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_name_is_found_in_the_cache_that_a_variable_names(variable, repository, tmp_path, no_cache, monkeypatch):
    below = {"HF_HOME": "", "XDG_CACHE_HOME": ""}.get(variable, "hub")
    if variable == "XDG_CACHE_HOME":
        (tmp_path / "huggingface").symlink_to(tmp_path)
    assert model_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    monkeypatch.setenv(variable, str(tmp_path / below))
    for begin, end in (("", ""), ("", "/"), ("hf:/", ""), ("https://huggingface.co/", "")):
        named = f"{begin}Qwen/Qwen3-0.6B{end}"
        config = EngineConfig.resolve(model=named)
        assert os.path.samefile(config.model.model, repository / "snapshots" / HASH)
        assert config.model.served_model_name == "Qwen/Qwen3-0.6B"
        assert EngineConfig.resolve(**config.flat()) == config


def test_a_folder_here_goes_before_the_cache(repository, tmp_path, no_cache):
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert model_folder("Qwen/Qwen3-0.6B", None, str(tmp_path / "hub")) == "Qwen/Qwen3-0.6B"


def test_a_cache_that_is_named_goes_before_the_variables(repository, tmp_path, no_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    config = EngineConfig.resolve(model="Qwen/Qwen3-0.6B", download_dir=str(tmp_path / "hub"))
    assert os.path.samefile(config.model.model, repository / "snapshots" / HASH)


def test_a_revision_is_a_branch_a_tag_or_a_commit(repository, tmp_path, no_cache):
    (repository / "snapshots" / OTHER).mkdir()
    (repository / "refs" / "pr").mkdir()
    (repository / "refs" / "pr" / "7").write_text(OTHER)
    cache = str(tmp_path / "hub")
    for revision in (OTHER, "pr/7"):
        assert model_folder("Qwen/Qwen3-0.6B", revision, cache).endswith(OTHER)
        assert model_folder(str(repository), revision).endswith(OTHER)
    assert model_folder("Qwen/Qwen3-0.6B", "main", cache).endswith(HASH)
    for unknown in ("v2", "../../blobs/1", "0" * 39, "\0"):  # the last but one begins two commits
        told = r"has no revision .*; `hf download Qwen/Qwen3-0.6B --revision .*` gets it"
        with pytest.raises(ConfigError, match=told):
            model_folder("Qwen/Qwen3-0.6B", unknown, cache)


def test_a_tokenizer_is_found_as_a_model_is(repository, tmp_path, no_cache):
    (repository / "snapshots" / OTHER).mkdir()
    cache, snapshots = str(tmp_path / "hub"), repository / "snapshots"
    for told, folder in (
        ({"tokenizer": "Qwen/Qwen3-0.6B"}, HASH),
        ({"tokenizer": "Qwen/Qwen3-0.6B", "tokenizer_revision": OTHER}, OTHER),
        ({"model": "Qwen/Qwen3-0.6B", "tokenizer_revision": OTHER}, OTHER),
    ):
        config = EngineConfig.resolve(**({"model": "tiny", "download_dir": cache} | told))
        assert os.path.samefile(config.model.tokenizer_dir, snapshots / folder)
        assert EngineConfig.resolve(**config.flat()) == config
    for told in ({}, {"tokenizer": "Qwen/Qwen3-0.6B"}, {"tokenizer_revision": OTHER}):
        config = EngineConfig.resolve(model="Qwen/Qwen3-0.6B", download_dir=cache, revision=OTHER, **told)
        assert config.model.tokenizer is None and config.model.tokenizer_dir == config.model.model
        assert os.path.samefile(config.model.model, snapshots / OTHER)


def test_a_gguf_file_gets_the_command_that_makes_a_folder_of_it(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"not a folder.*`jettison model import .*/model.gguf DIR` makes one"):
        read_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("named", ["./Qwen/Qwen3", "/Qwen/Qwen3", "../a/b", "a/b/c", "."])
def test_a_path_gets_none(named):
    assert download_hint(named) == ""


def test_one_word_gets_the_names_that_can_be_fetched():
    assert download_hint("smollm3") == " (names to fetch: smollm2, smollm2-q4; of the hub: ORG/NAME)"
