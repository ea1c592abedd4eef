"""Only a back end's own files see a device's memory as the host's, and only one place asks which back end there is."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

OWN_FILES = (
    "device.backend_host", "device.bytesview", "device.devicebytes_host", "device.hostpool", "device.pages_host",
    "device.rowcopy", "device.runner", "device.sampler", "device.kernels", "device.cuda",
)
"""Of the host's back end, and of a card's."""

HOST_ACCESS = {"numpy", "data_ptr", "untyped_storage", "to_dlpack", "from_dlpack", "frombuffer"}
"""Calls that see a tensor's memory from the host; ``np.frombuffer`` sees bytes."""

NAMED_BY = {"device.backend_host": {"device.choice"}, "device.choice": {"device.worker", "live.engine.assembly"}}
"""Module -> those that may name it."""


def is_in(name, parts):
    return any(f"{name}.".startswith(f"jettison.{part}.") for part in parts)


def host_accesses(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOST_ACCESS:
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "np"):
                yield f"{module.at(node.lineno)}: calls {node.func.attr}()"


def namings(module):
    """Modules of ``NAMED_BY`` that a module names, in an import or in a string, and may not."""
    for node in ast.walk(module.tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            names = [node.value.partition(":")[0]]
        for named, allowed in NAMED_BY.items():
            if f"jettison.{named}" in names and not is_in(module.name, {named, *allowed}):
                yield f"{module.at(node.lineno)}: names {named}"


@pytest.fixture(scope="module")
def others(sources):
    rooms = [module for module in sources if is_in(module.name, ("device", "live"))]
    return [module for module in rooms if not is_in(module.name, OWN_FILES)]


def test_nothing_else_sees_the_memory_of_a_tensor(others):
    complaints = [complaint for module in others for complaint in host_accesses(module)]
    assert not complaints, "\n".join(complaints)


def test_one_place_asks_which_back_end_there_is(sources):
    complaints = [complaint for module in sources for complaint in namings(module)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("statement", "looks"),
    [
        ("tensor.view(-1).numpy()", host_accesses), ("address = slab.data_ptr()", host_accesses),
        ("torch.frombuffer(view)", host_accesses),
        ("from jettison.device.backend_host import HostBackEnd", namings),
        ("from jettison.device import choice", namings),
        ("name = \"jettison.device.backend_host:HostBackEnd\"", namings),
    ],
)  # fmt: skip
def test_the_walk_sees_it(others, statement, looks):
    module = next(module for module in others if module.name == "jettison.device.memory")
    assert list(looks(replace(module, tree=ast.parse(statement))))
    assert not list(looks(replace(module, tree=ast.parse("np.frombuffer(data)\nfrom jettison.device import pages"))))
