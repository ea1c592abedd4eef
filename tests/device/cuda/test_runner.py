"""A card's runner with its own kernels gives the host's tokens: in Triton's interpreter, or on a card."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("msgspec", reason="msgspec is not installed")

from pretendedcard import PretendedCard

from jettison.device.cuda.card import Card
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.runner import CudaRunner, Limits
from jettison.device.devicebytes_host import HostBytes
from jettison.device.dtypes import name_of
from jettison.device.kernels.loading import load_kernels
from jettison.device.model.hf_config import DecoderConfig, read_config
from jettison.device.model.samples import NAMED, make_sample
from jettison.device.model.shards import model_shape
from jettison.device.model.workspaceplan import plan_workspace
from jettison.device.step import SamplingRow, StepInput

NUM_BLOCKS, BLOCK_SIZE = 64, 4


def make_card() -> Card:
    card = Card() if torch.cuda.is_available() else PretendedCard()
    card.start()
    return card


class MovedMemory:
    """A host's ``PlainMemory`` on a card: the same parameters, and a cache of its own."""

    def __init__(self, plain, device: torch.device) -> None:
        self._slabs = {shard: slab.to(device) for shard, slab in plain.slabs.items()}
        self._arenas = [torch.full_like(arena, torch.nan).to(device) for arena in plain.arenas]
        self._space = torch.zeros(len(plain.space), dtype=torch.uint8, device=device)

    def shard_bytes(self, shard: str) -> torch.Tensor:
        return self._slabs[shard]

    def kv_arena(self, layer: int) -> torch.Tensor:
        return self._arenas[layer]

    def workspace(self) -> torch.Tensor:
        return self._space


@pytest.fixture
def runners(tiny_models, new_runner, device, tmp_path):
    """(the host's, the card's) of a model in float32: ``runners(name)``."""

    def make(name: str) -> tuple:
        folder = tiny_models.get(name) or make_sample(NAMED[name], tmp_path / "model", 3, layers=3)
        host = new_runner(folder, torch.float32, kernels=load_kernels("torch"), num_blocks=NUM_BLOCKS)
        memory = MovedMemory(host._memory, device)
        kernels = CudaKernels("cuda-invariant", device)
        limits = Limits(host.max_num_tokens, host.max_num_seqs)
        card = CudaRunner(host.config, torch.float32, memory, kernels, limits, HostBytes(), make_card())
        card.final_norm.copy_(host.final_norm)
        return host, card

    return make


