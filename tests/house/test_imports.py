"""The house's arrows point one way: who may import whom, and who may import torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

LEVEL = {
    "": 0, "types": 0, "errors": 0, "jsontext": 0, "config": 0,
    "cost": 1, "memory": 1, "policy": 1,
    "core": 2,
    "device": 3, "modelfiles": 3, "transport": 3, "sim": 3, "workload": 3, "report": 3, "profiles": 3,
    "live": 4, "simulate": 4,
    "demo": 5, "server": 5, "cli": 5, "__main__": 5,
    "papers": 6,
}
"""Room -> level. A room imports only from rooms of its own level or a lower one."""

LIVE_LEVEL = {
    "machine": 0, "wire": 0,
    "worker": 1, "host": 1,
    "engine": 2,
    "frontend": 3, "profile": 3, "verify": 3, "experiments": 3,
}
"""Room inside ``live`` -> level. A room imports from itself or from rooms of a lower level: what runs in a worker's
process knows nothing of its controller."""

CORE_LEVEL = {
    "residence": 0, "preemption": 0, "discards": 0, "changes": 1, "params": 0, "controlstream": 0,
    "requests": 1,
    "ports": 2,
    "pending": 3,
    "serving": 4,
    "advice": 5, "counters": 5,
    "state": 6,
    "founding": 7,
    "load": 7,
    "moving": 8,
    "ladder": 9,
    "driving": 10,
    "cluster": 11, "configured": 11,
    "observing": 12, "totals": 12,
}
"""Room or module inside ``core`` -> level, as above: what knows one group knows nothing of the cluster, a mechanism
nothing of the rung that begins it, a rung nothing of what drives all groups."""

INSIDE = {"live": LIVE_LEVEL, "core": CORE_LEVEL}

FORBIDDEN = {
    ("transport", "device"): "links carry bytes and know nothing of tensors",
    ("workload", "device"): "a load generator runs where there is no torch",
    ("report", "device"): "reports are read where there is no torch",
    ("sim", "device"): "the simulator replaces the device",
    ("server", "cli"): "the server is started by the command line, not the other way round",
}
"""Arrows that the levels would allow and the design does not."""

FORBIDDEN_IN_CORE = {
    ("core.moving", "core.ladder"): "mechanisms decide nothing: what they need to know is handed in (core.advice)",
    ("core.moving", "policy"): "mechanisms decide nothing: what they need to know is handed in (core.advice)",
}
"""Arrows between parts of rooms."""

TORCH_FREE_ROOMS = (
    "types", "errors", "config", "cost", "memory", "policy", "core", "sim", "transport", "profiles",
    "modelfiles",
)

COMPUTING = ("device", "demo", "live.profile", "live.verify", "simulate.validate_command")
"""Rooms and modules with a device in their own process: the only ones that load torch, and of ``device`` not all."""


def imported_names(tree: ast.AST, module: str, is_package: bool) -> list[tuple[str, int]]:
    """``(dotted name, line)`` of everything a module imports, inside functions and TYPE_CHECKING too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return names


def room_of(dotted_name: str) -> str | None:
    """The room a dotted name lies in; None outside the package."""
    head, _, rest = dotted_name.partition(".")
    if head == "papers":
        return "papers"
    if head != "jettison":
        return None
    room = rest.partition(".")[0]
    return "" if room == "__version__" else room


def room_inside(outer: str, dotted_name: str) -> str | None:
    """The room inside another that a dotted name lies in; None outside of that other one."""
    parts = dotted_name.split(".")
    return parts[2] if parts[:2] == ["jettison", outer] and len(parts) > 2 else None


live_room_of = partial(room_inside, "live")
core_room_of = partial(room_inside, "core")


def imports_of(module):
    return imported_names(module.tree, module.name, module.path.name == "__init__.py")


def complaints_inside(outer, module, names_imported):
    level = INSIDE[outer]
    own = room_inside(outer, module.name)
    for name, line in names_imported:
        room = room_inside(outer, name)
        if room is None or room == own:
            continue
        if room not in level:
            yield f"{module.at(line)}: {name} is in no known room of {outer}"
        elif own is not None and level[room] >= level[own]:
            yield f"{module.at(line)}: {outer}.{own} imports {name}"


def circles(sources, rooms, room_of):
    """Rooms of ``rooms`` that import each other in a circle, or import one that does, with what they import."""
    arrows = {room: set() for room in rooms}
    for module in sources:
        own = room_of(module.name)
        if own in arrows:
            imported = {room_of(name) for name, _ in imports_of(module)}
            arrows[own] |= (imported & arrows.keys()) - {own}
    while free := [room for room, targets in arrows.items() if not targets]:
        for room in free:
            del arrows[room]
        for targets in arrows.values():
            targets.difference_update(free)
    return arrows


