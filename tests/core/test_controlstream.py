"""A worker's control stream: order, loads, epochs, orphans, fences; then any stream, against the rules as written."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core.controlstream import CommandEntry, ControlStream, Failure, GroupEpochs, Kind, StepEntry

BEFORE = 7
"""The worker with the stage before."""


@dataclass(eq=False)
class Stage:
    """A stage's part of a step."""

    name: str
    has_input: bool = False


def has_input(stage: Stage) -> bool:
    return stage.has_input


Stream = ControlStream[Stage, str]
KINDS = {
    "offer": Kind.OFFER_LAYOUT, "apply": Kind.APPLY_LAYOUT, "transfer": Kind.TRANSFER, "swap": Kind.COPY,
    "out": Kind.COPY_OUT_BESIDE, "in": Kind.COPY_IN_BESIDE, "load": Kind.LOAD,
    "report": Kind.REPORT, "fence": Kind.FENCE,
}  # fmt: skip


def stream_of(words: str) -> tuple[Stream, list[StepEntry[Stage] | CommandEntry[str]]]:
    """``first``: a step of a first stage; ``input``: one whose input is here; ``waits``: one whose input is not;
    ``loading``: a load under way, of which a piece has been loaded; the rest: commands."""
    stream: Stream = ControlStream(has_input)
    for word in words.split():
        if word in ("first", "input", "waits"):
            previous = None if word == "first" else BEFORE
            stream.append(stream.admit(Stage(word, word == "input"), previous, None, is_linked=True))
        elif word == "loading":
            stream.append_command(word, Kind.LOAD)
            stream.begin(stream.next_entry() or pytest.fail("the load may not begin"))
            stream.note_piece()
        else:
            stream.append_command(word, KINDS[word], transfer_id=5 if word == "transfer" else None)
    return stream, list(stream._entries)


def steps_and_commands(stream: Stream) -> list[str]:
    """All that begins, in its order, while loads get their pieces and no input comes."""
    begun = []
    while (entry := stream.next_entry()) is not None:
        stream.begin(entry)
        begun.append(entry.step.name if isinstance(entry, StepEntry) else entry.command)
    return begun


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "index"), [
    ("", None),
    ("first", 0),
    ("input first", 0),
    ("waits", None),
    # Rule 1: a step overtakes steps that wait.
    ("waits waits input first", 2),
    # Rule 2: a command waits for every step before it, and for every command before it.
    ("offer first", 0),
    ("first offer", 0),
    ("waits offer", None), ("waits transfer", None), ("waits swap", None), ("waits load", None),
    ("waits report", None), ("waits fence", None),
    ("waits transfer fence", None),
    # ... and holds no step, but for an ApplyLayout (rule 3).
    ("waits offer first", 2), ("waits transfer first", 2), ("waits swap first", 2), ("waits load first", 2),
    ("waits report first", 2), ("waits fence first", 2),
    ("waits apply first", None),
    ("waits offer apply input", None),
    ("waits input apply first", 1),
    # A load under way holds layouts and further loads, and nothing else.
    ("loading", None),
    ("loading first", 1), ("loading waits input", 2),
    ("loading transfer", 1), ("loading swap", 1), ("loading report", 1), ("loading fence", 1),
    ("loading offer", None), ("loading apply", None), ("loading load", None),
    ("loading offer first", 2), ("loading load first", 2),
    ("loading apply first", None),
    ("loading offer fence", None),
    ("loading waits transfer", None),
    # Rule 9: a copy beside steps passes what waits, but for a layout; one that writes blocks waits for steps.
    ("waits out", 1), ("waits in", None), ("waits in out", 2), ("waits in first", 2), ("in first", 0),
    ("waits transfer out", 2), ("waits transfer in", None), ("loading in", 1), ("loading load out", 2),
    ("loading load in", 2), ("waits apply out", None), ("loading apply out", None), ("loading apply in", None),
    ("waits in transfer", None),
])  # fmt: skip
def test_what_may_start_next(words: str, index: int | None) -> None:
    stream, entries = stream_of(words)
    assert stream.next_entry() is (None if index is None else entries[index])


def test_what_has_begun_holds_nothing_and_a_load_stays_until_it_is_over() -> None:
    stream, (load, _, _) = stream_of("load apply first")
    assert stream.next_entry() is load
    stream.begin(load)
    assert (len(stream), stream.next_entry()) == (3, None)
    stream.end_load()
    assert steps_and_commands(stream) == ["apply", "first"] and len(stream) == 0


