"""Which cards are seen, which instance gets which, and its memory there: without a card, and without a driver."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jettison.config import EngineConfig, cards, devices
from jettison.config.cards import Card, CardMemory, check_cards, missing_software, visible_cards
from jettison.errors import BudgetError, ConfigError

GIB = 1 << 30
TWO = [Card("GPU-aaaa-1", "NVIDIA H200"), Card("GPU-bbbb-2", "NVIDIA H200")]


class FakeNvml:
    def __init__(self, found: list[Card], total_bytes: int = 140 * GIB, used_bytes: int = GIB) -> None:
        self._found, self._memory = found, CardMemory(total_bytes, used_bytes)

    def cards(self):
        return list(self._found)

    def memory(self, uuid):
        return self._memory


@pytest.fixture
def plug(monkeypatch):
    """Plug cards into this machine; ``None``: there is no driver."""

    def put(found: list[Card] | None, **memory) -> None:
        nvml = None if found is None else FakeNvml(found, **memory)
        monkeypatch.setattr(cards, "_nvml", lambda: nvml)
        monkeypatch.setattr(devices, "missing_software", lambda: None)

    monkeypatch.delenv(cards.VISIBLE, raising=False)
    return put


def resolve(**flags) -> EngineConfig:
    return EngineConfig.resolve(model="m", look_for_cards=visible_cards, **flags)


@pytest.mark.parametrize(("told", "seen"), [
    (None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1,0", [1, 0]), (" 1 , 0 ", [1, 0]), ("0,7,1", [0]),
    ("GPU-bbbb", [1]), ("GPU-bbbb-2,0", [1, 0]), ("GPU-", []), ("0,0", [0]), ("NoDevFiles", []),
])  # fmt: skip
def test_cards_are_those_that_cuda_would_show(plug, told, seen):
    plug(TWO)
    assert visible_cards({} if told is None else {cards.VISIBLE: told}) == [TWO[i] for i in seen]


def test_a_part_of_a_card_is_named_by_its_own_id(plug):
    plug(TWO)
    assert [card.uuid for card in visible_cards({cards.VISIBLE: "MIG-77,0"})] == ["MIG-77", "GPU-aaaa-1"]


def test_without_nvml_the_kernel_s_files_tell(plug, tmp_path):
    plug(None)
    assert visible_cards({}, tmp_path) == []
    for bus, card in enumerate(TWO):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {card.name}\nIRQ:   \t 1\nGPU UUID: \t {card.uuid}\n")
    assert visible_cards({}, tmp_path) == TWO


def test_this_machine_is_looked_at_without_an_error():
    assert isinstance(visible_cards(), list)
    assert missing_software() is None or "\n" not in str(missing_software())


@pytest.mark.parametrize(("files", "words"), [
    (None, "PyTorch is not installed"), (["__init__.py"], "PyTorch is built without CUDA"),
    (["__init__.py", "lib/libtorch_cuda.so"], "triton and cuda-bindings not installed"),
])  # fmt: skip
def test_a_torch_without_cuda_is_told_by_its_files(tmp_path, monkeypatch, files, words):
    for name in files or ():
        path = tmp_path / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise ImportError")
    origin = tmp_path / "torch" / "__init__.py"

    def find_spec(name):
        return SimpleNamespace(origin=str(origin)) if name == "torch" and files else None

    monkeypatch.setattr(cards.util, "find_spec", find_spec)
    assert str(missing_software()).startswith(words)


@pytest.mark.parametrize(("found", "environ", "missing", "words"), [
    (None, {}, None, ["no NVIDIA driver"]), ([], {}, None, ["no NVIDIA driver"]),
    (TWO, {cards.VISIBLE: ""}, None, [cards.VISIBLE, "none of the 2"]),
    (TWO, {}, "triton not installed: pip install 'jettison[cuda]'", ["--device cuda", "triton", "jettison[cuda]"]),
])  # fmt: skip
def test_what_is_missing_is_said_in_one_line(plug, monkeypatch, found, environ, missing, words):
    plug(found)
    monkeypatch.setattr(cards, "missing_software", lambda: missing)
    with pytest.raises(ConfigError) as caught:
        check_cards(visible_cards(environ), environ)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_auto_takes_cards_where_they_are_seen_and_usable(plug, monkeypatch):
    plug(None)
    assert resolve().devices == devices.DeviceConfig("cpu", ())
    plug(TWO)
    assert resolve().devices == devices.DeviceConfig("cuda", (0,))
    assert resolve(device="cpu").devices.kind == "cpu"
    assert {resolve(**{key: value}).devices.kind for key, value in (
        ("dtype", "float64"), ("kernels", "native"), ("kernels", "torch"))} == {"cpu"}
    assert {resolve(dtype=dtype).devices.kind for dtype in ("auto", "bfloat16", "float32")} == {"cuda"}
    assert EngineConfig.resolve(model="m").devices.kind == "cpu", "cards are looked for where a caller asks for it"
    monkeypatch.setattr(devices, "missing_software", lambda: "triton not installed")
    assert resolve().devices.kind == "cpu"


@pytest.mark.parametrize(("flags", "expected"), [
    ({"instances": 3}, (0, 1, 0)), ({"instances": 4, "cards": "0,0,1,1"}, (0, 0, 1, 1)),
    ({"instances": 1, "cards": "1"}, (1,)), ({"instances": 2, "cards": ["1,0"]}, (1, 0)),
])  # fmt: skip
def test_instances_take_cards_in_turn_or_as_they_are_told(plug, flags, expected):
    plug(TWO)
    config = resolve(**flags)
    assert config.devices.cards == expected
    assert EngineConfig.resolve(**json.loads(json.dumps(config.flat()))) == config


def test_instances_share_what_the_utilisation_leaves_of_a_card(plug):
    plug(TWO[:1], total_bytes=100 * GIB, used_bytes=10 * GIB)
    whole = resolve(instances=1)
    assert whole.memory.gpu_memory_utilization == 0.9 and whole.memory.memory_bytes == 79 * GIB
    assert resolve(instances=4).memory.memory_bytes == 19 * GIB, "each has a process of its own"
    assert resolve(instances=2, gpu_memory_utilization=0.5).memory.memory_bytes == 19 * GIB
    own = resolve(instances=2, memory="8GiB")
    assert own.memory.memory_bytes == 8 * GIB and own.memory.gpu_memory_utilization is None
    assert EngineConfig.resolve(**own.flat()) == own and EngineConfig.resolve(**whole.flat()) == whole
    assert whole.shown()["memory"] == 79 * GIB and whole.flat()["memory"] is None


def test_an_instance_s_memory_is_that_of_the_fullest_card(plug):
    plug(TWO, total_bytes=100 * GIB, used_bytes=10 * GIB)
    assert resolve(instances=3).memory.memory_bytes == 39 * GIB
    assert resolve(instances=2).memory.memory_bytes == 79 * GIB


@pytest.mark.parametrize(("flags", "error", "words"), [
    ({"device": "cuda", "memory": "1GiB", "gpu_memory_utilization": 0.5}, ConfigError, ["--memory", "give one"]),
    ({"device": "cpu", "gpu_memory_utilization": 0.5}, ConfigError, ["--gpu-memory-utilization", "--device cuda"]),
    ({"device": "cpu", "cards": "0"}, ConfigError, ["--cards", "--device cuda"]),
    ({"instances": 2, "cards": "0"}, ConfigError, ["--cards names 1 card(s)", "--instances 2"]),
    ({"instances": 2, "cards": "0,2"}, ConfigError, ["--cards names card 2", "2 are visible"]),
    ({"instances": 300}, BudgetError, ["--gpu-memory-utilization 0.9", "NVIDIA H200", "140.0 GiB", "leaves nothing"]),
    ({"gpu_memory_utilization": 1.5}, ConfigError, ["--gpu-memory-utilization", "0.01 to 1"]),
    ({"page_size": "3MiB"}, ConfigError, ["--page-size 3MiB", "2MiB"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(plug, flags, error, words):
    plug(TWO, total_bytes=140 * GIB, used_bytes=20 * GIB)
    with pytest.raises(error) as caught:
        resolve(**flags)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_memory_depends_on_the_device(plug):
    plug(TWO[:1])
    on_card, on_cpu = resolve().memory, resolve(device="cpu").memory
    assert (on_cpu.memory_bytes, on_cpu.page_bytes, on_cpu.host_memory_bytes) == (GIB, 65536, GIB)
    assert on_card.page_bytes is None and on_card.host_memory_bytes == 4 * GIB
    assert resolve(page_size="10MiB").memory.page_bytes == 10 << 20


def test_cuda_may_be_asked_for_where_no_card_is_so_that_a_configuration_can_be_shown(plug):
    plug(None)
    config = resolve(device="cuda", instances=2)
    assert config.devices == devices.DeviceConfig("cuda", ()) and config.shown()["cards"] == ()