def module_circles(sources):
    """Sets of modules that import each other, directly or by way of others; imports for types count."""
    names = {module.name for module in sources}
    arrows = {}
    for module in sources:
        # ``from package import name``: the module of that name if there is one, else the package's own code.
        imported = {name if name in names else name.rpartition(".")[0] for name, _ in imports_of(module)}
        arrows[module.name] = (imported & names) - {module.name}
    reached = {}
    for name in arrows:
        found, ahead = set(), [name]
        while ahead:
            new = arrows[ahead.pop()] - found
            found |= new
            ahead += new
        reached[name] = found
    return {
        frozenset(other for other in found if name in reached[other])
        for name, found in reached.items() if name in found
    }  # fmt: skip


def is_in(name, part):
    """Whether a dotted name lies in a part of the package."""
    return f"{name}.".startswith(f"jettison.{part}.")


def complaints_about(module, rooms_imported):
    level = LEVEL[module.room]
    for name, line in rooms_imported:
        room = room_of(name)
        for (part, other), why in FORBIDDEN_IN_CORE.items():
            if is_in(module.name, part) and is_in(name, other):
                yield f"{module.at(line)}: {part} imports {name}: {why}"
        if room is None or room == module.room:
            continue
        if room not in LEVEL:
            yield f"{module.at(line)}: {name} is in no known room"
        elif LEVEL[room] > level:
            yield f"{module.at(line)}: {module.room or 'jettison'} (L{level}) imports {name} (L{LEVEL[room]})"
        elif (module.room, room) in FORBIDDEN:
            yield f"{module.at(line)}: {module.room} imports {name}: {FORBIDDEN[module.room, room]}"


def test_every_room_has_a_level(sources):
    assert {module.room for module in sources} <= LEVEL.keys()


def test_arrows_point_one_way(sources):
    complaints = [
        complaint
        for module in sources
        for complaint in complaints_about(module, imports_of(module))
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("rooms", "room"), [(LEVEL, room_of), (LIVE_LEVEL, live_room_of), (CORE_LEVEL, core_room_of)],
    ids=["house", "live", "core"],
)  # fmt: skip
def test_rooms_do_not_import_each_other_in_circles(sources, rooms, room):
    assert not circles(sources, rooms, room)


def test_modules_do_not_import_each_other_in_circles(sources):
    circles_found = module_circles(sources)
    assert not circles_found, "\n".join(" <-> ".join(sorted(circle)) for circle in circles_found)


def test_the_walk_sees_a_circle_of_modules(sources):
    by_name = {module.name: module for module in sources}
    base, layer = by_name["jettison.device.kernels.base"], by_name["jettison.device.kernels.layer"]
    operands = by_name["jettison.device.kernels.operands"]
    for statement in (
        "if TYPE_CHECKING:\n    from jettison.device.kernels.layer import feed_forward",
        "def f():\n    from jettison.device.kernels import layer",
        "import jettison.device.kernels.layer",
    ):
        up = replace(operands, tree=ast.parse(statement))
        expected = {frozenset({base.name, layer.name, operands.name}), frozenset({base.name, layer.name})}
        assert module_circles([base, layer, up]) & expected, statement
    assert not module_circles([base, layer, operands])


@pytest.mark.parametrize("outer", INSIDE)
def test_every_module_inside_lies_in_a_room_and_its_arrows_point_one_way(sources, outer):
    inside = {room_inside(outer, module.name) for module in sources} - {None}
    assert inside == INSIDE[outer].keys()
    complaints = [
        complaint for module in sources for complaint in complaints_inside(outer, module, imports_of(module))
    ]
    assert not complaints, "\n".join(complaints)


def test_only_the_device_imports_torch(sources):
    offenders = [
        f"{module.at(line)}: {name}"
        for module in sources
        if module.room != "device"
        for name, line in imports_of(module)
        if name.partition(".")[0] in ("torch", "triton", "flashinfer", "cuda")
    ]
    assert not offenders, "\n".join(offenders)


