"""The table of models: what it says of an architecture, and that a token or a log-probability that differs shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models import table
from benchmarks.models.switches import switches
from jettison.device.model.hf_config import read_config
from jettison.device.model.samples import SAMPLES, make_sample
from jettison.device.reference import transformers_available
from jettison.live.verify.scenarios import Observed
from jettison.types import TokenLogprobs

SAID = {
    "Llama 2": [],
    "OLMo 2": ["norms after halves alone", "norms of queries and keys, all heads together"],
    "gpt-oss": ["windows in 2 of 4", "sinks", "biases (q, k, v, o)", "angles by yarn", "clamped SwiGLU",
                "experts in 4 of 4 (softmax of the chosen)"],
    "Cohere 2": ["LayerNorm", "attention and MLP side by side", "windows in 3 of 4", "neighbours rotated",
                 "1 of 4 without positions", "scales (logits)", "tied head"],
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_sets_an_architecture_apart_is_what_the_decoder_works_by(name: str, tmp_path: Path) -> None:
    sample = next(sample for sample in SAMPLES if sample.name == name)
    assert switches(read_config(make_sample(sample, tmp_path / "model", 0))) == SAID[name]


class ThreeTokens:
    """Says that token 2 is likeliest, whatever came before."""

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64).repeat(len(token_ids), 1)


def told(error: float = 0.0) -> TokenLogprobs:
    row = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).log_softmax(-1).tolist()
    return TokenLogprobs(2, row[2], 1, ((2, row[2] + error), (0, row[0]), (1, row[1])))


def test_differences_are_counted_up_to_the_first_other_token() -> None:
    requests = [
        Observed([0, 1], [2, 2, 2], logprobs=[told(), told(-1e-3), told()]),
        Observed([0], [2, 1, 1], logprobs=[told(), told(1.0), told(1.0)]),
        Observed([0], [], "ended early"),
    ]
    found = table.compared(requests, ThreeTokens())  # type: ignore[arg-type]
    assert (found["tokens"], found["differ"], found["missing"]) == (5, 1, 1)
    assert found["largest"] == pytest.approx(1e-3)


@pytest.mark.skipif(not transformers_available(), reason="needs transformers")
def test_a_row_has_the_log_probabilities_that_requests_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOVES", {"chunks": "chunked prefill"})
    row = table.row_of(next(sample for sample in SAMPLES if sample.name == "Gemma 2"), 0, 8)
    assert (row["tokens"], row["differ"], row["missing"]) == (64, 0, 0)
    assert 0 < row["largest"] < table.TOLERANCE and 0 < row["stock"] < table.STOCK_TOLERANCE
    assert all(is_met for is_met, _ in table.verdicts([row]))
