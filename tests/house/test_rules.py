"""House rules that a reader cannot check by eye, each a function from a syntax tree to complaints.

Every rule is also shown a snippet that breaks it and one that does not, so that none can go blind.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest

from jettison.core.ladder.lists import BASELINES
from jettison.core.ladder.rung import _RUNGS
from jettison.policy.dispatch import ORDERS
from jettison.policy.merge import MergeStrategy
from jettison.policy.order import SchedulingPolicy

PURE_ROOMS = ("policy", "core", "memory", "cost", "sim", "types", "errors")

Complaints = Iterator[tuple[int, str]]


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func)):
            yield name, node


def no_world(tree: ast.Module) -> Complaints:
    """Time is an argument, and so is everything else from outside: no clock, event loop, thread, file or log."""
    banned_modules = {
        "time", "datetime", "asyncio", "threading", "multiprocessing", "concurrent", "socket", "select", "signal",
        "subprocess", "logging", "warnings", "os", "io", "pathlib", "tempfile", "shutil", "uuid", "secrets", "sys",
        "importlib", "zmq", "rich",
    }  # fmt: skip
    for name, line in _imports(tree):
        if name.partition(".")[0] in banned_modules:
            yield line, f"imports {name}"
    for name, call in _calls(tree):
        if name in ("open", "print", "input", "breakpoint"):
            yield call.lineno, f"calls {name}()"


def no_hidden_randomness(tree: ast.Module) -> Complaints:
    """Draws come from a seed that was passed in; hash() and id() change from process to process."""
    for name, line in _imports(tree):
        if name.startswith("random.") and name != "random.Random":
            yield line, f"imports {name}"
    for name, call in _calls(tree):
        seeded = bool(call.args or call.keywords)
        if re.fullmatch(r"(random|np\.random|numpy\.random)\.\w+", name):
            if name.rpartition(".")[2] not in ("Random", "default_rng", "Generator", "PCG64", "Philox") or not seeded:
                yield call.lineno, f"calls {name}() {'' if seeded else 'without a seed'}".rstrip()
        elif name in ("hash", "id"):
            yield call.lineno, f"calls {name}()"


def no_hidden_counters(tree: ast.Module) -> Complaints:
    """Same seed, same log: nothing in a module or a class counts across engines."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Call):
            if _dotted(statement.value.func) in ("itertools.count", "count"):
                yield statement.lineno, "keeps a counter in a module or class"
    constants = {
        target.id
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, (int, float))
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and constants & set(node.names):
            yield node.lineno, f"counts in the module: global {', '.join(node.names)}"
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            if isinstance(node.target.value, ast.Name) and node.target.value.id in classes | {"cls"}:
                yield node.lineno, f"counts in a class: {_dotted(node.target)}"


def no_globals(tree: ast.Module) -> Complaints:
    """A policy is a function of its arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def nothing_executed(tree: ast.Module) -> Complaints:
    """No pickle on a socket or in a file, and nothing from a folder is run."""
    for name, line in _imports(tree):
        if re.match(r"(pickle|_pickle|cloudpickle|dill|marshal|shelve|joblib)(\.|$)", name):
            yield line, f"imports {name}"
    for name, call in _calls(tree):
        if name in ("eval", "exec", "compile", "__import__"):
            yield call.lineno, f"calls {name}()"
        if name in ("torch.load", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path") or re.search(
            r"\.(send|recv)_pyobj$", name
        ):
            yield call.lineno, f"calls {name}()"
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "yaml.load" and "Loader" not in keywords:
            yield call.lineno, "calls yaml.load() without a safe Loader"
        for danger in ("allow_pickle", "trust_remote_code", "shell"):
            if isinstance(value := keywords.get(danger), ast.Constant) and value.value:
                yield call.lineno, f"passes {danger}=True"


def no_inherited_environment(tree: ast.Module) -> Complaints:
    """A process is told its environment: this one's has secrets."""
    for name, call in _calls(tree):
        if name.endswith(("Popen", "create_subprocess_exec")) and "env" not in {each.arg for each in call.keywords}:
            yield call.lineno, f"calls {name}() without env"


def no_blind_except(tree: ast.Module) -> Complaints:
    """An ``except`` says what it expects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"


def nothing_unfinished(tree: ast.Module) -> Complaints:
    """A stub is not a feature."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _dotted(raised) == "NotImplementedError":
                yield node.lineno, "raises NotImplementedError"


def has_docstring(tree: ast.Module) -> Complaints:
    """A module says what lives in it."""
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"


CALLS = (
    "SendKV", "SendShard", "CancelTransfer", "ApplyLayout", "OfferLayout", "LoadShard", "KeepShard", "FenceWorker",
    "AskInstance", "ReleaseInstance",
)