def loaded_with(names):
    """Modules in a fresh process that has imported these, and their packages: what is loaded, not what is written, as
    a third party could bring torch in."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert "jettison" in loaded
    return loaded


def test_rooms_without_torch_load_without_torch(sources):
    loaded = loaded_with([module.name for module in sources if module.room in TORCH_FREE_ROOMS])
    assert not loaded & {"torch", "transformers", "safetensors", "fastapi", "matplotlib"}


def test_only_what_computes_loads_torch(sources):
    """A controller, a front end, a parent, a keeper and every command start without: an import takes a second of a
    processor, and 200 MiB."""
    names = [
        module.name for module in sources
        if not any(is_in(module.name, part) for part in COMPUTING) and not module.name.endswith("__main__")
    ]
    assert {"jettison.server.launch", "jettison.server.parent.starter", "jettison.live.host.far_keeper",
            "jettison.live.worker.main", "jettison.cli.main"} <= set(names)  # fmt: skip
    assert not loaded_with(names) & {"torch", "transformers", "triton"}


def test_a_front_end_loads_nothing_that_decides():
    """It has the words of the core, and there are several on a machine. What compiles grammars is a process of its own.
    """
    loaded = loaded_with(["jettison.server.fronts.process"])
    assert "jettison.core.requests" in loaded
    assert not loaded & {"jettison.core.cluster", "jettison.core.serving.group", "jettison.live.engine.engine"}
    assert not loaded & {"llguidance", "rich", "matplotlib"}
    assert not any(is_in(name, part) for name in loaded for part in ("core.ladder", "core.moving", "policy.packing"))


@pytest.mark.parametrize(
    ("statement", "module", "is_package", "expected"),
    [
        ("import jettison.core.group", "jettison.policy.merge", False, "jettison.core.group"),
        ("from ..live.engine import api", "jettison.core.group", False, "jettison.live.engine.api"),
        ("from . import group", "jettison.core", True, "jettison.core.group"),
        ("def f():\n    from jettison.live.engine.api import EngineInfo", "jettison.core.group", False,
         "jettison.live.engine.api.EngineInfo"),
        ("if TYPE_CHECKING:\n    from jettison.device import step", "jettison.core.group", False,
         "jettison.device.step"),
    ],
)
def test_the_walk_sees_an_import(statement, module, is_package, expected):
    assert [name for name, _ in imported_names(ast.parse(statement), module, is_package)] == [expected]


def test_the_walk_sees_an_arrow_that_points_up(sources):
    core = next(module for module in sources if module.room == "core")
    assert list(complaints_about(core, [("jettison.live.engine.api", 1)]))
    assert list(complaints_about(core, [("jettison.nowhere", 1)]))
    assert not list(complaints_about(core, [("jettison.policy.merge", 1), ("jettison.core.ports", 1), ("math", 1)]))


def test_the_walk_sees_an_arrow_that_points_up_inside_live_and_a_circle(sources):
    by_name = {module.name: module for module in sources}
    worker, channel = by_name["jettison.live.worker.loop"], by_name["jettison.live.wire.channel"]
    assert list(complaints_inside("live", worker, [("jettison.live.engine.driver", 1)]))
    assert list(complaints_inside("live", worker, [("jettison.live.nowhere.at_all", 1)]))
    down_or_own = [("jettison.live.wire.codec", 1), ("jettison.live.worker.peers", 1)]
    assert not list(complaints_inside("live", worker, down_or_own))
    up = ast.parse("from jettison.live.worker import loop")
    assert circles([worker, replace(channel, tree=up)], LIVE_LEVEL, live_room_of).keys() == {"worker", "wire"}


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("load.views", "from jettison.core.moving.merging import Merging"),
        ("moving.moves", "from jettison.core.ladder.climb import Ladder"),
        ("serving.group", "if TYPE_CHECKING:\n    from jettison.core.state import ClusterState"),
        ("serving.group", "from jettison.core.ladder import climb"),
        ("state", "def f():\n    from jettison.core import cluster"),
        ("ladder.climb", "from ..driving.dispatching import Dispatcher"),
        ("requests", "from jettison.core.nowhere import at_all"),
    ],
)
def test_the_walk_sees_an_arrow_that_points_up_inside_core(sources, module, statement):
    lower = next(m for m in sources if m.name == f"jettison.core.{module}")
    assert list(complaints_inside("core", lower, imports_of(replace(lower, tree=ast.parse(statement)))))
    assert not list(complaints_inside("core", lower, imports_of(lower)))


def test_the_walk_sees_a_circle_inside_core(sources):
    by_name = {module.name: module for module in sources}
    moves, views = by_name["jettison.core.moving.moves"], by_name["jettison.core.load.views"]
    up = ast.parse("if TYPE_CHECKING:\n    from jettison.core.moving.moves import Moves")
    assert circles([moves, replace(views, tree=up)], CORE_LEVEL, core_room_of).keys() == {"load", "moving"}


@pytest.mark.parametrize("name", ["jettison.policy.merge.plan_drop", "jettison.core.ladder.rung.Rung"])
def test_the_walk_sees_a_mechanism_that_decides(name, sources):
    moving = next(module for module in sources if module.name == "jettison.core.moving.relayout")
    rung = next(module for module in sources if module.name == "jettison.core.ladder.drop")
    assert list(complaints_about(moving, [(name, 1)]))
    assert not list(complaints_about(rung, [(name, 1)]))
    assert not list(complaints_about(moving, [("jettison.memory.kvtransfers.plan_kv_transfers", 1)]))
