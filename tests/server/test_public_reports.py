"""Reports of other servers, sent again to this one: see ``public_reports``."""

from __future__ import annotations

import pytest
from public_reports import PAGE, REPORTS, Bench, Report, page_with, table


@pytest.mark.parametrize("told", REPORTS, ids=lambda one: one.name)
async def test_what_others_met(told: Report, serve, tokenizer_of, caplog) -> None:
    await told.run(Bench(serve, tokenizer_of, caplog))


def test_the_page_has_them_all() -> None:
    """``python tests/server/public_reports.py --write`` writes it anew."""
    assert len(REPORTS) >= 30
    assert len({one.name for one in REPORTS}) == len(REPORTS)
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(table(), page) == page