def begins_no_transfer(tree: ast.Module) -> Complaints:
    """A rung decides and starts mechanisms: it makes no transfer and no call to a worker itself."""
    for name, call in _calls(tree):
        last = name.rpartition(".")[2]
        if last in CALLS:
            yield call.lineno, f"makes a {last}"
        if last in ("send_kv", "open_transfer", "open_call"):
            yield call.lineno, f"calls {last}()"


POLICY_NAMES = {*get_args(SchedulingPolicy), *get_args(MergeStrategy), *ORDERS, *BASELINES, *_RUNGS}


def compares_no_policy_name(tree: ast.Module) -> Complaints:
    """What a policy or a rung is called is known where names are resolved; what it does is asked of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            sides += [item for side in sides if isinstance(side, (ast.Tuple, ast.List, ast.Set)) for item in side.elts]
        else:
            sides = [node.value] if isinstance(node, ast.MatchValue) else []
        for side in sides:
            if isinstance(side, ast.Constant) and side.value in POLICY_NAMES:
                yield side.lineno, f"compares with {side.value!r}"


HELD = {"holds", "ending", "remote"}
"""Of a request: set together, by its own methods."""


def _set_elsewhere(tree: ast.Module, attributes: set[str]) -> Complaints:
    """Assignments to such attributes of anything but ``self``."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in attributes and _dotted(target.value) != "self":
                yield target.lineno, f"sets {_dotted(target)}"


def holds_by_its_methods(tree: ast.Module) -> Complaints:
    """What holds a request is set by the request's own methods, so that the names of its holds stay true."""
    yield from _set_elsewhere(tree, HELD)
    for name, call in _calls(tree):
        if re.search(r"(state|request)\.transfers\.(add|discard|remove|clear|pop|update)$", name):
            yield call.lineno, f"calls {name}()"


GROUP_HOLDS = {"paused", "holds_preemption", "offline_holders", "landing", "admission_cap", "caps"}
"""What holds a group: ``Group`` and its ``GroupBlocks`` set it, by owner."""
CHANGES = {"add", "discard", "remove", "clear", "pop", "update"}


def groups_are_held_by_owner(tree: ast.Module) -> Complaints:
    """What holds a group is set for an owner, by ``hold``, ``reserve`` or ``cap_admission``: no other can lift it."""
    yield from _set_elsewhere(tree, GROUP_HOLDS)
    for name, call in _calls(tree):
        *holder, what, how = ("", *name.split("."))[-3:]
        if what in GROUP_HOLDS and holder not in ([""], ["self"]) and how in CHANGES:
            yield call.lineno, f"calls {name}()"


EVERYWHERE = (
    nothing_executed, no_inherited_environment, no_blind_except, no_hidden_counters, nothing_unfinished, has_docstring,
)  # fmt: skip
IN_PURE_ROOMS = (no_world, no_hidden_randomness)
IN_POLICY = (no_globals,)
IN_CORE = (compares_no_policy_name, holds_by_its_methods, groups_are_held_by_owner)
IN_RUNGS = (begins_no_transfer,)


@pytest.mark.parametrize(
    "rule", [*EVERYWHERE, *IN_PURE_ROOMS, *IN_POLICY, *IN_CORE, *IN_RUNGS], ids=lambda rule: rule.__name__
)
def test_rule_is_kept(rule, sources):
    complaints = [
        f"{module.at(line)}: {what}"
        for module in sources
        if rule in EVERYWHERE
        or (rule in IN_PURE_ROOMS and module.room in PURE_ROOMS)
        or (rule in IN_POLICY and module.room == "policy")
        or (rule in IN_CORE and module.room == "core")
        or (rule in IN_RUNGS and module.name.startswith("jettison.core.ladder"))
        for line, what in rule(module.tree)
    ]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


