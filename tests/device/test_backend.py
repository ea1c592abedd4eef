"""What ``device.backend`` and ``device.devicebytes`` promise, held against every back end: the host's, and a double
whose memory counts as a device's. Its pages, and what kernels compute, have suites of their own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cardbackend import PretendedBackEnd
from device_shards import copy_shard, shard_of
from doubledevice import BYPASSES, DeviceTensor, DoubleBackEnd, HostAccessError, wrapped

from jettison.device.backend_host import HostBackEnd
from jettison.device.beside import open_shared_copy
from jettison.device.bytesview import as_numpy_uint8, as_tensor_uint8
from jettison.device.choice import choose_back_end
from jettison.device.dtypes import name_of
from jettison.device.spec import DeviceSpec
from jettison.device.step import SamplingRow, StepInput
from jettison.device.worker import DeviceWorker, make_device
from jettison.errors import ConfigError, ModelError, NotReadyError, TokensLostError
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

BACK_ENDS = {"host": HostBackEnd, "double": DoubleBackEnd, "card": PretendedBackEnd}
PAGE = 4096
ALL, LOW, HIGH = LayerRange(0, 4), LayerRange(0, 1), LayerRange(1, 4)
NUM_BLOCKS = 72
PROMPTS = {name: random.Random(i).choices(range(256), k=9 + 7 * i) for i, name in enumerate("abc")}


@pytest.fixture(params=BACK_ENDS)
def back_end(request):
    """One of each kind; nothing has gone around its port by the end."""
    BYPASSES.clear()
    yield BACK_ENDS[request.param]()
    assert not BYPASSES


@pytest.fixture
def memory(back_end):
    """uint8 over eight pages, which are scattered."""
    pool = back_end.make_pool(12 * PAGE, PAGE)
    pool.start()
    arena = pool.reserve(8)
    for position in range(8):
        arena.map(position, 11 - position, 1)
    yield arena.tensor()
    pool.close()


@pytest.fixture
def start(back_end, tiny_models):
    """Starts devices of the qwen2 model (four layers), and closes them."""
    workers = []

    def make(**changes) -> DeviceWorker:
        options = {
            "model_dir": tiny_models["qwen2"], "dtype": "float64", "budget_bytes": 4 << 20, "block_size": 4,
            "max_num_tokens": 64, "max_num_seqs": 4, "page_bytes": PAGE, **changes,
        }  # fmt: skip
        workers.append(DeviceWorker(DeviceSpec(**options), back_end))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_bytes_go_in_and_come_out_of_any_part(back_end, memory, dtype):
    size = dtype.itemsize
    part = memory[3 * size : (3 + 2000) * size].view(dtype).view(20, 100)
    before, after = back_end.bytes.read(memory[: 3 * size]).copy(), noise(part.nbytes)
    after.flags.writeable = False
    back_end.bytes.copy_in(after, part)
    assert (back_end.bytes.read(part) == after).all()
    out = np.zeros(part[4:6].nbytes, dtype=np.uint8)
    back_end.bytes.copy_out(part[4:6], out)
    assert (out == after[4 * 100 * size : 6 * 100 * size]).all()
    assert (back_end.bytes.read(memory[: 3 * size]) == before).all()


def test_what_is_filled_on_the_host_is_on_the_device_afterwards(back_end, memory):
    part = memory[8:1608].view(torch.float32)
    with back_end.bytes.writing(part) as filled:
        assert filled.shape == part.shape and filled.dtype == part.dtype
        filled.copy_(torch.arange(400.0))
        as_numpy_uint8(filled)  # it lies on the host
    assert back_end.bytes.read(part).view(np.float32).tolist() == list(range(400))
    with pytest.raises(KeyError), back_end.bytes.writing(part):
        raise KeyError


def test_tensors_are_made_of_bytes_however_they_lie(back_end, memory):
    data = noise(96 + 3)
    for first in (0, 3):  # aligned, and not
        made = back_end.bytes.tensor(data[first : first + 96], torch.float64, (3, 4))
        assert type(made) is type(memory) and made.shape == (3, 4)
        assert (back_end.bytes.read(made) == data[first : first + 96]).all()
    data.flags.writeable = False
    assert back_end.bytes.tensor(data[:96], torch.bfloat16, (2, -1, 3)).shape == (2, 8, 3)
    with pytest.raises(RuntimeError):
        back_end.bytes.tensor(data[:96], torch.float64, (3, 5))


@pytest.mark.parametrize("row_bytes", [64, 24, 7])
def test_rows_are_gathered_and_scattered_in_the_order_asked_for(back_end, memory, row_bytes):
    tables = [memory[i * PAGE : i * PAGE + 20 * row_bytes].view(20, row_bytes) for i in (0, 3, 5)]
    content = [noise(20 * row_bytes, seed).reshape(20, row_bytes) for seed in range(3)]
    for table, rows in zip(tables, content):
        back_end.bytes.copy_in(rows.reshape(-1), table)
    ids = np.array([7, 0, 19], dtype=np.int64)
    out = torch.zeros(9 * row_bytes, dtype=torch.uint8)
    back_end.bytes.gather(tables[1:], ids, out[: 6 * row_bytes])
    assert (out[: 6 * row_bytes].numpy() == np.stack([rows[ids] for rows in content[1:]]).reshape(-1)).all()
    assert not out[6 * row_bytes :].any()
    data = noise(6 * row_bytes, 9)
    data.flags.writeable = False
    back_end.bytes.scatter(tables[:2], ids[::-1].copy(), as_tensor_uint8(data))
    for rows, new in zip(content, data.reshape(2, 3, row_bytes)):
        rows[ids[::-1]] = new
    for table, rows in zip(tables, content):
        assert (back_end.bytes.read(table) == rows.reshape(-1)).all()


# --- kernels, pages, buffers ------------------------------------------------------------------------------------------


def test_unknown_kernels_are_a_configuration_error(back_end):
    with pytest.raises(ConfigError, match="kernels must be"):
        back_end.load_kernels("abacus", "float32")
    kernels = back_end.load_kernels("auto", "float32")
    assert back_end.load_kernels(kernels.name, "float32").name == kernels.name
    assert back_end.kind.resolve_kernels("auto", "float32") == kernels.name
    with pytest.raises(ConfigError, match="kernels must be"):
        back_end.kind.resolve_kernels("abacus", "float32")


def test_a_page_size_that_cannot_be_is_refused(back_end):
    with pytest.raises(ValueError):
        back_end.make_pool(1 << 20, 1000)


def test_blocks_go_to_the_host_and_back_at_once_and_beside_steps(start):
    worker = start(host_bytes=1 << 20)
    unit = worker.kv_block_bytes
    content = noise(len(ALL) * 3 * unit)
    worker.kv_scatter(ALL, [5, 1, 9], content)
    assert worker.copy_to_host(ALL, [5, 1, 9], [2, 0, 4]) == len(content)
    out = np.zeros(len(content), dtype=np.uint8)
    assert worker.kv_gather(ALL, [2, 0, 4], out, from_host=True) == len(content) and (out == content).all()
    work = worker.copy_beside(ALL, [20, 21, 22], [2, 0, 4], to_host=False)
    assert work.copied_bytes == 0 and not work.is_complete
    work.run(most_bytes=1)
    assert 0 < work.copied_bytes < len(content)
    work.stop()
    work.run()
    assert not work.is_complete, "it was stopped"
    rest = worker.copy_beside(ALL, [20, 21, 22], [2, 0, 4], to_host=False, skip_bytes=work.copied_bytes)
    thread = threading.Thread(target=rest.run)
    thread.start()
    thread.join()
    assert rest.is_complete
    assert worker.kv_gather(ALL, [20, 21, 22], out) == len(content) and (out == content).all()
    for blocks, slots in (([worker.capacity_blocks], [0]), ([0], [worker.num_host_slots])):
        with pytest.raises(IndexError):
            worker.copy_to_host(ALL, blocks, slots)
        with pytest.raises(IndexError):
            worker.copy_beside(ALL, blocks, slots, to_host=False)


# --- steps ------------------------------------------------------------------------------------------------------------


def run(driver, num_tokens: int) -> dict[str, list[int]]:
    """Prefill in uneven chunks, then decode together."""
    for name, token_ids in PROMPTS.items():
        driver.add(name, token_ids)
    driver.step({"a": 9, "b": 5})
    driver.step({"a": 1, "b": 11, "c": 3})
    driver.step({"a": 1, "b": 1, "c": 20})
    driver.decode(["c", "a", "b"], num_tokens)
    return {name: (r.output, r.logprobs, r.prompt_logprobs) for name, r in driver.requests.items()}


def assert_same(outputs: dict, expected: dict) -> None:
    """Tokens, ranks and order are equal; log-probabilities are, but for how a device adds up their sum."""
    assert outputs.keys() == expected.keys()
    for name, (tokens, *described) in outputs.items():
        assert tokens == expected[name][0], name
        for mine, theirs in zip(described, expected[name][1:], strict=True):
            assert [_without_values(each) for each in mine] == [_without_values(each) for each in theirs], name
            for one, other in zip(mine, theirs, strict=True):
                values = (one.logprob, *(v for _, v in one.top)), (other.logprob, *(v for _, v in other.top))
                assert values[0] == pytest.approx(values[1], rel=0, abs=1e-12), name


def _without_values(entry) -> tuple:
    return entry.token_id, entry.rank, [token for token, _ in entry.top]


@pytest.fixture(scope="module")
def expected(tiny_models, new_driver):
    """Tokens and log-probabilities of an undisturbed device on the host."""
    worker = DeviceWorker(
        DeviceSpec(
            model_dir=tiny_models["qwen2"], dtype="float64", budget_bytes=4 << 20, block_size=4, max_num_tokens=64,
            max_num_seqs=4, page_bytes=PAGE,
        ),
        HostBackEnd(),
    )  # fmt: skip
    worker.start()
    outputs = run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS, with_logprobs=True), 30)
    identity = worker.weights_identity
    worker.close()
    return outputs, identity


def test_tokens_logprobs_and_the_weights_identity_are_the_same_everywhere(start, new_driver, expected):
    worker = start()
    assert worker.weights_identity == expected[1]
    assert_same(run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS, with_logprobs=True), 30), expected[0])


def test_two_devices_that_each_hold_a_part_say_the_same(start, new_driver, expected):
    low, high = start(layers=LOW), start(layers=HIGH)

    def wire(hidden, stage):
        return high.hidden_from_bytes(low.hidden_to_bytes(hidden), hidden.shape[0])

    stages = [(low.run_step, LOW), (high.run_step, HIGH)]
    assert_same(run(new_driver(stages, NUM_BLOCKS, with_logprobs=True, wire=wire), 30), expected[0])


def step(step_id: int, tokens: list[int], **more) -> StepInput:
    return StepInput(
        step_id=step_id, layer_lo=0, layer_hi=4, token_ids=np.array(tokens, dtype=np.int32),
        query_lens=np.array([len(tokens)], dtype=np.int32), context_lens=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(8, dtype=np.int32)[None], sample_rows=np.zeros(1, dtype=np.int32), **more,
    )  # fmt: skip


def test_a_step_is_polled_until_it_is_over(start):
    worker = start()
    running = worker.start_step(step(1, [3, 4, 5]), None)
    for _ in range(100):
        if running.poll():
            break
    assert running.poll(), "it stays over"
    output = running.result()
    assert output.step_id == 1 and output.compute_ns > 0
    assert worker.start_step(step(2, [3, 4, 5]), None).result().tokens == output.tokens, "the result waits for it"


def test_what_makes_a_device_ready_is_written_to_the_first_blocks_alone(start):
    worker = start()
    unit, ids = worker.kv_block_bytes, list(range(worker.capacity_blocks))
    content = noise(len(ALL) * len(ids) * unit)
    worker.kv_scatter(ALL, ids, content)
    num_written = worker._runner.warm_up(ALL, 3)
    after = np.empty_like(content)
    worker.kv_gather(ALL, ids, after)
    same = (after == content).reshape(len(ALL), len(ids), unit).all(axis=2)
    assert 0 <= num_written <= 3 and same[:, num_written:].all()


def test_a_step_that_is_given_up_samples_nothing(start):
    asked: list[int] = []

    def from_the_third() -> bool:
        asked.append(1)
        return len(asked) == 3

    worker = start()
    armed = step(1, [3, 4, 5], safepoint_layers=1)
    assert worker.start_step(armed, None, None, from_the_third).result() is None
    assert len(asked) == 3
    assert worker.start_step(armed, None, None, lambda: False).result() is not None
    assert worker.start_step(step(2, [3]), None, None, from_the_third).result() is not None, "no safepoint, no question"


def test_a_step_begins_with_tokens_that_the_step_before_it_has_sampled(start):
    """Two rows change places; a token that is known stays what it is."""
    worker = start()
    rows = {
        "query_lens": np.array([3, 2, 2], dtype=np.int32), "context_lens": np.zeros(3, dtype=np.int32),
        "block_tables": np.arange(24, dtype=np.int32).reshape(3, 8), "sample_rows": np.array([0, 2], dtype=np.int32),
    }
    first = StepInput(step_id=7, layer_lo=0, layer_hi=4, token_ids=np.array([3, 4, 5, 6, 7, 8, 9], np.int32), **rows)
    a, b = (token.token_id for token in worker.run_step(first, None).tokens)
    behind = {
        "query_lens": np.ones(3, dtype=np.int32), "context_lens": np.array([2, 3, 2], dtype=np.int32),
        "block_tables": rows["block_tables"][[2, 0, 1]], "sample_rows": np.arange(3, dtype=np.int32),
    }

    def second(step_id: int, tokens: list[int], follows_step: int | None) -> StepInput:
        ids = np.array(tokens, dtype=np.int32)
        return StepInput(
            step_id=step_id, layer_lo=0, layer_hi=4, token_ids=ids, follows_step=follows_step, **behind
        )

    ahead = worker.run_step(second(8, [-2, -1, 30], 7), None).tokens
    assert ahead == worker.run_step(second(9, [b, a, 30], None), None).tokens
    for follows_step in (7, 8, 10):
        with pytest.raises(TokensLostError):
            worker.start_step(second(11, [-2, -1, 30], follows_step), None).result()
    assert len(worker.run_step(second(12, [-2, -1, 30], 9), None).tokens) == 3


def launched(worker, step: StepInput):
    """The step, as soon as another may be started behind it; None where the device has none such."""
    running = worker.start_step(step, None)
    while not running.may_be_followed:
        if running.poll():
            return None
    return running


def test_a_step_that_is_started_behind_another_takes_its_tokens_on_the_device(start):
    """Four steps of three rows, which change places, each started before the one before it is over; rows that are
    drawn, and greedy ones."""
    worker = start()
    tables = np.arange(24, dtype=np.int32).reshape(3, 8)

    def decode(step_id: int, tokens: list[int], order: list[int], follows_step: int | None) -> StepInput:
        contexts = np.full(3, step_id - 1, dtype=np.int32)
        return StepInput(
            step_id=step_id, layer_lo=0, layer_hi=4, token_ids=np.array(tokens, dtype=np.int32),
            query_lens=np.ones(3, dtype=np.int32), context_lens=contexts, block_tables=tables[order],
            sample_rows=np.arange(3, dtype=np.int32), follows_step=follows_step,
            sampling=[SamplingRow(order.index(1), step_id, 3, 1.1, 0.9, 0, 0.0)],
        )  # fmt: skip

    orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1]]
    expected, tokens = [], [3, 4, 5]
    for i, order in enumerate(orders):
        ids = [tokens[orders[i - 1].index(row)] for row in order] if i else tokens
        tokens = [token.token_id for token in worker.run_step(decode(i + 1, ids, order, None), None).tokens]
        expected.append(tokens)
    first = launched(worker, decode(1, [3, 4, 5], orders[0], None))
    if first is None:
        pytest.skip("this device computes on the host's thread")
    made = []
    for i, order in enumerate(orders[1:], 1):
        names = [-1 - orders[i - 1].index(row) for row in order]
        second = launched(worker, decode(i + 1, names, order, i))
        made.append(first.result())
        first = second
    made.append(first.result())
    assert [[token.token_id for token in output.tokens] for output in made] == expected
    assert all(output.compute_ns >= 0 for output in made)


def test_a_row_that_the_host_draws_is_of_its_step_also_where_another_is_behind_it(start):
    """A row that names a token twice, and a chunk of another prompt, whose layers take the place of logits."""
    worker = start()
    twice = SamplingRow(0, 5, 3, 0.9, 1.0, 0, 0.0, logprobs=2, logit_bias=((5, 1.0), (5, 1.0)))
    drawn, chunk = step(1, [3, 4, 5], sampling=[twice]), step(2, [9] * 20)
    expected = worker.run_step(drawn, None).tokens
    first = launched(worker, drawn)
    if first is None:
        pytest.skip("this device computes on the host's thread")
    second = launched(worker, chunk)
    assert first.result().tokens == expected and len(second.result().tokens) == 1


def test_a_step_behind_one_that_fails_has_lost_its_tokens(start):
    worker = start()
    first = launched(worker, step(1, [3, 4]))
    if first is None:
        pytest.skip("this device computes on the host's thread")
    first._finish = lambda: 1 / 0
    second = worker.start_step(step(2, [-1], follows_step=1), None)
    with pytest.raises(ZeroDivisionError):
        first.result()
    with pytest.raises(TokensLostError):
        second.result()
    assert worker.run_step(step(3, [3, 4]), None).tokens, "the next one runs"


def test_nothing_follows_on_a_step_that_failed_or_was_given_up(start):
    worker = start()
    worker.run_step(step(1, [3, 4]), None)
    with pytest.raises(IndexError):
        worker.run_step(step(2, [3, 100_000]), None)
    assert worker.run_step(step(3, [3], safepoint_layers=1), None, None, lambda: True) is None
    for follows_step in (2, 3):
        with pytest.raises(TokensLostError):
            worker.run_step(step(4, [-1], follows_step=follows_step), None)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(step(1, [3, 100_000]), IndexError), (step(1, [3] * 65), ValueError), (step(1, [3] * 33), IndexError)],
)
def test_a_step_that_does_not_fit_fails_and_the_next_one_runs(start, wrong, error):
    worker = start()
    with pytest.raises(error):
        worker.start_step(wrong, None).result()
    assert len(worker.start_step(step(2, [3, 4]), None).result().tokens) == 1


def test_rows_are_drawn_by_seed_and_position_alone(start, tiny_models):
    sampling = [SamplingRow(0, 40, 7, 0.9, 0.95, 50, 0.0)]
    worker = start()
    drawn = worker.start_step(step(1, [3, 4, 5], sampling=sampling), None).result().tokens
    other = DeviceWorker(worker._spec, HostBackEnd())
    other.start()
    assert other.start_step(step(1, [3, 4, 5], sampling=sampling), None).result().tokens == drawn
    other.close()


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_are_read_and_written_in_pieces(start):
    worker, other = start(), start(layers=LOW)
    size = worker.shard_num_bytes("layer:2")
    whole, piece = shard_of(worker, "layer:2"), np.zeros(100, dtype=np.uint8)
    worker.read_shard("layer:2", size - 100, piece)
    assert (piece == whole[-100:]).all() and size == worker.shape.shard_bytes["layer:2"]
    data = noise(33)
    data.flags.writeable = False
    worker.write_shard("layer:2", 11, data)
    whole[11:44] = data
    assert (shard_of(worker, "layer:2") == whole).all()
    for offset in (size - 99, size + 1, -1):
        with pytest.raises(ValueError):
            worker.read_shard("layer:2", offset, piece)
        with pytest.raises(ValueError):
            worker.write_shard("layer:2", offset, piece)
    calls: list[Callable[[], object]] = [
        lambda: other.shard_num_bytes("layer:2"), lambda: other.read_shard("layer:2", 0, piece),
        lambda: other.write_shard("layer:2", 0, piece),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotReadyError, match="layer:2 is not mapped"):
            call()


def test_a_drop_and_a_restore_from_a_peer_the_disk_and_the_hosts_copy(start, new_driver, expected, monkeypatch):
    fd = open_shared_copy()
    first, second = start(shared_copy_fd=fd, budget_bytes=3 << 20), start()
    os.close(fd)
    for _ in first.keeping_shard("layer:3"):
        pass
    for layers in (LOW, ALL):
        spec = LayoutSpec(first.shape.shards_for(layers), layers)
        missing = first.apply_layout(spec, 0, first.layout_version, []).missing_shards
        if layers == LOW:  # over the pages of what was dropped
            ids = list(range(first.capacity_blocks))
            first.kv_scatter(LOW, ids, np.full(len(LOW) * len(ids) * first.kv_block_bytes, 255, dtype=np.uint8))
    assert missing == first.shape.all_shards - first.shape.shards_for(LOW)
    copy_shard(second, first, "layer:1")
    first.mark_shard_filled("layer:1")
    spoilt = shard_of(second, "layer:2")
    spoilt[5] += 1
    first.write_shard("layer:2", 0, spoilt)
    with pytest.raises(ModelError):
        first.mark_shard_filled("layer:2")
    with monkeypatch.context() as patch:
        patch.setattr(first._weights, "loading", None)  # the host's copy has it
        first.load_shard_from_disk("layer:3")
    for shard in sorted(missing - {"layer:1", "layer:3"}):
        first.load_shard_from_disk(shard)
    assert first.ready_for(ALL)
    assert all((shard_of(first, shard) == shard_of(second, shard)).all() for shard in first.shape.all_shards)
    assert_same(run(new_driver([(first.run_step, ALL)], NUM_BLOCKS, with_logprobs=True), 30), expected[0])


def test_an_empty_device_is_filled_by_peers_once_it_knows_what_is_served(start, new_driver, expected):
    whole = start()
    worker = start(config=whole.config, starts_empty=True)
    worker.adopt_weights(whole.weights_identity)
    for shard in sorted(worker.shape.all_shards):
        copy_shard(whole, worker, shard)
        worker.mark_shard_filled(shard)
    assert_same(run(new_driver([(worker.run_step, ALL)], NUM_BLOCKS, with_logprobs=True), 30), expected[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_matrices_are_filled_like_plain_ones(back_end, tiny_models, dtype):
    """The same bytes in the slabs, where the kernels have the same form: float64 and a card's have no packed one."""
    digests = []
    packs = back_end.load_kernels("auto", name_of(dtype)).packs((64, 64), getattr(torch, dtype))
    for made, name in ((back_end, "auto"), (HostBackEnd(), "auto" if packs else "torch")):
        spec = DeviceSpec(
            model_dir=tiny_models["qwen3"], dtype=dtype, budget_bytes=4 << 20, block_size=4, max_num_tokens=64,
            max_num_seqs=4, page_bytes=PAGE, kernels=name,
        )  # fmt: skip
        worker = DeviceWorker(spec, made)
        worker.start()
        digests.append(worker.weights_identity)
        worker.close()
    assert digests[0] == digests[1]


