"""The simulator's seam: decisions are imported with the core, never copied beside it (design.md, rule 3).

Read from the source (what ``sim`` may import, call and define), and shown at run time: the decisions of a simulated
cluster are the core's own functions, and between two events nothing of the core's state changes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import jettison.core.ports as core_ports
from jettison.core.cluster import ClusterCore

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import Watched, make_setup

ROOMS = ("sim", "simulate", "papers")

FROM_CORE = {
    "jettison.core.ports": None,
    "jettison.core.params": {"ClusterParams"},
    "jettison.core.configured": {"scheduler_limits", "cluster_params"},
    "jettison.core.ladder.lists": {"overload_name"},
    "jettison.core.observing": None,
    "jettison.core.serving.group": {"SchedulerLimits"},
    "jettison.core.cluster": {"ClusterCore"},
    "jettison.core.founding": {"initial_groups", "first_drop"},
    "jettison.core.driving.fastforward": None,
    "jettison.core.load.bubbles": {"BubbleMeter"},
    "jettison.core.controlstream": None,
    "jettison.core.totals": {"counters"},
}
"""What the simulator may know of the core: its door, its parameters, its meters, a worker's control stream. None:
everything in it."""

ASKED_OF_CORE = {
    "handle", "request_drop", "request_restore", "request_sleep", "request_wake", "request_migration",
    "request_migrations", "check", "is_idle", "max_request_blocks", "why_refuse", "table", "values", "get", "attach",
    "skip_ticks",
}  # fmt: skip
"""Methods of the core that the simulator calls: events in (``skip_ticks``: several at once, refused where one could
decide something), actions out, and questions that change nothing."""

DECIDING_NAMES = ("plan_", "choose_", "should_", "decide_", "assess_", "by_freeness", "by_requests")
"""Beginnings of names, after underscores."""

CORE_CLASSES = {"ClusterCore", "Group", "Queues", "GroupBlocks", "Ladder", "StepPlanner"}
"""No class of the simulator builds on these."""

WITHOUT_CLUSTER = {"papers.placements", "papers.printed"}
"""No cluster is simulated there: the policies themselves, and MELL's Fig. 10 as it is printed, place the same sizes."""

DECIDES_NOTHING = {"_plan_cost", "_choose_for_fillers", "_choose_for_middle", "_choose_for_large"}
"""Named so all the same: what strategies that no run has would cost, or would do, for figures of v1 and of MELL."""

CHANGING = {
    "append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "discard", "clear", "add",
    "update", "setdefault", "sort", "reverse", "allocate", "release", "place", "admit", "preempt", "evict",
}  # fmt: skip
"""Methods that change what they are called of, wherever it lies inside of the core."""

ACTIONS = {
    "RunStep", "AbandonStep", "OfferLayout", "ApplyLayout", "SendKV", "SendShard", "LoadShard", "KeepShard",
    "CancelTransfer", "FenceWorker", "AskInstance", "ReleaseInstance", "EmitTokens", "Emit", "Record",
}  # fmt: skip


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript | ast.Call):
        return dotted(node.value if isinstance(node, ast.Subscript) else node.func)
    return ""


def of_core(name: str) -> bool:
    """Whether a chain of names goes through a core: ``self.core.state.workers``, ``core.groups``."""
    return "core" in name.split(".")


class Scope(NamedTuple):
    """Names of one module that stand for something of the core."""

    actions: set[str]
    """Imported action types, by what they are called here."""
    ports: set[str]
    """``jettison.core.ports`` as a whole."""


def scope_of(tree: ast.Module) -> Scope:
    scope = Scope(set(), {"ports"})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                local = alias.asname or alias.name
                if node.module == "jettison.core.ports" and alias.name in ACTIONS:
                    scope.actions.add(local)
                if node.module == "jettison.core" and alias.name == "ports":
                    scope.ports.add(local)
    return scope


