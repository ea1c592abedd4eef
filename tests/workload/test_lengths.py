"""Length distributions have the statistics that they are published with."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.lengths import (
    LENGTHS,
    Lengths,
    QuantileCurve,
    TokenHistogram,
    published_lengths,
    scaled,
    through,
)
from jettison.workload.rows import MAX_TOKENS

# (mean, P50, P80, P95, P99) of input and output: KunServe v1, Table 2.
KUNSERVE_V1 = {
    "burstgpt": ((603, 400, 1146, 1804, 2009), (289, 249, 462, 715, 1161)),
    "azure-conv": ((1013, 998, 1159, 4080, 4096), (247, 202, 411, 451, 585)),
    "agieval": ((237, 128, 556, 619, 651), (390, 363, 450, 578, 698)),
}
MEANS = {
    "burstgpt": (603, 289), "burstgpt-v3": (642, 262), "azure-conv": (1013, 247), "azure-conv-2023": (1154.7, 211.1),
    "azure-code-2023": (2047.8, 27.9), "agieval": (237, 390), "sharegpt": (1660, 373), "longbench": (5900, 499),
    "lmsys": (69.8, 215.7), "wildchat": (295.6, 441.3), "lmsys-x10": (698, 2157), "wildchat-x10": (2956, 4413),
}  # fmt: skip
CAPS = {"sharegpt": 4096, "longbench": 16384, "azure-conv": 4096}


def draw(name: str, count: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    return published_lengths(name).draw(np.random.default_rng(1), np.random.default_rng(2), count)


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    ties = np.random.default_rng(3).random((2, len(one))) * 1e-3
    ranks = np.argsort(np.argsort(np.stack([one, other]) + ties, axis=1), axis=1)
    return float(np.corrcoef(ranks)[0, 1])


def test_every_set_is_checked_here() -> None:
    assert set(MEANS) == set(LENGTHS)


@pytest.mark.parametrize("name", LENGTHS)
def test_means_are_the_published_ones(name: str) -> None:
    inputs, outputs = draw(name)
    assert inputs.mean() == pytest.approx(MEANS[name][0], rel=0.02)
    assert outputs.mean() == pytest.approx(MEANS[name][1], rel=0.02)
    assert min(inputs.min(), outputs.min()) >= 1
    assert inputs.max() <= CAPS.get(name, np.inf)


@pytest.mark.parametrize("name", KUNSERVE_V1)
def test_percentiles_are_the_published_ones(name: str) -> None:
    for values, published in zip(draw(name), KUNSERVE_V1[name], strict=True):
        found = (values.mean(), *np.percentile(values, (50, 80, 95, 99)))
        assert found == pytest.approx(published, rel=0.015)


@pytest.mark.parametrize("name", LENGTHS)
def test_ranks_are_joined_as_said(name: str) -> None:
    assert spearman(*draw(name, 50_000)) == pytest.approx(LENGTHS[name].rank_correlation, abs=0.02)


def test_real_rows_agree_with_their_sets(data_dir) -> None:
    from jettison.workload.traces import read_trace

    for name, file in (("azure-conv-2023", "conv"), ("azure-code-2023", "code")):
        real = read_trace(data_dir / "arrivals" / f"AzureLLMInferenceTrace_{file}.csv.gz").columns
        inputs, outputs = draw(name)
        for mine, theirs in ((inputs, real.input_tokens), (outputs, real.output_tokens)):
            shares = (10, 25, 50, 75, 90, 95, 99)
            assert np.percentile(mine, shares) == pytest.approx(np.percentile(theirs, shares), rel=0.03, abs=1.0)


def test_draws_are_functions_of_their_seeds() -> None:
    assert all((one == other).all() for one, other in zip(draw("longbench", 100), draw("longbench", 100), strict=True))


POINTS = st.lists(st.integers(1, 5000), min_size=2, max_size=6).map(
    lambda tokens: tuple(zip(np.linspace(0, 1, len(tokens)).tolist(), map(float, sorted(tokens)), strict=True))
)


@given(points=POINTS, lean=st.floats(0.05, 0.95))
def test_a_curve_passes_through_its_points_and_has_its_mean(points, lean: float) -> None:
    low = sum((b[0] - a[0]) * a[1] for a, b in pairwise(points))
    high = sum((b[0] - a[0]) * b[1] for a, b in pairwise(points))
    assume(high - low > 1)
    curve = through(points, low + lean * (high - low))
    shares = np.array([share for share, _ in points])
    assert curve.at(shares) == pytest.approx([tokens for _, tokens in points])
    assert curve.mean == pytest.approx(low + lean * (high - low), rel=2e-3)
    grid = curve.at(np.linspace(0, 1, 200))
    assert (np.diff(grid) >= -1e-9).all()


@given(points=POINTS, part=st.floats(0.05, 0.9), cap=st.floats(100, 10_000))
def test_a_stretched_curve_has_its_mean_below_its_cap(points, part: float, cap: float) -> None:
    mean = 1 + part * (cap - 1)
    curve = scaled(points, mean, cap)
    assert curve.mean == pytest.approx(mean, rel=5e-3, abs=0.01)
    assert curve.at(np.array([1.0])) <= cap


def test_impossible_curves_are_refused() -> None:
    with pytest.raises(ValueError, match="does not go with"):
        through(((0.0, 1.0), (0.5, 10.0), (1.0, 20.0)), 18.0)
    with pytest.raises(ValueError, match="between 1 and the cap"):
        scaled(((0.0, 1.0), (1.0, 2.0)), 50.0, cap=40.0)
    with pytest.raises(ValueError, match="rise from 0 to 1"):
        QuantileCurve(((0.0, 1.0), (0.9, 2.0)))
    with pytest.raises(ConfigError, match="known: burstgpt"):
        published_lengths("gpt")


def test_log_normal_lengths_have_a_cap_that_a_column_holds() -> None:
    with pytest.raises(ConfigError, match="a cap of 2147483648 tokens, at most 2147483647"):
        Lengths(100.0, 0.5, MAX_TOKENS + 1)
    drawn = Lengths(1e9, 10.0, MAX_TOKENS).draw(np.random.default_rng(0), 10_000)
    assert drawn.min() >= 1 and drawn.max() == MAX_TOKENS


def test_histograms_draw_their_probabilities() -> None:
    histogram = TokenHistogram(np.array([5, 7, 100], dtype=np.int32), np.array([0.5, 0.0, 0.5]))
    drawn = histogram.draw(np.random.default_rng(0), 10_000)
    assert set(drawn.tolist()) == {5, 100}
    assert (drawn == 5).mean() == pytest.approx(0.5, abs=0.02)
