"""A real profile of a tiny model, through the command line, and an engine that finds it again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from jettison.cli.main import main
from jettison.config import EngineConfig
from jettison.core.cluster import ClusterParams
from jettison.cost.boundaries import measured_tokens
from jettison.cost.model import ChunkShape
from jettison.cost.recorded import RecordedStep
from jettison.cost.shapes import ShapeKind
from jettison.cost.stepwork import StepWork
from jettison.device.model.create import create_model
from jettison.errors import ConfigError, ModelError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.profile import measure, serving_probe
from jettison.live.profile.command import document, panels, profile_command, tables
from jettison.live.profile.link_probe import measure_link
from jettison.live.profile.measure import ATTENTION_FREE, FULL_MODEL, NO_PREFIX, ProfileResult, run_profile
from jettison.live.profile.serving_probe import measure_serving
from jettison.profiles import default_path, fingerprint, load_profile, read_profile, save_profile
from jettison.report.cost_report import draw_predictions, render_cost_page

FLAGS = {
    "memory": "64MiB", "num_threads": 1, "dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 32,
    "exchange_piece_bytes": 1 << 16,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _few_rounds() -> Iterator[None]:
    """No test looks at how well it measures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "MAX_ROUNDS", measure.MIN_ROUNDS)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "model"
    create_model(folder, arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, max_position_embeddings=256)
    return folder


def config_of(model_dir: Path, **flags: object) -> EngineConfig:
    return EngineConfig.resolve(model=str(model_dir), **FLAGS | flags)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result(model_dir: Path) -> ProfileResult:
    steps: list[tuple[float, str]] = []
    result = run_profile(
        config_of(model_dir), quick=True, budget_s=0.1, progress=lambda share, text: steps.append((share, text))
    )
    assert [share for share, _ in steps] == sorted(share for share, _ in steps)
    assert steps[-1][0] <= 1.0
    return result


def test_every_shape_ran_and_everything_is_predicted(result: ProfileResult) -> None:
    assert all(len(m.seconds) >= 3 and min(m.seconds) > 0 for m in result.measured)
    assert {m.kind for m in result.measured if m.is_held_out} == set(ShapeKind)
    assert any(not m.is_held_out for m in result.measured)
    for model in result.models.values():
        for m in result.measured:
            predicted = model.step_cost_s(m.shape)
            assert math.isfinite(predicted)
            assert predicted > 0.0
    assert list(result.models) == [FULL_MODEL, ATTENTION_FREE, NO_PREFIX]


def test_speeds_and_batches_were_measured(result: ProfileResult) -> None:
    profile = result.stored.profile
    assert profile.link_latency_s > 0
    assert profile.hop_s is not None and 0.0 < profile.hop_s < 1.0
    assert profile.contention == 1.0 and profile.contention_instances == 1, "there is but one instance"
    assert (profile.beside_bytes_per_s is None) == (profile.beside_byte_s is None), "None on a machine too busy for it"
    assert profile.remap_fixed_s + profile.remap_s_per_byte > 0
    assert {(p.batch_size, p.num_tokens) for p in profile.prefill_points} == {(4, 0), (4, 16), (16, 0), (16, 16)}
    assert measured_tokens(profile.prefill_points, 4, math.inf) == 16
    assert profile.link_beside_byte_s is not None
    assert {point.num_stages for point in profile.batch_points} == {1, 2}
    assert profile.batch_limit(2) in {point.batch_size for point in profile.batch_points}
    assert result.stored.fingerprint.dtype == "float32"


def test_the_report_holds_what_was_measured(result: ProfileResult) -> None:
    shown = tables(result)
    errors = shown["Error on held-out shapes"]
    assert errors[1][:2] == ["all", str(len(result.held_out()))]
    assert all(len({len(row) for row in rows}) == 1 for rows in shown.values())
    written = json.loads(json.dumps(document(result)))
    assert len(written["shapes"]) == len(result.measured)
    assert written["errors"][FULL_MODEL]["all"]["num_samples"] == len(result.held_out())
    page = render_cost_page("<model>", shown, draw_predictions(panels(result)))
    assert "&lt;model&gt;" in page
    assert "data:image/svg+xml;base64," in page


def test_the_command_writes_what_serving_finds(model_dir: Path, tmp_path: Path, capsys) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    page, figures = tmp_path / "p.html", tmp_path / "p.json"
    assert main(["profile", str(model_dir), "--quick", "--html", str(page), "--json", str(figures), *flags]) == 0
    shown = capsys.readouterr().out
    assert "attention-free" in shown
    (path,) = model_dir.glob("jettison-profile-*.json")
    assert path.name in shown.replace("\n", "")
    assert ET.fromstring(path.with_suffix(".svg").read_bytes()).tag.endswith("svg")
    assert page.exists()
    assert json.loads(figures.read_text())["num_rounds"] >= 3

    async def start(**flags: object) -> tuple[ClusterParams, float | None, float | None]:
        engine = Engine(config_of(model_dir, **flags))
        try:
            await engine.start()
            predict_s = engine.core.state.predictor.predict_s
            return engine.core.params, predict_s(StepWork.decodes(4, 0)), predict_s(StepWork.decodes(4, 10_000))
        finally:
            await engine.close()

    params, *predicted = asyncio.run(start())
    profile = read_profile(path).profile
    assert params.profile == profile
    expected = [profile.cost.batch_cost_s([ChunkShape(kv, 1)] * 4) for kv in (0, 2_500)]
    assert predicted == pytest.approx(expected), "the first steps hide nothing"
    params, few, many = asyncio.run(start(profile="none"))
    assert params.profile is None and few is not None and many is not None


