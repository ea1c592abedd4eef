"""A server of one's own: what is raised where it does not come up."""

from __future__ import annotations

from pathlib import Path

import pytest

from jettison.errors import JettisonError, UserError
from jettison.live.server_process import ServerProcess

pytestmark = pytest.mark.live


@pytest.mark.parametrize("flags", [{}, {"memory": "lots"}])
def test_what_a_person_can_mend_is_the_server_s_own_line(flags: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ServerProcess(tmp_path / "none", flags, tmp_path / "log").start()
    line = str(caught.value)
    assert line.startswith("the server did not come up: ") and "\n" not in line and "jettison: " not in line
    assert ("--memory" if flags else str(tmp_path / "none")) in line


def test_of_any_other_end_the_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.live.server_process.sys.executable", "/bin/false")
    with pytest.raises(JettisonError, match=r"exit code 1") as caught:
        ServerProcess(tmp_path / "none", {}, tmp_path / "log").start()
    assert not isinstance(caught.value, UserError)