# --- the choice, and the double itself --------------------------------------------------------------------------------


def test_a_back_end_is_chosen_by_name(tiny_models):
    options = {
        "model_dir": tiny_models["qwen2"], "dtype": "float64", "budget_bytes": 1, "block_size": 4,
        "max_num_tokens": 64, "max_num_seqs": 4,
    }  # fmt: skip
    assert isinstance(choose_back_end(DeviceSpec(**options).back_end), HostBackEnd)
    with pytest.raises(ConfigError, match="devices are host or cuda, not 'abacus'"):
        make_device(DeviceSpec(**options, back_end="abacus"))


def test_the_double_refuses_what_only_the_hosts_memory_can_do():
    tensor, other = wrapped(torch.arange(6.0)), torch.arange(6.0)
    part = tensor.view(2, 3)[1:]
    assert type(part) is DeviceTensor
    accesses: list[Callable[[], object]] = [
        part.numpy, part.data_ptr, lambda: np.asarray(part), lambda: np.from_dlpack(part), part.untyped_storage,
        lambda: as_numpy_uint8(part), lambda: tensor + other, lambda: torch.mm(other.view(2, 3), tensor.view(3, 2)),
        lambda: torch.index_select(tensor, 0, torch.tensor([1])),
    ]  # fmt: skip
    BYPASSES.clear()
    for access in accesses:
        with pytest.raises(HostAccessError):
            access()
    assert len(BYPASSES) == len(accesses)
    BYPASSES.clear()
    with pytest.raises(TypeError):
        memoryview(part)
    tensor[2:4] = other[:2]
    assert tensor[torch.tensor([2, 3])].tolist() == [0.0, 1.0] and not BYPASSES
