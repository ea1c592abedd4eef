"""What fits a reader's head: no class over 40 methods, no function over 8 parameters, no dataclass over 20 fields.

Settings are records of what a user may set, and have as many fields as there are settings. The command line has one
parameter for each flag, a kernel one for each array. What else is larger is named here, and the lists only get shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

MOST_METHODS, MOST_PARAMETERS, MOST_FIELDS = 40, 8, 20

FLAGS_AND_ARRAYS = ("cli.", "device.cuda.", "device.kernels.")
"""Beginnings of modules with one parameter for each flag, or for each array of a kernel."""

AT_WORK = ("device.", "live.", "cli.", "simulate.")
"""Rooms whose larger things become smaller on other branches: the list may name one that is gone."""

SETTINGS = {
    "config.engine.EngineConfig", "config.sections.OverloadConfig", "core.params.ClusterParams",
    "server.settings.ServerSettings",
    "server.llm_types.SamplingParams", "simulate.workload_spec.WorkloadSpec", "workload.options.BenchOptions",
    "workload.client.ReplayOptions", "workload.options.SynthOptions",
}

LARGER = {
    "core.counters.ClusterCounters": "one field for each metric",
    "core.state.ClusterState": "all that the core knows, which every module of it reads",
    "device.model.create.create_model": "parameters",
    "device.worker.DeviceWorker.__init__": "parameters",
    "live.experiments.overload.run_policy": "parameters",
    "live.worker.loop.WorkerLoop.__init__": "parameters",
    "live.worker.peers.Peers.__init__": "parameters",
    "live.worker.remote_attention.PeerAttention.__init__": "parameters",
    "report.results.build_run": "parameters",
    "sim.setup.setup_from_profile": "parameters",
    "simulate.sizing_command.size_command": "parameters: flags of a command",
}
"""What is larger, and in what."""


def too_large(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(name, why) of what is too large in a class, a function or a module."""
    for node in ast.iter_child_nodes(tree):
        is_named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        inner = f"{name}.{node.name}" if is_named else name
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > MOST_METHODS:
                yield inner, f"{len(methods)} methods"
            is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            fields = [
                each for each in node.body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each)
            ]
            if is_dataclass and len(fields) > MOST_FIELDS:
                yield inner, f"{len(fields)} fields"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            num = sum(argument.arg not in ("self", "cls") for argument in arguments)
            if num > MOST_PARAMETERS:
                yield inner, f"{num} parameters"
        yield from too_large(node, inner)


def test_nothing_is_too_large(sources):
    found = {
        name.removeprefix("jettison."): why for module in sources for name, why in too_large(module.tree, module.name)
    }
    known = LARGER.keys() | SETTINGS
    new = {name: why for name, why in found.items() if name not in known and not name.startswith(FLAGS_AND_ARRAYS)}
    assert not new
    gone = {name for name in known - found.keys() if not name.startswith(AT_WORK)}
    assert not gone, "what is no longer too large leaves the list"


def test_the_rule_bites():
    parameters = ", ".join(f"a{i}" for i in range(9))
    fields = "\n".join(f"    a{i}: int" for i in range(21))
    methods = "\n".join(f"    def f{i}(self): ..." for i in range(41))
    for text in (f"def f({parameters}): ...", f"@dataclass\nclass A:\n{fields}", f"class A:\n{methods}"):
        assert len(list(too_large(ast.parse(text), "m"))) == 1