def test_one_piece_of_a_load_is_owed_after_each_entry() -> None:
    stream, (load, *_) = stream_of("load first first")
    assert not stream.owes_piece
    stream.begin(load)
    assert stream.owes_piece, "the load has begun"
    stream.note_piece()
    assert not stream.owes_piece, "a step waits for one piece at most"
    for _ in range(2):
        stream.begin(stream.next_entry() or pytest.fail("a step has to wait"))
        assert stream.owes_piece
        stream.note_piece()
    stream.end_load()
    assert not stream.owes_piece and len(stream) == 0


def test_what_is_on_its_way_has_not_been_received_and_neither_has_what_comes_behind_it() -> None:
    stream: Stream = ControlStream(has_input)
    stream.append_command("fence", Kind.FENCE, arrives_ns=20)
    stream.append(stream.admit(Stage("first"), None, None, is_linked=True, arrives_ns=30))
    assert (stream.next_entry(19), stream.next_arrival_ns(19)) == (None, 20)
    assert stream.next_arrival_ns(20) == 30 and stream.next_arrival_ns(30) is None
    fence = stream.next_entry(20)
    assert isinstance(fence, CommandEntry)
    stream.begin(fence)
    assert stream.next_entry(29) is None and stream.next_entry(30) is not None


def test_transfers_and_copies_beside_steps_are_withdrawn_until_they_begin_and_nothing_else_is() -> None:
    stream, _ = stream_of("waits transfer swap")
    assert stream.withdraw(6) is None
    assert stream.withdraw(5) == "transfer"
    assert stream.withdraw(5) is None
    assert len(stream) == 2
    stream.append_command("swap", Kind.COPY, transfer_id=8)
    assert stream.withdraw(8) is None
    for number, kind in enumerate((Kind.COPY_OUT_BESIDE, Kind.COPY_IN_BESIDE), start=9):
        stream.append_command("beside", kind, transfer_id=number)
        assert stream.withdraw(number) == "beside" and stream.withdraw(number) is None


def test_transfers_that_are_meant_are_withdrawn_together() -> None:
    stream, _ = stream_of("first transfer swap transfer fence")
    stream.withdraw_transfers(lambda command: command == "swap")
    assert len(stream) == 5, "no copy inside the worker"
    stream.withdraw_transfers(lambda command: command == "transfer")
    assert steps_and_commands(stream) == ["first", "swap", "fence"]


def test_the_dead_have_nothing_to_do() -> None:
    stream, _ = stream_of("loading first apply")
    stream.clear()
    assert (len(stream), stream.next_entry(), stream.owes_piece) == (0, None, False)


# --- steps that cannot run ----------------------------------------------------------------------------------------


def test_a_step_of_an_older_epoch_is_refused() -> None:
    epochs = GroupEpochs()
    assert epochs.refusal(4, 2) is None and epochs.refusal(4, 2) is None
    assert epochs.refusal(4, 1) == Failure("step of epoch 1 of group 4, which is at epoch 2")
    assert epochs.refusal(5, 1) is None, "another group"
    assert epochs.refusal(4, 3) is None and epochs.refusal(4, 2) is not None
    epochs.clear()
    assert epochs.refusal(4, 0) is None, "a new life"


def test_epochs_are_remembered_of_the_groups_used_last() -> None:
    epochs = GroupEpochs(max_groups=3)
    for group_id in range(1, 20):
        assert epochs.refusal(0, 2) is None and epochs.refusal(group_id, 9) is None
        assert len(epochs) <= 3
    assert epochs.refusal(0, 1) is not None, "in use, however old"
    assert epochs.refusal(19, 1) is not None and epochs.refusal(1, 1) is None


def test_a_refused_step_waits_for_its_input_and_what_the_stage_before_says_goes_first() -> None:
    stream: Stream = ControlStream(has_input)
    refusal = Failure("stale")
    entry = stream.admit(Stage("waits"), BEFORE, refusal, is_linked=True)
    stream.append(entry)
    assert stream.next_entry() is None
    stream.orphan(BEFORE)
    assert stream.next_entry() is entry and entry.failure == Failure.of_lost_input(BEFORE)


@pytest.mark.parametrize(("word", "lost", "is_orphaned"), [
    ("waits", BEFORE, True), ("waits", 8, False), ("input", BEFORE, False), ("first", BEFORE, False),
])  # fmt: skip
def test_steps_that_wait_for_a_lost_worker_fail_as_soon_as_their_turn_comes(
    word: str, lost: int, is_orphaned: bool
) -> None:
    stream, (entry, _) = stream_of(f"{word} first")
    stream.orphan(lost)
    assert isinstance(entry, StepEntry)
    assert entry.orphaned == is_orphaned
    assert entry.failure == (Failure.of_lost_input(BEFORE) if is_orphaned else None)
    assert (stream.next_entry() is entry) == (word != "waits" or is_orphaned)