def part_of_core(node: ast.AST, aliases: set[str]) -> bool:
    """Whether an expression is something inside of a core: a chain of names and items, or what a question answers with
    (``core.state.requests.get(...)``), not what an event does."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "values", "items")):
                return False
            node = node.func
        if isinstance(node, ast.Attribute) and node.attr == "core":
            return True
        node = node.value
    return isinstance(node, ast.Name) and (node.id == "core" or node.id in aliases)


def named_in(target: ast.AST) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def bound_in(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Targets with what they are bound to; a tuple's parts one by one where both sides are tuples."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            yield from zip(names, values, strict=True)
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign(value=ast.AST()) | ast.NamedExpr():
            yield node.target, node.value  # type: ignore[misc]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield node.target, node.iter


def aliases_in(function: ast.AST) -> set[str]:
    """Local names for parts of the core, and names for parts of those."""
    aliases: set[str] = set()
    while True:
        found = {
            name
            for node in ast.walk(function) for target, value in bound_in(node) if part_of_core(value, aliases)
            for name in named_in(target)
        }  # fmt: skip
        if found <= aliases:
            return aliases
        aliases |= found


def imports_of(node: ast.ImportFrom | ast.Import) -> Iterator[str]:
    """What is wrong with an import."""
    if isinstance(node, ast.Import):
        yield from (f"imports {a.name}" for a in node.names if a.name.startswith(("jettison.core", "jettison.policy")))
        return
    module, names = node.module or "", {alias.name for alias in node.names}
    if module.startswith("jettison.policy"):
        yield f"imports {module}: a decision, or on the way to one"
    elif module == "jettison.core" or (module.startswith("jettison.core.") and module not in FROM_CORE):
        if not (module == "jettison.core" and names <= {"ports"}):
            yield f"imports {module}"
    elif (allowed := FROM_CORE.get(module)) is not None and not names <= allowed:
        yield f"imports {sorted(names - allowed)} of {module}"


def calls_of(node: ast.Call, scope: Scope) -> Iterator[str]:
    """What is wrong with a call."""
    name = dotted(node.func)
    head, _, rest = name.partition(".")
    if name in scope.actions or (head in scope.ports and rest.split(".")[0] in ACTIONS):
        yield f"makes an action: {name}()"
    if of_core(name) and name.split(".")[-1] not in ASKED_OF_CORE and not name.endswith(".core"):
        yield f"calls {name}()"
    if name in ("setattr", "object.__setattr__") and of_core(dotted(node.args[0])):
        yield "sets an attribute of the core"


def changes_by_alias(function: ast.AST) -> Iterator[tuple[int, str]]:
    """What a function does to parts of the core by other names for them."""
    aliases = aliases_in(function)

    def is_part(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute | ast.Subscript) and part_of_core(node.value, aliases)

    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]:
                if is_part(target) and not (isinstance(target, ast.Attribute) and target.attr == "core"):
                    yield node.lineno, f"changes {dotted(target)}, which is the core's"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_part(node.func):
            if node.func.attr in CHANGING:
                yield node.lineno, f"calls {dotted(node.func)}() of the core's"
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "object.__setattr__"):
            if part_of_core(node.args[0], aliases):
                yield node.lineno, f"sets an attribute of {dotted(node.args[0])}, which is the core's"


def complaints(tree: ast.Module) -> Iterator[tuple[int, str]]:
    scope = scope_of(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom() | ast.Import():
                yield from ((node.lineno, what) for what in imports_of(node))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name.lstrip("_").startswith(DECIDING_NAMES) and node.name not in DECIDES_NOTHING:
                    yield node.lineno, f"defines {node.name}()"
                yield from changes_by_alias(node)
            case ast.ClassDef():
                for base in node.bases:
                    if dotted(base).split(".")[-1] in CORE_CLASSES:
                        yield node.lineno, f"{node.name} is a {dotted(base)}"
            case ast.Call():
                yield from ((node.lineno, what) for what in calls_of(node, scope))
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Delete():
                targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
                for target in targets:
                    name = dotted(target)
                    if of_core(name) and not name.endswith(".core") and name != "core":
                        yield node.lineno, f"changes {name}"


def test_the_simulator_holds_no_decision(sources):  # type: ignore[no-untyped-def]
    found = [
        f"{module.at(line)}: {what}"
        for module in sources if module.room in ROOMS and module.name not in WITHOUT_CLUSTER
        for line, what in complaints(module.tree)
    ]
    assert any(module.room == "sim" for module in sources)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("snippet", [
    "from jettison.policy.dispatch import choose_group",
    "from jettison.policy import merge",
    "import jettison.policy.batching",
    "from jettison.core.moving.merging import Merging",
    "from jettison.core.serving.group import Group",
    "from jettison.core import state",
    "from jettison.core import ports\nports.RunStep(1, 2, 3, (), ())",
    "from jettison.core import ports as p\np.RunStep(1, 2, 3, (), ())",
    "from jettison.core.ports import RunStep\nRunStep(1, 2, 3, (), ())",
    "from jettison.core.ports import SendKV as Send\nSend(1)",
    "def choose_worker(loads): return min(loads)",
    "def _choose_worker(loads): return min(loads)",
    "class A:\n    def __plan_drop(self): pass",
    "async def plan_drop(): pass",
    "class A:\n    def f(self):\n        state = self.core.state\n        state.next_step_id += 1",
    "class A:\n    def f(self):\n        core = self.core\n        core.params = 1",
    "def f(cluster):\n    state = cluster.core.state\n    groups = state.groups\n    groups[0].queues.waiting.pop()",
    "def f(cluster):\n    groups, n = cluster.core.groups, 1\n    del groups[n]",
    "def f(cluster):\n    for g in cluster.core.groups.values():\n        g.paused = True",
    "def f(cluster):\n    if r := cluster.core.state.requests.get(1):\n        r.phase = 2",
    "def f(cluster):\n    waiting = cluster.core.groups[0].queues.waiting\n    waiting.clear()",
    "def f(cluster):\n    g = cluster.core.groups[0]\n    setattr(g, 'paused', True)",
    "class Better(ClusterCore): pass",
    "class A:\n    def f(self):\n        self.core.state.next_step_id += 1",
    "class A:\n    def f(self):\n        self.core.groups[0].queues.waiting.popleft()",
    "class A:\n    def f(self):\n        self.core.dispatcher.place(1)",
    "del core.state.requests['a']",
    "setattr(self.core, 'params', 1)",
])  # fmt: skip
def test_the_rule_bites(snippet: str) -> None:
    assert list(complaints(ast.parse(snippet)))


@pytest.mark.parametrize("snippet", [
    "from jettison.core import ports\nports.StepCompleted(1, [], {}, 2)",
    "class A:\n    def f(self):\n        self.core = ClusterCore()\n        self.core.handle(1, 2)",
    "x = sum(g.blocks.num_used for g in core.groups.values())",
    "from jettison.core.ports import StepRow\nStepRow(1, 2)",
    "def f(cluster):\n    g = cluster.core.groups[0]\n    self.seen[g.name] = g.used",
    "def f(cluster):\n    own = list(cluster.core.groups[0].queues.running)\n    own.pop()",
    "def f(cluster):\n    actions = cluster.core.handle(1, 2)\n    actions.pop()",
    "def planned(x): return x",
])  # fmt: skip
def test_the_rule_does_not_bite_the_innocent(snippet: str) -> None:
    assert not list(complaints(ast.parse(snippet)))


def test_every_action_is_known_to_the_rule() -> None:
    assert {kind.__name__ for kind in core_ports.Action.__args__} == ACTIONS


# --- at run time -------------------------------------------------------------------------------------------------


def fingerprint(core: ClusterCore) -> object:
    """Everything that an event may change in a core's books."""
    state = core.state
    return (
        [
            (g.group_id, g.epoch, g.stages, sorted(g.paused), [s.request_id for s in g.queues.waiting],
             list(g.queues.running), list(g.queues.moving), list(g.in_flight), g.version, repr(g.counters))
            for g in core.groups.values()
        ],
        [
            (r, s.phase, s.num_computed, s.num_pending, s.num_tokens, sorted(s.transfers), s.paused, s.remote)
            for r, s in state.requests.items()
        ],
        [(w.worker_id, w.ledger.version, w.ledger.capacity, sorted(w.unfilled), w.layout) for w in
         state.workers.values()],
        repr(state.counters), sorted(state.book.transfers), sorted(state.unplaced), core.num_issued,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["drop", "swap", "migrate"])