BROKEN = [
    (no_world, "import time"),
    (no_world, "from time import monotonic"),
    (no_world, "def f():\n    import asyncio"),
    (no_world, "import datetime"),
    (no_world, "import logging"),
    (no_world, "print(1)"),
    (no_world, "open('x')"),
    (no_hidden_randomness, "import random\nrandom.random()"),
    (no_hidden_randomness, "from random import shuffle"),
    (no_hidden_randomness, "import numpy as np\nnp.random.rand(3)"),
    (no_hidden_randomness, "import numpy as np\nnp.random.default_rng()"),
    (no_hidden_randomness, "hash('a')"),
    (no_hidden_counters, "import itertools\nids = itertools.count()"),
    (no_hidden_counters, "from itertools import count\nclass A:\n    ids = count(1)"),
    (no_hidden_counters, "n = 0\ndef f():\n    global n\n    n += 1"),
    (no_hidden_counters, "class A:\n    n = 0\n    def f(self):\n        A.n += 1"),
    (no_globals, "def f():\n    global x"),
    (compares_no_policy_name, "limits.scheduling_policy == 'priority'"),
    (compares_no_policy_name, "'pipeline' in names"),
    (compares_no_policy_name, "rung.name in ('drop', 'swap')"),
    (compares_no_policy_name, "match name:\n    case 'restore':\n        pass"),
    (groups_are_held_by_owner, "def f(group):\n    group.paused = True"),
    (groups_are_held_by_owner, "def f(group):\n    group.blocks.admission_cap = None"),
    (groups_are_held_by_owner, "class A:\n    def f(self):\n        self.group.queues.offline_holders = False"),
    (groups_are_held_by_owner, "def f(group):\n    group.queues.offline_holders.discard('pause')"),
    (groups_are_held_by_owner, "class A:\n    def f(self):\n        self.group.blocks.caps.pop('restore')"),
    (holds_by_its_methods, "def f(state):\n    state.ending = 1"),
    (holds_by_its_methods, "def f(state):\n    state.holds |= 4"),
    (holds_by_its_methods, "def f(self):\n    self.state.transfers.discard(3)"),
    (begins_no_transfer, "def begin(self):\n    return [SendKV(1, 0, 1)]"),
    (begins_no_transfer, "def begin(self):\n    return [ports.SendShard(1, 0, 1, 'x')]"),
    (begins_no_transfer, "self.means.state.send_kv(state, 0, 1)"),
    (nothing_executed, "import pickle"),
    (nothing_executed, "from pickle import loads"),
    (nothing_executed, "import torch\ntorch.load('x')"),
    (nothing_executed, "eval('1')"),
    (nothing_executed, "exec('1')"),
    (nothing_executed, "socket.recv_pyobj()"),
    (nothing_executed, "np.load('x', allow_pickle=True)"),
    (nothing_executed, "yaml.load(text)"),
    (no_inherited_environment, "subprocess.Popen(['ls'], stdin=None)"),
    (no_inherited_environment, "async def f():\n    await asyncio.create_subprocess_exec('ls')"),
    (no_blind_except, "try:\n    pass\nexcept:\n    pass"),
    (nothing_unfinished, "def f():\n    raise NotImplementedError"),
    (nothing_unfinished, "def f():\n    raise NotImplementedError('later')"),
    (has_docstring, "x = 1"),
]

KEPT = [
    (no_world, "import math\ndef f(now_ns):\n    return math.sqrt(now_ns)"),
    (no_hidden_randomness, "import random\nimport numpy as np\nrandom.Random(3)\nnp.random.default_rng(seed)"),
    (no_hidden_counters, "import itertools\nclass A:\n    def __init__(self):\n        self.ids = itertools.count()"),
    (no_hidden_counters, "class A:\n    def f(self):\n        self.n += 1"),
    (nothing_executed, "import re\nre.compile('x')\nyaml.load(text, Loader=Safe)"),
    (no_inherited_environment, "subprocess.Popen(['ls'], env=child_environment())"),
    (no_blind_except, "try:\n    pass\nexcept ValueError:\n    pass"),
    (compares_no_policy_name, "phase == 'priority queue'\nRecord('drop', now_ns, {})\ncounts_priority(policy)"),
    (groups_are_held_by_owner, "def f(group):\n    group.hold('a', 1)\n    group.blocks.reserve('a', {})"),
    (holds_by_its_methods, "def f(state):\n    state.end_with(1)\n    state.note_transfer_ended(3)"),
    (begins_no_transfer, "def begin(self):\n    return self.means.hosted.send(budget)"),
    (has_docstring, '"""What lives here."""'),
]


@pytest.mark.parametrize(("rule", "snippet"), BROKEN)
def test_rule_bites(rule, snippet):
    assert list(rule(ast.parse(snippet)))


@pytest.mark.parametrize(("rule", "snippet"), KEPT)
def test_rule_does_not_bite_the_innocent(rule, snippet):
    assert not list(rule(ast.parse(snippet)))


def test_public_names_of_the_package_are_few():
    """What ``import jettison`` offers is a promise; the rooms are reached by their own names."""
    script = "import jettison; print(*sorted(name for name in vars(jettison) if not name.startswith('_')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == []


def test_the_tree_names_no_machine_and_no_registry(root):
    """The tree builds anywhere: no folder of one machine, no package host."""
    words = ["/wo" + "rk/", "/tmp/" + "env", "py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org"]
    folders = ["src", "tests", "examples", "docs", "benchmarks", "deploy", ".ci"]
    suffixes = {".py", ".md", ".toml", ".c", ".h", ".yaml", ".yml", ".json", ".html", ".js", ".css", ".sh", ""}
    caches = {"__pycache__", ".hypothesis"}
    files = [path for folder in folders for path in (root / folder).rglob("*") if not caches & set(path.parts)]
    files += [path for path in root.iterdir() if path.suffix in (".md", ".toml", ".py") or path.name == "Makefile"]
    texts = {path: path.read_bytes() for path in files if path.is_file() and path.suffix in suffixes}
    found = [
        f"{path.relative_to(root)}: {word}" for path, text in texts.items() for word in words if word.encode() in text
    ]
    assert texts
    assert not found, "\n".join(found)