@pytest.mark.parametrize(("previous", "input_is_here", "is_orphaned"), [
    (None, False, False), (BEFORE, False, True), (BEFORE, True, False),
])  # fmt: skip
def test_a_step_that_comes_after_the_loss_is_orphaned_unless_its_input_came_before(
    previous: int | None, input_is_here: bool, is_orphaned: bool
) -> None:
    stream: Stream = ControlStream(has_input)
    entry = stream.admit(Stage("late", input_is_here), previous, None, is_linked=previous is None)
    assert (entry.orphaned, stream.is_ready(entry)) == (is_orphaned, True)
    assert (entry.failure is not None) == is_orphaned


def test_input_that_comes_after_the_loss_is_not_used() -> None:
    stream, (entry,) = stream_of("waits")
    assert isinstance(entry, StepEntry)
    stream.orphan(BEFORE)
    entry.step.has_input = True
    stream.orphan(BEFORE)
    assert entry.orphaned and entry.failure is not None and entry.failure.lost_worker == BEFORE


def test_a_fence_is_answered_behind_the_steps_that_it_orphans_and_those_that_still_get_their_input() -> None:
    stream: Stream = ControlStream(has_input)
    lost, other = Stage("of the lost"), Stage("of another")
    for stage, previous in ((lost, BEFORE), (other, 8)):
        stream.append(stream.admit(stage, previous, None, is_linked=True))
    stream.orphan(BEFORE)
    stream.append_command("fence", Kind.FENCE)
    stream.append(stream.admit(Stage("of its next life"), BEFORE, None, is_linked=True))
    assert steps_and_commands(stream) == ["of the lost"]
    other.has_input = True
    assert steps_and_commands(stream) == ["of another", "fence"]
    assert [entry.step.name for entry in stream.steps()] == ["of its next life"]


@pytest.mark.parametrize("kind", [Kind.GIVE_BACK, Kind.SETTLED_TRANSFER])
def test_what_touches_nothing_that_a_step_does_begins_before_all_steps_but_behind_commands(kind: Kind) -> None:
    stream: Stream = ControlStream(has_input)
    ready, waiting = Stage("ready", True), Stage("waiting")
    for stage, previous in ((ready, None), (waiting, BEFORE)):
        stream.append(stream.admit(stage, previous, None, is_linked=True))
    stream.append_command("overtakes", kind)
    stream.append_command("follows", Kind.TRANSFER)
    stream.append_command("overtakes nothing", kind)
    assert steps_and_commands(stream) == ["overtakes", "ready"]
    waiting.has_input = True
    assert steps_and_commands(stream) == ["waiting", "follows", "overtakes nothing"]


# --- any stream ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Received:
    """An entry as the rules speak of it."""

    kind: Kind | None
    """None: a step."""
    entry: StepEntry[Stage] | CommandEntry[str]
    has_begun: bool = False
    is_over: bool = False
    is_orphaned: bool = False


