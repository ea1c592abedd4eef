"""The specs in the documentation are read, and those that promise to run as they stand name no file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jettison.config.files import parse_yaml
from jettison.cost.presets import cluster_preset
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import cases_of
from jettison.simulate.spec import ExperimentSpec, parse_spec
from jettison.simulate.sweeps import expand_sweep

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"


def section(command: str) -> str:
    """The page from a command's heading to the next, of any level."""
    (found,) = re.findall(rf"^## `jettison {command} .*?$(.*?)(?=^##)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def specs(text: str) -> list[ExperimentSpec]:
    """Every YAML block, read as a spec; a sweep at its first point."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [parse_spec(expand_sweep(parse_yaml(block, "docs"))[0].raw) for block in blocks]


def test_every_block_is_a_spec() -> None:
    assert len(specs(PAGE.read_text())) == 5


@pytest.mark.parametrize("command", ["simulate", "plan", "validate"])
def test_a_spec_of_each_command_needs_no_file(command: str) -> None:
    (spec,) = specs(section(command))
    assert spec.workload.builtin is not None and spec.workload.trace is None
    assert [variant.name for variant in spec.variants] == ["recompute", "drop"]
    if command == "validate":
        assert spec.cluster.is_local and spec.cluster.create is not None
    else:
        assert spec.cluster.preset is not None and cluster_preset(spec.cluster.preset)
    assert (spec.plan.slo_ttft_p99_s is not None) == (command == "plan")


@pytest.mark.parametrize("command", ["simulate", "plan", "validate"])
def test_the_command_is_given_the_file_that_the_text_names(command: str) -> None:
    text = section(command)
    (name,) = re.findall(r"As `(.*?)`", text)
    commands = re.findall(rf"^\$ jettison {command} (\S+)", text, re.MULTILINE)
    assert commands and set(commands) == {name}


def test_the_first_example_drops() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", section("simulate"), re.DOTALL | re.MULTILINE)
    until_a_drop = {"variants": ["drop"], "run": {"until_s": 80}}
    (case,) = cases_of(parse_yaml(block, "docs") | until_a_drop, "docs")
    assert run_cases([case], num_processes=1)[0].events["drops"] >= 1