def test_one_layer_and_a_torch_kernel_can_be_profiled(tmp_path: Path) -> None:
    create_model(
        tmp_path / "one", arch="llama", layers=1, hidden=32, heads=2, kv_heads=1, max_position_embeddings=64, tied=True
    )
    config = config_of(tmp_path / "one", kernels="torch", dtype="bfloat16", max_num_seqs=4)
    result = run_profile(config, quick=True, budget_s=0.05)
    assert result.stored.fingerprint.kernels == "torch"
    assert {point.num_stages for point in result.stored.profile.batch_points} == {1}


def test_a_profile_of_another_setting_is_ignored_with_a_warning(result, model_dir, tmp_path, caplog) -> None:
    mark = result.stored.fingerprint
    path = tmp_path / "p.json"
    save_profile(path, result.stored)
    assert read_profile(path) == result.stored
    assert load_profile(str(path), model_dir, mark) == result.stored.profile
    other = dataclasses.replace(mark, num_threads=7)
    with caplog.at_level(logging.WARNING):
        assert load_profile(str(path), model_dir, other) is None
    assert "num_threads 1 and not 7" in caplog.text
    assert load_profile("none", model_dir, mark) is None
    assert load_profile("auto", tmp_path, mark) is None  # nothing there
    save_profile(default_path(tmp_path, mark), result.stored)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load_profile("auto", tmp_path, other) is None
    assert "is not used" in caplog.text and "num_threads 1 and not 7" in caplog.text


def test_a_damaged_profile_is_an_error_only_where_it_was_named(result, tmp_path, caplog) -> None:
    mark = result.stored.fingerprint
    path = default_path(tmp_path, mark)
    for text in ("{", '{"format": "x"}', "[]"):
        path.write_text(text)
        with caplog.at_level(logging.WARNING):
            assert load_profile("auto", tmp_path, mark) is None
        assert path.name in caplog.text
        with pytest.raises(ConfigError, match=path.name):
            load_profile(str(path), tmp_path, mark)
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_profile(str(tmp_path / "absent.json"), tmp_path, mark)


def test_a_place_that_cannot_be_written_is_named(result, tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot write the profile"):
        save_profile(tmp_path / "absent" / "p.json", result.stored)


def test_the_fingerprint_follows_the_models_sizes(model_dir, tmp_path) -> None:
    mark = fingerprint(model_dir, "float32", 1, "torch")
    assert mark == fingerprint(model_dir, "float32", 1, "torch")
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path, "float32", 1, "torch").differences(mark)
    with pytest.raises(ModelError, match=r"config\.json"):
        fingerprint(tmp_path / "absent", "float32", 1, "torch")


def test_the_core_gets_no_profile_unless_one_is_given(model_dir) -> None:
    assembly = assemble(config_of(model_dir))
    assert assembly.build_core({0: 8}, b"secret").params.profile is None


def test_where_no_profile_could_be_kept_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("a minute is lost")

    monkeypatch.setattr("jettison.live.profile.command.run_profile", measured)
    config = EngineConfig.resolve(model="/proc/self")  # a folder that takes no file, of root's neither
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another place with --out"):
        profile_command(config, out=None, json_out=None, html_out=None, quick=True, seed=0)


def test_a_link_has_a_speed() -> None:
    speed = measure_link(1 << 14, rounds=2)
    assert speed.latency_s > 0
    assert speed.bytes_per_s > 0


def test_what_serving_adds_is_measured_with_one_instance_and_with_all(
    result: ProfileResult, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, served = result.stored.profile.cost, []

    async def decode(engine: Engine, index: int) -> None:
        served.append(len(engine.core.groups))
        await serving_probe_decode(engine, index)

    serving_probe_decode = serving_probe._decode
    monkeypatch.setattr(serving_probe, "_decode", decode)
    speed = measure_serving(config_of(model_dir, instances=2), cost, rounds=2)
    assert served == [1, 2, 1, 2], "in turn"
    assert 0.0 < speed.hop_s < 1.0 and speed.contention >= 1.0 and speed.num_instances == 2


@pytest.mark.parametrize(("factor", "contention"), [(1.65, 1.5), (0.9, 1.0)])
def test_contention_is_what_steps_take_with_all_over_what_they_take_alone(
    result: ProfileResult, model_dir: Path, monkeypatch: pytest.MonkeyPatch, factor: float, contention: float
) -> None:
    cost = result.stored.profile.cost

    def steps(times: float) -> list[RecordedStep]:
        """Decodes of growing contexts, 0.4 ms after one another."""
        made, at_s = [], 0.0
        for context in range(20, 40):
            step = RecordedStep(0, at_s, 1.0, 8, 8, 8 * context, 8 * context, 4, True, 8)
            made.append(step._replace(seconds=times * step.predicted_s(cost)))
            at_s += made[-1].seconds + 4e-4
        return made

    async def serve(*_: object) -> tuple[list[RecordedStep], list[RecordedStep]]:
        return steps(1.1), steps(factor)

    monkeypatch.setattr(serving_probe, "_serve", serve)
    speed = measure_serving(config_of(model_dir, instances=2), cost, rounds=1)
    assert speed.contention == pytest.approx(contention) and speed.hop_s == pytest.approx(2e-4)
