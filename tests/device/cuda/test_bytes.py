"""Bytes between a card and the host: in pieces, in order, and never from memory that changes meanwhile.

What ``DeviceBytes`` promises is tested with every back end (``tests/device/test_backend.py``). On a card where there is
one, else on a pretended card, which notices a copy that was not waited for.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from pretendedcard import PretendedCard

from jettison.device.cuda.bytes import CardBytes
from jettison.device.cuda.card import Card
from jettison.device.cuda.pieces import Copying, Piece, Way, in_a_row
from jettison.errors import MappingError, WorkerLostError

PIECE = 4096
COPYING = Copying(Way.KERNEL, PIECE, 2)
ON_CARD = torch.cuda.is_available()
pytestmark = pytest.mark.cuda


@pytest.fixture
def card():
    if ON_CARD:
        pytest.importorskip("triton", reason="Triton is not installed")
    card = Card() if ON_CARD else PretendedCard()
    card.start()
    yield card
    card.synchronize()
    card.close()


@pytest.fixture
def moved(card) -> CardBytes:
    return CardBytes(card, COPYING)


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def on_card(card, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy()).to(card.device)


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE, 5 * PIECE + 100])
def test_any_number_of_bytes_goes_through_pieces(card, moved, num_bytes):
    data, target = noise(num_bytes), card.empty(num_bytes)
    moved.copy_in(data, target)
    data_later = data.copy()
    data[:] = 0  # the caller's again
    assert (moved.read(target) == data_later).all()
    if not ON_CARD:
        sizes = [size for _, _, size in card.log]
        assert sum(sizes) == 2 * num_bytes and max(sizes, default=0) <= PIECE


def test_pinned_memory_is_copied_without_a_piece(card, moved):
    slot = card.pinned(3 * PIECE)
    slot.copy_(torch.from_numpy(noise(3 * PIECE)))
    target = card.empty(3 * PIECE)
    moved.copy_in(slot.numpy(), target)
    expected = slot.clone()
    slot.zero_()  # the caller's again
    moved.copy_out(target, slot.numpy())
    assert torch.equal(slot, expected)
    if not ON_CARD:
        assert [size for _, _, size in card.log] == [3 * PIECE] * 2


def test_memory_that_another_process_sees_is_pinned_until_it_is_released(card):
    shared = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    view = np.frombuffer(shared, dtype=np.uint8)
    there = torch.from_numpy(view)
    assert not card.is_pinned(there)
    release = card.pin(view)
    assert card.is_pinned(there) and card.is_pinned(there[100:200])
    card.copy_out(on_card(card, noise(len(view))), there)
    card.synchronize()
    assert (view == noise(len(view))).all()
    release()
    assert not card.is_pinned(there)


@pytest.mark.skipif(ON_CARD, reason="a card pins much")
def test_a_link_s_memory_that_cannot_be_pinned_is_copied_all_the_same(card, caplog):
    card.most_pinned = 10 * PIECE
    moved, slot = CardBytes(card, COPYING), np.zeros(20 * PIECE, dtype=np.uint8)
    release = moved.pin(slot)
    assert "cannot be pinned" in caplog.text
    moved.copy_out(on_card(card, noise(len(slot))), slot)
    assert (slot == noise(len(slot))).all()
    release()
    moved.pin(slot[: 2 * PIECE])()


@pytest.mark.skipif(ON_CARD, reason="a card pins much")
@pytest.mark.skipif(ON_CARD, reason="no card is to fail")
@pytest.mark.parametrize("call", [
    lambda moved, card: moved.tensor(noise(64), torch.uint8, (64,)),
    lambda moved, card: moved.read(on_card(card, noise(64))),
    lambda moved, card: moved.copy_in(noise(64), on_card(card, noise(64))),
], ids=["tensor", "read", "copy_in"])  # fmt: skip
def test_a_card_that_has_failed_ends_the_worker(call, card, moved, monkeypatch):
    def failed(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        for name in ("copy_in", "copy_out", "synchronize"):
            patch.setattr(card, name, failed)
        with pytest.raises(WorkerLostError, match="the card has failed: CUDA error"):
            call(moved, card)


def test_memory_that_cannot_be_pinned_is_an_error_of_one_line():
    card = PretendedCard(most_pinned=PIECE)
    card.start()
    with pytest.raises(MappingError, match="8192 bytes of host memory cannot be pinned") as caught:
        CardBytes(card, COPYING._replace(piece_bytes=2 * PIECE)).read(card.empty(10))
    assert "\n" not in str(caught.value)


def test_what_is_filled_in_turn_arrives_in_turn(card, moved):
    targets = [card.empty(PIECE // 2) for _ in range(7)]
    for i, target in enumerate(targets):
        with moved.writing(target) as filled:
            filled.fill_(i)
            assert (moved.read(targets[0])[:1] == 0).all() or i == 0, "other calls may come inside"
    assert [set(moved.read(target).tolist()) for target in targets] == [{i} for i in range(7)]


def test_what_was_not_filled_to_the_end_is_not_written(card, moved):
    target = on_card(card, noise(100))
    for size in (100, 3 * PIECE):  # through a piece, and more than one has
        target = on_card(card, noise(size))
        with pytest.raises(KeyError), moved.writing(target) as filled:
            _ = {0: filled.zero_()}[1]
        assert (moved.read(target) == noise(size)).all()


def test_more_than_a_piece_is_filled_at_once(card, moved):
    target = card.empty(8 * PIECE).view(torch.float32)
    with moved.writing(target) as filled:
        filled.copy_(torch.arange(8.0 * PIECE / 4))
    assert (moved.read(target).view(np.float32) == np.arange(8 * PIECE / 4)).all()


@pytest.mark.parametrize("way", Way, ids=lambda way: way.value)
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("row_bytes", [48, 1024, 24, 2 * PIECE], ids=lambda n: f"rows of {n}")
def test_rows_go_through_pieces(card, row_bytes, is_pinned, way):
    moved = CardBytes(card, COPYING._replace(way=way))
    content = [noise(20 * row_bytes, seed).reshape(20, row_bytes) for seed in range(3)]
    tables = [on_card(card, rows) for rows in content]
    ids = np.array([7, 0, 19, 3, 11], dtype=np.int64)
    host = card.pinned(3 * 5 * row_bytes) if is_pinned else torch.zeros(3 * 5 * row_bytes, dtype=torch.uint8)
    moved.gather(tables, ids, host)
    assert (host.numpy() == np.stack([rows[ids] for rows in content]).reshape(-1)).all()
    host.copy_(torch.from_numpy(noise(len(host), 9)))
    moved.scatter(tables, ids[::-1].copy(), host)
    host.zero_()  # the caller's again
    for rows, new in zip(content, noise(len(host), 9).reshape(3, 5, row_bytes)):
        rows[ids[::-1]] = new
    for table, rows in zip(tables, content):
        assert (moved.read(table) == rows.reshape(-1)).all()


@pytest.mark.skipif(ON_CARD, reason="a card runs it everywhere")
@pytest.mark.parametrize("num_programs", [1, 3, 64])
def test_rows_by_address_in_triton_s_interpreter(monkeypatch, num_programs):
    pytest.importorskip("triton", reason="Triton is not installed")
    elementwise = pytest.importorskip("jettison.device.cuda.elementwise")
    monkeypatch.setattr(PretendedCard, "move_rows", Card.move_rows)
    monkeypatch.setattr(elementwise, "MOVE_WORDS", 128)
    moved = CardBytes(card := PretendedCard(), COPYING._replace(num_programs=num_programs))
    card.start()
    card.compile_copies()
    content, host = noise(20 * 1040).reshape(20, 1040), torch.zeros(3 * 1040, dtype=torch.uint8)
    table, ids = on_card(card, content), np.array([7, 0, 19], dtype=np.int64)
    moved.gather([table], ids, host)
    assert (host.view(3, 1040).numpy() == content[ids]).all()
    moved.scatter([table], np.array([1, 2, 3]), host)
    content[[1, 2, 3]] = content[ids]
    assert (table.numpy() == content).all()
    addresses = torch.tensor([card.address_of(table)])
    card.move_rows(addresses[:0], addresses[:0], 16, num_programs)
    with pytest.raises(ValueError, match="multiple of 16"):
        card.move_rows(addresses, addresses, 1040 - 3, num_programs)


@pytest.mark.skipif(not ON_CARD, reason="needs a CUDA device")
def test_a_card_reads_and_writes_memory_of_the_host_where_it_is(card):
    """By a kernel and by the copy engines, of PyTorch's own pinned memory and of memory that was pinned where it is."""
    num_rows, unit = 40, 32 << 10
    shared = np.frombuffer(mmap.mmap(-1, num_rows * unit), dtype=np.uint8)
    release = card.pin(shared)
    order = np.random.default_rng(1).permutation(num_rows)
    for host in (card.pinned(num_rows * unit), torch.from_numpy(shared)):
        for move in (moved_by_a_kernel, moved_by_engines):
            content = noise(num_rows * unit, seed=3)
            there, back = on_card(card, content), card.empty(num_rows * unit)
            host.zero_()
            move(card, rows_of(card, there, unit)[order], rows_of(card, host, unit), unit)
            assert (host.numpy().reshape(num_rows, unit) == content.reshape(num_rows, unit)[order]).all()
            move(card, rows_of(card, host, unit), rows_of(card, back, unit)[order], unit)
            assert (back.cpu().numpy() == content).all()
    release()