def test_only_events_change_the_core(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fast-forwards are told of between events, through ``core.driving.fastforward``; what they do to books is its own
    # test.
    watched = Watched(make_setup(policy, compress=False), checks=False)
    core, handle = watched.cluster.core, watched.cluster.core.handle
    last = [fingerprint(core)]

    def spied(event, now_ns):  # type: ignore[no-untyped-def]
        assert fingerprint(core) == last[0], f"something has changed before {event} at {now_ns}"
        actions = handle(event, now_ns)
        last[0] = fingerprint(core)
        return actions

    monkeypatch.setattr(core, "handle", spied)
    watched.load(1, num_requests=60)
    watched.cluster.run()
    watched.expect_all_served()


def decisions_of_core() -> Iterator[tuple[ModuleType, str, Callable[..., object]]]:
    """Functions of ``jettison.policy`` that modules of the core have imported."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("jettison.core."):
            for attribute, value in sorted(vars(module).items()):
                if callable(value) and getattr(value, "__module__", "").startswith("jettison.policy."):
                    if attribute.startswith(DECIDING_NAMES):
                        yield module, attribute, value


@pytest.mark.parametrize(("policy", "expected"), [
    ("drop", {"plan_batch", "by_freeness", "plan_drop", "choose_exchange",
              "plan_splits", "plan_microbatches"}),
    ("swap", {"plan_batch", "by_freeness", "choose_swap_outs", "choose_swap_ins"}),
    ("migrate", {"plan_batch", "by_freeness", "plan_pairs", "choose_request"}),
])  # fmt: skip
def test_a_simulated_cluster_asks_the_core_s_own_decisions(
    policy: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()

    def counted(name: str, decide: Callable[..., object]) -> Callable[..., object]:
        def ask(*args: object, **kwargs: object) -> object:
            asked.add(name)
            return decide(*args, **kwargs)

        return ask

    for module, name, decide in list(decisions_of_core()):
        monkeypatch.setattr(module, name, counted(name, decide))
    setup = make_setup(policy)
    order = counted("by_freeness", setup.params.dispatch)  # that it has been configured with
    watched = Watched(replace(setup, params=replace(setup.params, dispatch=order)), checks=False)
    watched.load(1, num_requests=80, mean_output=80)
    watched.cluster.run()
    assert expected <= asked
