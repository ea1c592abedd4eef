"""When a layer runs by its graph, and that a graph changes no token; staging keeps the places that graphs read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cardbackend import PretendedBackEnd
from pretendedcard import PretendedCard

from jettison.config.devices import CONTEXT_BYTES
from jettison.device.backend_host import HostBackEnd
from jettison.device.cuda.graphs import GRAPH_BYTES, MOST_A_LAYER, GraphKey, LayerGraphs, most_graphs
from jettison.device.cuda.rows import lay_out, most_staged_bytes
from jettison.device.cuda.staging import Results, Staging
from jettison.device.cuda.tiles import ONE_SIZE, tiles_for
from jettison.device.cuda.worklist import WorkShape
from jettison.device.spec import DeviceSpec
from jettison.device.worker import DeviceWorker
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange

ALL, LOW = LayerRange(0, 4), LayerRange(0, 1)


@pytest.fixture
def card() -> PretendedCard:
    card = PretendedCard()
    card.start()
    return card


def test_a_layer_runs_once_a_step_and_by_its_graph_from_the_second_on(card) -> None:
    graphs, log = LayerGraphs(card, 9), []
    keys = [GraphKey(0, True, 4, 64), GraphKey(0, True, 8, 64), GraphKey(0, False, 4, 64)]
    for key in keys * 3:
        graphs.run(key, 1, lambda key=key: log.append(key))
    assert log == keys * 3 and card.num_replays == 6 and len(graphs) == 3
    for _ in range(2):
        graphs.run(keys[0], 2, lambda: log.append("moved"))
    assert log[-1] == "moved" and len(graphs) == 1, "staging has moved"
    assert card.num_replays == 7, "graphs after that are captured, too"


def test_graphs_are_bounded_and_what_has_none_is_launched(card) -> None:
    graphs, log = LayerGraphs(card, 2), []
    for tokens in (1, 2, 4, 4, 1, 2):
        graphs.run(GraphKey(0, True, tokens, 64), 1, lambda tokens=tokens: log.append(tokens))
    assert log == [1, 2, 4, 4, 1, 2] and len(graphs) == 2 and card.num_replays == 2


def test_a_graph_that_is_unused_for_long_gives_way(card) -> None:
    """Decodes that come after other sizes get their graph; what runs stays, and no graph goes under way."""
    graphs, log = LayerGraphs(card, 4), []

    def run(*sizes: int) -> None:
        for size in sizes:
            graphs.run(GraphKey(0, True, size, 64), 1, lambda size=size: log.append(size))

    run(10, 11, 12, 13)
    run(*[1, 10] * 3)
    assert 1 not in {key.bucket for key in graphs._graphs}, "the others may come again soon"
    waits = len(card.waits)
    run(1, 1, 10)
    assert [key.bucket for key in graphs._graphs] == [12, 13, 1, 10] and len(card.waits) == waits + 1
    before = card.num_replays
    run(1, 10, 1)
    assert card.num_replays - before == 3 and len(log) == 4 + 6 + 3 + 3, "each layer ran once a step"
    run(*range(20, 30), *[1] * 9, 2, 2)
    assert 2 in {key.bucket for key in graphs._graphs} and len(graphs) == 4


def test_sizes_that_go_round_keep_what_they_have(card) -> None:
    graphs = LayerGraphs(card, 4)
    for size in [*range(6)] * 9:
        graphs.run(GraphKey(0, True, size, 64), 1, lambda: None)
    assert card.num_graphs == 4 and card.num_replays == 4 * 8, "no capture in place of a launch"


def test_the_only_graph_gives_way_with_the_memory_that_graphs_share(card) -> None:
    graphs = LayerGraphs(card, 1)
    for size in (1, 2, 2, 2, 2, 1):
        graphs.run(GraphKey(0, True, size, 64), 1, lambda: None)
    assert card.num_graphs == 2 and len(graphs) == 1


def test_graphs_have_room_in_what_a_process_has_beside_its_budget() -> None:
    assert most_graphs(28) == 28 * MOST_A_LAYER, "of 7B"
    for num_layers in (1, 48, 80, 126):
        assert most_graphs(num_layers) * GRAPH_BYTES <= CONTEXT_BYTES // 2 < most_graphs(1000) * GRAPH_BYTES * 1.1


def test_what_cannot_be_captured_runs_without_graphs(caplog) -> None:
    class Refuses(PretendedCard):
        def capture(self, launches):
            launches()
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs, log = LayerGraphs(Refuses(), 9), []
    for _ in range(5):
        graphs.run(GraphKey(0, True, 1, 64), 1, lambda: log.append(1))
    assert len(log) == 5 and len(caplog.records) == 1 and "without graphs" in caplog.text


def test_a_layer_that_fails_is_a_failure_of_its_step(card) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        LayerGraphs(card, 9).run(GraphKey(0, True, 1, 64), 1, fails)


def test_staged_arrays_keep_their_places_until_the_buffer_grows(card) -> None:
    staging = Staging(card, 256)
    first = staging.put({"a": np.arange(5, dtype=np.int32), "b": np.arange(6.0).reshape(2, 3)})
    assert first["a"].tolist() == [0, 1, 2, 3, 4] and first["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    again = staging.put({"a": np.ones(5, dtype=np.int32), "b": np.zeros((2, 3)), "c": np.zeros(0, dtype=np.int64)})
    assert [again[name].data_ptr() for name in "ab"] == [first[name].data_ptr() for name in "ab"]
    assert staging.generation == 1 and again["a"].tolist() == [1] * 5 and again["c"].shape == (0,)
    assert staging.put({"a": np.arange(100, dtype=np.int64)})["a"].tolist() == list(range(100))
    assert staging.generation == 2


def test_no_step_of_a_served_model_moves_what_graphs_read(card) -> None:
    """Of 256 rows with 128Ki tokens of context, or as many tokens as may be; else all graphs go."""
    most_tokens, most_rows, blocks = 2048, 256, 8192
    staging = Staging(card, 4 << 20)
    staging.reserve(most_staged_bytes(most_tokens, most_rows, blocks))
    shape = WorkShape(tiles_for(16, 4)[ONE_SIZE], 2, 2, 8)
    for queries in ([1] * most_rows, [most_tokens], [8] * most_rows):
        contexts = np.full(len(queries), 100, dtype=np.int32)
        tables = np.zeros((len(queries), blocks), dtype=np.int32)
        rows = lay_out(lambda _: shape, torch.zeros(1, 2, 2, 16, 16), tables, np.array(queries, dtype=np.int32),
                       contexts, sum(queries)).padded(most_tokens)  # fmt: skip
        ids = np.zeros(most_tokens, dtype=np.int64)
        staging.put(rows.arrays() | {"token_ids": ids, "unknown": ids[: len(queries)], "of_slot": ids[: len(queries)],
                                     "sampled": ids[: len(queries)]})  # fmt: skip
        assert staging.generation == 1


def test_a_copy_under_way_is_not_written_over(card) -> None:
    staging = Staging(card, 64)
    for number in range(3):  # the card checks
        staging.put({"a": np.full(4, number, dtype=np.int32)})
    card.synchronize()
    assert card.log == [("in", "steps", 16)] * 3


def test_what_a_step_has_made_comes_back_by_name(card) -> None:
    results = Results(card, 16)
    made = {"tokens": torch.arange(9), "own": torch.rand(3, 2, dtype=torch.float64).t()}
    fetched = results.fetch(made)
    card.synchronize()
    assert fetched["tokens"].tolist() == list(range(9)) and (fetched["own"] == made["own"].numpy()).all()


def start(back_end, model_dir, **changes) -> DeviceWorker:
    spec = DeviceSpec(
        model_dir=model_dir, dtype="float64", budget_bytes=6 << 20, block_size=4, max_num_tokens=64, max_num_seqs=24,
        page_bytes=4096, **changes,
    )  # fmt: skip
    worker = DeviceWorker(spec, back_end)
    worker.start()
    return worker


@pytest.fixture
def workers(tiny_models):
    """The host's, and a pretended card's."""
    made = [start(HostBackEnd(), tiny_models["qwen2"]), start(PretendedBackEnd(), tiny_models["qwen2"])]
    yield made
    for worker in made:
        worker.close()


def batches(driver) -> dict[str, list[int]]:
    """Requests that come and go, so that decode steps have 1 to 18 rows."""
    names = [f"r{i}" for i in range(18)]
    chooser = random.Random(4)
    for i, name in enumerate(names):
        driver.add(name, chooser.choices(range(256), k=2 + i % 3))
    for first in range(0, 18, 6):
        driver.step({name: 2 + (first + j) % 3 for j, name in enumerate(names[first : first + 6])})
    for size in (18, 17, 18, 3, 4, 3, 1, 1, 1, 9, 16, 2, 2):
        driver.decode(chooser.sample(names, size), 1)
    return {name: request.output for name, request in driver.requests.items()}


def test_graphs_and_padding_change_no_token(workers, new_driver) -> None:
    host, card = workers
    expected = batches(new_driver([(host.run_step, ALL)], 72))
    assert batches(new_driver([(card.run_step, ALL)], 72)) == expected
    runner, replays = card._runner, card._back_end.card.num_replays
    buckets = [1, 2, 4, 16, 32, 64]
    assert sorted(key[:3] for key in runner._graphs._graphs) == [
        (layer, layer == 0, bucket) for layer in ALL.layers() for bucket in buckets
    ]
    # One row and a chunk of 64 tokens were captured at the start, and one row replayed there. Prompts of 18 tokens
    # together and as many rows that decode have the same graphs.
    assert replays == (1 + (2 + 3) + 2 + 3 + 1 + 1) * len(ALL)


def test_graphs_hold_through_a_drop_and_a_restore(workers, new_driver) -> None:
    host, card = workers
    expected = batches(new_driver([(host.run_step, ALL)], 72))
    batches(new_driver([(card.run_step, ALL)], 72))
    num_graphs = len(card._runner._graphs)
    for layers in (LOW, ALL):
        spec = LayoutSpec(card.shape.shards_for(layers), layers)
        missing = card.apply_layout(spec, 0, card.layout_version, []).missing_shards
    for shard in sorted(missing):
        card.load_shard_from_disk(shard)
    before = card._back_end.card.num_replays
    assert batches(new_driver([(card.run_step, ALL)], 72)) == expected
    assert len(card._runner._graphs) == num_graphs
    assert card._back_end.card.num_replays - before == (3 + 13) * len(ALL), "prompts and decodes"