def rows_of(card, memory: torch.Tensor, unit: int) -> np.ndarray:
    return in_a_row(card.address_of(memory), len(memory) // unit, unit)


def moved_by_a_kernel(card, sources, targets, unit: int) -> None:
    piece = Piece(card, 0)
    piece.move(sources, targets, unit, 16)
    piece.mark_end(sleeps=True)
    piece.wait()


def moved_by_engines(card, sources, targets, unit: int) -> None:
    card.copy_many(sources, targets, np.full(len(sources), unit))
    card.synchronize()


@pytest.mark.skipif(ON_CARD, reason="a pretended card knows what was waited for")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_bytes_of_links_do_not_wait_for_a_step_under_way(card, moved, is_pinned):
    table, ids = on_card(card, noise(20 * 64).reshape(20, 64)), np.array([7, 0, 19], dtype=np.int64)
    host = card.pinned(3 * 64) if is_pinned else torch.zeros(3 * 64, dtype=torch.uint8)
    card.begin_step()
    card.waits.clear()
    moved.gather([table], ids, host)
    moved.scatter([table], ids, host)
    moved.copy_out(table[0], host[:64].numpy())
    moved.copy_in(host[:64].numpy(), table[1])
    with moved.writing(table[2]) as filled:
        filled.zero_()
    assert set(card.waits) == {"links"} and {stream for _, stream, _ in card.log} == {"links"}
    moved.read(table)
    assert "steps" in card.waits, "what a step has launched comes first"
    card.end_step()
    assert torch.equal(table[1], table[0]) and not table[2].any()