def a_step(number: int, chunks: list[list[int]], contexts: list[int], sampling=()) -> StepInput:
    rows = len(chunks)
    return StepInput(
        step_id=number, layer_lo=0, layer_hi=3, token_ids=np.concatenate(chunks).astype(np.int32),
        query_lens=np.array([len(chunk) for chunk in chunks], dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=np.arange(8 * rows, dtype=np.int32).reshape(rows, 8)[:, ::-1].copy(),
        sample_rows=np.arange(rows, dtype=np.int32), sampling=list(sampling),
    )  # fmt: skip


def run(runner, step: StepInput):
    return runner.start_step(step, None).result().tokens


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("name", ["llama3-rope", "qwen3", "Gemma 3", "gpt-oss", "StarCoder2", "Cohere 2"])
def test_steps_give_the_hosts_tokens(runners, name: str) -> None:
    """Of models with norms and activations of every kind. A prefill, a chunk beside decodes, then decodes of three rows
    that are padded to four; the last two replay the graphs of the chunk's step."""
    host, card = runners(name)
    described = [
        SamplingRow(row, 20, 5, temperature, 0.9, 0, 0.0, logprobs=3) for row, temperature in ((0, 0.0), (2, 0.8))
    ]
    chunks, contexts = [[5, 6, 7, 8, 9], [70, 71], [100]], [0, 0, 0]
    for number in range(4):
        step = a_step(number, chunks, contexts, described)
        expected, actual = run(host, step), run(card, step)
        assert [t.token_id for t in actual] == [t.token_id for t in expected]
        for mine, theirs in zip(actual[::2], expected[::2], strict=True):
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
        contexts = [context + len(chunk) for context, chunk in zip(contexts, chunks, strict=True)]
        chunks = [[t.token_id] for t in expected]
        if number == 0:
            chunks[1] = [44, 45]
    assert len(card._graphs) == 2 * 3, "a graph for each layer, of eight tokens and of four"
    assert not any(arena[24:].isfinite().any() for arena in card._memory._arenas), "padding has written"


needs_card = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class BigModel:
    """A model of random weights whose steps take the card milliseconds, with its runner in bfloat16."""

    layers = 8

    def __init__(self, config: DecoderConfig) -> None:
        config = replace(
            config, num_layers=self.layers, layers=config.layers[:1] * self.layers, hidden_size=1024, num_heads=16,
            num_kv_heads=4, head_dim=64, intermediate_size=4096, max_position_embeddings=4096, max_model_len=4096,
        )  # fmt: skip
        dtype = torch.bfloat16
        device, limits = torch.device("cuda"), Limits(4096, 64)
        generator = torch.Generator("cuda").manual_seed(1)
        sizes = model_shape(config, name_of(dtype)).shard_bytes
        self.slabs = {
            shard: torch.empty(size // 2, dtype=dtype, device=device).normal_(0, 0.03, generator=generator)
            .view(torch.uint8) for shard, size in sizes.items()
        }  # fmt: skip
        shape = (1024, 2, config.num_kv_heads, 16, config.head_dim)
        self.arenas = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.layers)]
        num_bytes = plan_workspace(config, name_of(dtype), *limits).num_bytes
        self.space = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.card = make_card()
        kernels = CudaKernels("cuda-invariant", device)
        self.runner = CudaRunner(config, dtype, self, kernels, limits, HostBytes(), self.card)
        self.runner.final_norm.fill_(1.0)

    def shard_bytes(self, shard: str) -> torch.Tensor:
        return self.slabs[shard]

    def kv_arena(self, layer: int) -> torch.Tensor:
        return self.arenas[layer]

    def workspace(self) -> torch.Tensor:
        return self.space

    def step(self, lens: list[int], contexts: list[int], first: int = 0, **more) -> StepInput:
        rows, width = len(lens), 8 if sum(lens) == len(lens) else 256
        tables = (first * width + np.arange(rows * width, dtype=np.int32)).reshape(rows, width)
        ids = np.concatenate([np.arange(7 * (first + i), 7 * (first + i) + n) for i, n in enumerate(lens)]) % 250
        return StepInput(
            step_id=1, layer_lo=0, layer_hi=self.layers, token_ids=ids.astype(np.int32),
            query_lens=np.array(lens, dtype=np.int32), context_lens=np.array(contexts, dtype=np.int32),
            block_tables=tables, sample_rows=np.arange(rows, dtype=np.int32), **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def big(tiny_models) -> BigModel:
    return BigModel(read_config(tiny_models["qwen2"]))


class TestOnCard:
    """What only a card shows."""

    pytestmark = needs_card

    def test_a_step_is_started_and_polled_without_a_wait(self, big: BigModel) -> None:
        for _ in range(2):  # compiled by now
            big.runner.start_step(big.step([2048], [0]), None).result()
        torch.cuda.synchronize()
        # A queue of products that takes the card a while: nothing below may wait for it.
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(200):
            torch.mm(x, x)
        behind = big.card.record()
        running = big.runner.start_step(big.step([2048], [0]), None)
        num_polls = 0
        while not running.poll():
            num_polls += 1
            if num_polls == 2 * big.layers:
                assert not behind.done(), "a poll has waited for the card"
        assert len(running.result().tokens) == 1 and num_polls > 2 * big.layers

    def test_the_host_is_two_layers_ahead_where_a_step_may_be_given_up(self, big: BigModel) -> None:
        asked: list[int] = []
        torch.cuda.synchronize()
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(200):
            torch.mm(x, x)
        behind = big.card.record()
        armed = big.step([2048], [0], safepoint_layers=1)
        running = big.runner.start_step(armed, None, None, lambda: asked.append(1) or len(asked) > 5)
        for _ in range(20):
            running.poll()
        assert len(asked) == 2 or behind.done()
        assert running.result() is None and len(asked) == 6

    def test_graphs_give_what_launches_give_in_every_bucket(self, big: BigModel) -> None:
        """And a row has the same bits in every batch."""
        alone: dict[int, torch.Tensor] = {}
        runner = big.runner
        for rows in (1, 3, 8, 20, 64):
            step = big.step([1] * rows, [5] * rows)
            for _ in range(3):  # captured, replayed, replayed
                runner.start_step(step, None).result()
                logits = runner._workspace.logits[:rows].clone()
                for row in range(rows):
                    alone.setdefault(row, logits[row])
                    assert torch.equal(alone[row], logits[row]), (rows, row)
        assert {(0, True, bucket) for bucket in (1, 4, 8, 32, 64)} <= {key[:3] for key in runner._graphs._graphs}
        runner._graphs._can_capture = False
        graphs, runner._graphs._graphs = runner._graphs._graphs, {}
        runner.start_step(big.step([1] * 20, [5] * 20), None).result()
        assert all(torch.equal(alone[row], runner._workspace.logits[row]) for row in range(20))
        runner._graphs._can_capture, runner._graphs._graphs = True, graphs

    def test_graphs_of_chunks_give_what_launches_give(self, big: BigModel) -> None:
        """And write the cache alike; a step of chunks takes far less than its launches did."""
        runner = big.runner
        for lens, contexts in (([40], [0]), ([1, 300, 1], [5, 0, 9]), ([7, 1, 1, 33], [0, 3, 2, 16]), ([2000], [0])):
            step = big.step(lens, contexts)
            found = []
            for may_capture in (False, True, True, True):  # launched, captured, replayed, replayed
                runner._bucket_sizes, sizes = runner._bucket_sizes if may_capture else [], runner._bucket_sizes
                for arena in big.arenas:
                    arena.fill_(0.25)
                runner.start_step(step, None).result()
                runner._bucket_sizes = sizes
                logits = runner._workspace.logits[: len(lens)].clone()
                found.append([logits, *(arena.clone() for arena in big.arenas)])
            for again in found[1:]:
                assert all(torch.equal(*pair) for pair in zip(found[0], again, strict=True)), lens
        assert any(key.bucket > 256 for key in runner._graphs._graphs)

    @pytest.mark.whole_card
    def test_graphs_take_little_of_the_card_s_memory(self, big: BigModel) -> None:
        """Of which a process has a GiB set aside (``config.devices``): 64 of each of 48 layers have room there."""
        runner = big.runner
        torch.cuda.synchronize()
        before, num_before = torch.cuda.mem_get_info()[0], len(runner._graphs)
        for tokens in (3, 150, 400, 500, 600, 700, 800, 900, 1000, 1200):
            runner.start_step(big.step([tokens], [0]), None).result()
        num_graphs = len(runner._graphs) - num_before
        assert num_graphs >= 8 * big.layers
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken / num_graphs < (160 << 10), f"{taken / num_graphs / 1024:.0f} KiB a graph"

    def test_a_row_s_bits_do_not_depend_on_what_is_computed_beside_it(self, big: BigModel) -> None:
        first = None
        for lens in ([40], [40, 300], [40, 1, 1, 1000]):
            big.runner.start_step(big.step(lens, [0] * len(lens)), None).result()
            logits = big.runner._workspace.logits[0].clone()
            first = logits if first is None else first
            assert torch.equal(first, logits), lens

    @pytest.mark.parametrize(
        ("norm", "activation"), [("rms_once", "swiglu_clamped"), ("rms_plus_one", "gelu_tanh"), ("layer", "gelu")]
    )
    def test_so_it_is_with_norms_and_activations_of_other_kinds(self, tiny_models, norm: str, activation: str) -> None:
        """In as few rows as let a card's own reductions sum each in another order."""
        config = read_config(tiny_models["qwen2"])
        config = replace(config, arithmetic=replace(config.arithmetic, norm=norm, activation=activation))
        model, first = BigModel(config), None
        for rows in (1, 3, 8, 16, 64):
            model.runner.start_step(model.step([1] * rows, [5] * rows), None).result()
            logits = model.runner._workspace.logits[0].clone()
            assert logits.isfinite().all()
            first = logits if first is None else first
            assert torch.equal(first, logits), rows