@dataclass
class History:
    """All that a worker has received, from the first, and what has become of it: the rules read it as they are written,
    without the stream's shortcuts."""

    stream: Stream = field(default_factory=lambda: ControlStream(has_input))
    received: list[Received] = field(default_factory=list)

    def receive_step(self, needs_input: bool) -> None:
        entry = self.stream.admit(Stage("step"), BEFORE if needs_input else None, None, is_linked=True)
        self.stream.append(entry)
        self.received.append(Received(None, entry))

    def receive(self, kind: Kind) -> None:
        self.stream.append_command(kind.name, kind)
        self.received.append(Received(kind, self.stream._entries[-1]))

    def waiting_steps(self) -> list[Stage]:
        return [entry.step for entry in self.stream.steps() if not self.stream.is_ready(entry)]

    @property
    def load(self) -> Received | None:
        loads = [each for each in self.received if each.kind is Kind.LOAD and each.has_begun and not each.is_over]
        assert len(loads) <= 1, "one load at a time"
        return loads[0] if loads else None

    def may_start(self, this: Received) -> bool:
        """Rules 1 to 3 and 9, word by word."""
        before = self.received[: self.received.index(this)]
        if isinstance(this.entry, StepEntry):
            is_first_stage = this.entry.previous is None
            waits_for_input = not (is_first_stage or this.entry.step.has_input or this.is_orphaned)
            return not waits_for_input and all(each.is_over for each in before if each.kind is Kind.APPLY_LAYOUT)
        is_beside = self.kind_is_beside(this)
        if is_beside and not all(each.is_over for each in before if each.kind is Kind.APPLY_LAYOUT):
            return False
        if this.kind is Kind.COPY_OUT_BESIDE:
            return True
        if not self.overtakes_steps(this) and not all(each.is_over for each in before if each.kind is None):
            return False
        if is_beside:
            return True
        if not all(each.has_begun for each in before if each.kind is not None and not self.kind_is_beside(each)):
            return False
        layout_or_load = this.kind in (Kind.OFFER_LAYOUT, Kind.APPLY_LAYOUT, Kind.GIVE_BACK, Kind.LOAD)
        return not (layout_or_load and self.load is not None)

    @staticmethod
    def kind_is_beside(this: Received) -> bool:
        return this.kind in (Kind.COPY_OUT_BESIDE, Kind.COPY_IN_BESIDE)

    @staticmethod
    def overtakes_steps(this: Received) -> bool:
        return this.kind in (Kind.GIVE_BACK, Kind.SETTLED_TRANSFER)

    def lose_the_stage_before(self) -> None:
        for each in self.received:
            if isinstance(each.entry, StepEntry) and not each.has_begun:
                each.is_orphaned |= each.entry.previous == BEFORE and not each.entry.step.has_input
        self.stream.orphan(BEFORE)

    def expect_the_first_that_may_start(self) -> Received | None:
        may = [each for each in self.received if not each.has_begun and self.may_start(each)]
        may.sort(key=lambda each: not self.overtakes_steps(each))  # stable: else the first that was received
        assert self.stream.next_entry() is (may[0].entry if may else None)
        return may[0] if may else None

    def begin(self, this: Received) -> None:
        self.stream.begin(this.entry)
        this.has_begun = True
        this.is_over = this.kind is not Kind.LOAD

    def end_load(self, load: Received) -> None:
        self.stream.end_load()
        load.is_over = True


DOINGS = st.lists(
    st.one_of(
        st.sampled_from(list(Kind)),
        st.sampled_from(["first", "waits", "waits", "input", "lost", "begin", "begin", "begin", "end load"]),
    ),
    max_size=60,
)


@settings(max_examples=500)
@given(doings=DOINGS, choices=st.randoms(use_true_random=False))
def test_any_stream_is_obeyed_in_the_order_of_the_rules(doings, choices) -> None:  # type: ignore[no-untyped-def]
    history = History()
    for doing in doings:
        if isinstance(doing, Kind):
            history.receive(doing)
        elif doing in ("first", "waits"):
            history.receive_step(needs_input=doing == "waits")
        elif doing == "input" and (waiting := history.waiting_steps()):
            choices.choice(waiting).has_input = True
        elif doing == "lost":
            history.lose_the_stage_before()
        elif doing == "end load" and (load := history.load) is not None:
            history.end_load(load)
        elif doing == "begin" and (this := history.expect_the_first_that_may_start()) is not None:
            history.begin(this)
        history.expect_the_first_that_may_start()
    # Nothing waits for ever: with all input here and loads over, all begins, commands in the order received.
    for stage in history.waiting_steps():
        stage.has_input = True
    begun = []
    while not all(each.is_over for each in history.received):
        if (this := history.expect_the_first_that_may_start()) is not None:
            history.begin(this)
            begun.append(this)
        else:
            assert history.load is not None, "nothing may start, and nothing is being loaded"
            history.end_load(history.load)
    in_order = [each for each in begun if each.kind is not None and not history.kind_is_beside(each)]
    commands = [history.received.index(each) for each in in_order]
    assert commands == sorted(commands) and len(history.stream) == 0


def newest_known(past: list[tuple[int, int]], group_id: int, max_groups: int) -> int | None:
    """The newest epoch of a group in the past, back to where so many other groups were used that it was forgotten."""
    newest, others = None, set()
    for past_group, past_epoch in reversed(past):
        if past_group == group_id:
            newest = past_epoch if newest is None else max(newest, past_epoch)
            others = set()
        else:
            others.add(past_group)
        if len(others) >= max_groups:
            break
    return newest


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60), st.integers(1, 4))
def test_any_step_is_refused_if_its_group_is_known_to_be_further(steps, max_groups) -> None:  # type: ignore[no-untyped-def]
    epochs = GroupEpochs(max_groups)
    for i, (group_id, epoch) in enumerate(steps):
        newest = newest_known(steps[:i], group_id, max_groups)
        assert (epochs.refusal(group_id, epoch) is not None) == (newest is not None and epoch < newest)
        assert len(epochs) <= max_groups
