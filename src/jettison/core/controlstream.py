"""The control stream of one worker: the entries that it has received, which of them may start next, and which steps
cannot run.

One set of rules for the live worker (``live.worker.loop``) and the modelled one (``sim.worker``), which keep no copy of
them. Only the order is decided here: what an entry does, how long it takes and when bytes travel is the worker's part.
The numbers continue those of the rules on links and transfers (4, 5 and 8: ``live.worker.loop``).

Rule 1. The stream is obeyed in order, except that a step whose input has arrived overtakes steps that still wait for
        theirs.
Rule 2. A command (a layout, a transfer, a copy, a load, a report, a fence) begins only when every step received before
        it has been run here, and commands begin one after the other. A load goes on in pieces of a few MiB: one between
        two entries, and as many as there is time for while no entry may start. Layouts and further loads wait until it
        is over; nothing else does, so a step waits for one piece at most.
Rule 3. No step received after an ApplyLayout runs before it. Steps do not wait for anything else.
        A layout that only gives pages back (``ports.ApplyLayout.gives_back``), and a transfer of settled KV
        (``ports.SendKV.is_settled``), touch nothing that steps received before read or write. They begin as the next
        entry, behind nothing but the step being computed and commands before them: behind all steps received before, a
        pipeline's steps would hold each of them up for as many stage times as there are microbatches.
Rule 6. A step ends once, as done, failed or abandoned, and its last stage reports the end. A stage that fails, refuses
        a step, or has lost the stage before it, hands a ``Failure`` on in place of hidden states, so that each later
        stage ends its part, too.
        A step of an older epoch than its group has reached is refused. It waits for its input all the same, which
        otherwise no step would take.
        A first stage whose step may be given up looks at a flag before every few layers. Where the flag names the step,
        the stage stops there and hands that verdict on as it would a failure; later stages never look for themselves.
        A step that may shed rows (``ports.RunStep.sheds_from``) goes on without these, and the verdict travels with its
        hidden states: later stages compute the other rows alone. What is kept is one step's at a time; one that goes on
        with rows that are not kept any more fails, and its rows run again.
        A step that follows another (``ports.TokenSources``) needs tokens that the other has sampled here, and fails
        where that has sampled none. None of its rows is to blame: they run again.
        A step is orphaned when its input can no longer come: it waits no more, and fails when its turn comes. Input, or
        a failure in its place, that was complete before the loss is used; input that comes later is not.
Rule 7. A fence takes effect at once: nothing that the lost worker sent is used any more, and steps received before that
        wait for its output are orphaned. (Steps that wait for its next life are received after the fence.)
        The answer comes in order, as a command's: when every step received before has been run here.
Rule 9. A copy beside steps (``ports.SendKV.beside_steps``) begins when every layout received before it has been
        applied; one that writes blocks also when every step received before it has been run, for they may have been
        such a step's. It waits for no other command, and nothing waits for it. From then on it copies while steps run,
        in pieces, one copy after the other; only sealed blocks are read, and blocks that are written belong to no step
        before the end is reported. A layout stops the copying between two pieces, and then changes the mapping. After
        it the copies whose layers or blocks are not there any more end incomplete; the others go on where they were,
        in the blocks' new places. A cancellation ends a copy at its next piece, a fence does not touch it, the end of
        the worker waits for one piece. What has begun, or was cancelled before it could, ends with one TransferEnded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from jettison.types import LayerRange, TransferId, WorkerId

MAX_GROUPS_KNOWN = 256
"""Groups whose epoch a worker remembers: far more than exist at one time."""

LINK_GRACE_S = 1.0
"""A worker that a ``Failure`` names as lost is declared lost when its end has not been reported this much later."""


class Failure(NamedTuple):
    """Why a stage's part of a step did not happen."""

    message: str
    lost_worker: WorkerId | None = None
    """The worker whose part never came."""
    recompute: bool = False
    """Only a peer's attention was missing, or the tokens of the step before."""
    abandoned: bool = False
    """Nothing went wrong: the first stage gave the step up at a safepoint, as it was asked to."""
    kept_layers: int | None = None
    """Nothing went wrong: the first stage keeps all of the step's rows, which have so many of its layers behind
    them."""

    @classmethod
    def of_lost_input(cls, worker: WorkerId) -> Failure:
        """The stage before, on this worker, is gone."""
        return cls(f"worker {worker} went away before this step's input was complete", worker)


    @classmethod
    def of_lost_tokens(cls, step_id: int | None) -> Failure:
        """The step before, of this id, has not sampled the tokens that this one begins with."""
        return cls(f"step {step_id}, which samples this step's tokens, has sampled none", recompute=True)


    @classmethod
    def of_kept(cls, num_layers: int) -> Failure:
        """The first stage has computed so many layers of the step, which has no other rows than it keeps."""
        return cls("kept at a safepoint", kept_layers=num_layers)


ABANDONED = Failure("given up at a safepoint", abandoned=True)


class Kind(Enum):
    """The kind of a command, as far as it matters for the order."""

    OFFER_LAYOUT = auto()
    APPLY_LAYOUT = auto()
    GIVE_BACK = auto()
    """A layout that only gives pages back: it waits for no step, and no step for it."""
    TRANSFER = auto()
    """KV or a shard to a peer; it may be withdrawn until it begins."""
    SETTLED_TRANSFER = auto()
    """KV to a peer that no step writes; likewise. It waits for no step."""
    COPY = auto()
    """KV to this worker's host pool, or from there, between steps."""
    COPY_OUT_BESIDE = auto()
    """KV to the host pool, while steps run; it may be withdrawn until it begins."""
    COPY_IN_BESIDE = auto()
    """KV from the host pool, likewise."""
    LOAD = auto()
    """A shard from the model folder, in pieces."""
    REPORT = auto()
    FENCE = auto()


WAITS_FOR_LOAD = (Kind.OFFER_LAYOUT, Kind.APPLY_LAYOUT, Kind.GIVE_BACK, Kind.LOAD)
"""Commands that change the mapping or fill it: not while a shard is being filled."""

BESIDE = (Kind.COPY_OUT_BESIDE, Kind.COPY_IN_BESIDE)
"""Commands that keep to rule 9 in place of rule 2."""

OVERTAKES_STEPS = (Kind.GIVE_BACK, Kind.SETTLED_TRANSFER)
"""Commands that wait for other commands only (rule 3)."""

TRANSFERS = (Kind.TRANSFER, Kind.SETTLED_TRANSFER)

WITHDRAWABLE = (*TRANSFERS, *BESIDE)

Step = TypeVar("Step")
"""One stage's part of a step, as the worker keeps it."""
Command = TypeVar("Command")


@dataclass(slots=True, eq=False)
class StepEntry(Generic[Step]):
    """One stage's part of a step."""

    step: Step
    previous: WorkerId | None
    """The worker that it waits for the output of; None on a first stage."""
    failure: Failure | None = None
    """Why it will not run. If the stage before has failed, that failure goes before this one."""
    orphaned: bool = False
    """Its input can no longer come."""
    arrives_ns: int = 0


@dataclass(slots=True, eq=False)
class CommandEntry(Generic[Command]):
    """A command that waits for its turn."""

    command: Command
    kind: Kind
    transfer_id: TransferId | None = None
    """Of a command that may be withdrawn."""
    arrives_ns: int = 0


class GroupEpochs:
    """The newest epoch of each group, of the ``max_groups`` used last: every move makes a new group."""

    def __init__(self, max_groups: int = MAX_GROUPS_KNOWN) -> None:
        self._max_groups = max_groups
        self._newest: dict[int, int] = {}
        """By the time of use, the group used last at the end."""

    def __len__(self) -> int:
        return len(self._newest)

    def refusal(self, group_id: int, epoch: int) -> Failure | None:
        """Note a step of this group and epoch; returns why it must not run, if its epoch is past (rule 6)."""
        newest = self._newest.pop(group_id, epoch)
        self._newest[group_id] = epoch if epoch > newest else newest
        if len(self._newest) > self._max_groups:
            del self._newest[next(iter(self._newest))]
        if epoch >= newest:
            return None
        return Failure(f"step of epoch {epoch} of group {group_id}, which is at epoch {newest}")

    def clear(self) -> None:
        """Forget all groups: a new life."""
        self._newest.clear()


class ControlStream(Generic[Step, Command]):
    """The entries that one worker has received and not begun, in order, and the load under way. See the module's
    rules."""

    def __init__(self, has_input: Callable[[Step], bool]) -> None:
        """``has_input``: whether a later stage's step has all input from the stage before, or a failure in its
        place."""
        self._has_input = has_input
        self.holds_steps = False
        """No step is ready, whatever has arrived; commands that may begin do. For checks in which events have to
        meet."""
        self._entries: list[StepEntry[Step] | CommandEntry[Command]] = []
        """A few entries long: the controller keeps few steps in flight."""
        self._loading: CommandEntry[Command] | None = None
        """The load under way, which stays among the entries until it is over."""
        self._began_since_piece = False

    def __len__(self) -> int:
        """Entries that have not begun, and the load under way."""
        return len(self._entries)

    # --- receiving --------------------------------------------------------------------------------------------

    def admit(
        self, step: Step, previous: WorkerId | None, refusal: Failure | None, *, is_linked: bool, arrives_ns: int = 0
    ) -> StepEntry[Step]:
        """A step's entry, still outside of the stream. ``is_linked``: the stage before can reach this worker.

        ``arrives_ns``: an entry may be put into the stream before it is received; it, and all behind it, wait until
        then.
        """
        entry = StepEntry(step, previous, refusal, False, arrives_ns)
        if previous is not None and not is_linked:
            self._orphan(entry, previous)
        return entry

    def append(self, entry: StepEntry[Step]) -> None:
        """Take a step into the stream."""
        self._entries.append(entry)

    def append_command(
        self, command: Command, kind: Kind, transfer_id: TransferId | None = None, arrives_ns: int = 0
    ) -> None:
        """Take a command into the stream; ``transfer_id``: of a command that may be withdrawn."""
        self._entries.append(CommandEntry(command, kind, transfer_id, arrives_ns))

    # --- the next entry ---------------------------------------------------------------------------------------

    def is_ready(self, entry: StepEntry[Step]) -> bool:
        """Whether a step waits for no input: the input is here, or none is needed, or it can no longer come."""
        if self.holds_steps:
            return False
        return entry.previous is None or entry.orphaned or self._has_input(entry.step)

    def next_entry(self, now_ns: int = 0) -> StepEntry[Step] | CommandEntry[Command] | None:
        """The first entry that may start (rules 1 to 3 and 9); None if all have to wait."""
        if (ahead := self._overtaking(now_ns)) is not None:
            return ahead
        earlier_step = earlier_command = False
        for entry in self._entries:
            if entry.arrives_ns > now_ns:
                return None
            if isinstance(entry, StepEntry):
                if self.is_ready(entry):
                    return entry
                earlier_step = True
                continue
            if entry is self._loading:
                continue
            if entry.kind in BESIDE:
                if entry.kind is Kind.COPY_OUT_BESIDE or not earlier_step:
                    return entry
                continue
            waits_for_load = self._loading is not None and entry.kind in WAITS_FOR_LOAD
            if not earlier_step and not earlier_command and not waits_for_load:
                return entry
            if entry.kind is Kind.APPLY_LAYOUT:
                return None
            earlier_command = True
        return None

    def _overtaking(self, now_ns: int) -> CommandEntry[Command] | None:
        """The first command, where it is one that waits for no step and may begin (rule 3); else None."""
        for entry in self._entries:
            if entry.arrives_ns > now_ns:
                return None
            if isinstance(entry, StepEntry) or entry is self._loading or entry.kind in BESIDE:
                continue
            waits_for_load = self._loading is not None and entry.kind in WAITS_FOR_LOAD
            return entry if entry.kind in OVERTAKES_STEPS and not waits_for_load else None
        return None

    def next_arrival_ns(self, now_ns: int) -> int | None:
        """When the next entry that has not been received by now will be."""
        for entry in self._entries:
            if entry.arrives_ns > now_ns:
                return entry.arrives_ns
        return None

    def begin(self, entry: StepEntry[Step] | CommandEntry[Command]) -> None:
        """An entry starts, and leaves the stream; a load stays until ``end_load``."""
        self._began_since_piece = True
        if isinstance(entry, CommandEntry) and entry.kind is Kind.LOAD:
            self._loading = entry
        else:
            self._entries.remove(entry)

    @property
    def owes_piece(self) -> bool:
        """A load is under way, and a piece of it comes before the next entry begins (rule 2)."""
        return self._loading is not None and self._began_since_piece

    def note_piece(self) -> None:
        """A piece of the load under way has been loaded."""
        self._began_since_piece = False

    def end_load(self) -> None:
        """The load under way is over, whether it is complete or has failed."""
        assert self._loading is not None, "no load is under way"
        self._entries.remove(self._loading)
        self._loading = None

    # --- losses and withdrawals -------------------------------------------------------------------------------

    def orphan(self, worker: WorkerId) -> None:
        """The link to a worker is lost, or fenced: steps that still wait for its output get none (rules 6 and 7)."""
        for entry in self.steps():
            if entry.previous == worker:
                self._orphan(entry, worker)

    def _orphan(self, entry: StepEntry[Step], worker: WorkerId) -> None:
        if not entry.orphaned and not self._has_input(entry.step):
            entry.orphaned = True
            entry.failure = Failure.of_lost_input(worker)

    def withdraw(self, transfer_id: TransferId) -> Command | None:
        """Take out a transfer that has not begun, or a copy beside steps; None if no such command waits. The withdrawal
        need not wait for the steps before it: nothing of the transfer will be read."""
        for entry in self._entries:
            if isinstance(entry, CommandEntry) and entry.kind in WITHDRAWABLE and entry.transfer_id == transfer_id:
                self._entries.remove(entry)
                return entry.command
        return None

    def withdraw_transfers(self, is_meant: Callable[[Command], bool]) -> None:
        """Take out all transfers that have not begun and for which ``is_meant`` is true."""
        self._entries = [
            entry for entry in self._entries
            if not (isinstance(entry, CommandEntry) and entry.kind in TRANSFERS and is_meant(entry.command))
        ]

    def steps(self) -> Iterator[StepEntry[Step]]:
        """Steps that have not begun, in order."""
        return (entry for entry in self._entries if isinstance(entry, StepEntry))

    def clear(self) -> None:
        """The worker is dead."""
        self._entries.clear()
        self._loading = None


@dataclass(slots=True, eq=False)
class BesideCopy:
    """A copy inside one worker that runs beside its steps."""

    transfer_id: TransferId
    layers: LayerRange
    blocks: Sequence[int]
    """Blocks of the arenas. A layout may move them."""
    slots: Sequence[int]
    """Slots of the host pool."""
    to_host: bool


class CopiesBeside:
    """The copies that have begun and not ended, in order: the first one copies (rule 9)."""

    def __init__(self) -> None:
        self._copies: dict[TransferId, BesideCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[BesideCopy]:
        return iter(self._copies.values())

    @property
    def first(self) -> BesideCopy | None:
        """The copy that runs now, unless a layout is being applied."""
        return next(iter(self), None)

    def begin(self, copy: BesideCopy) -> None:
        """Queue a copy behind the copies that have begun."""
        assert copy.transfer_id not in self._copies, f"copy {copy.transfer_id} begins twice"
        self._copies[copy.transfer_id] = copy

    def end(self, transfer_id: TransferId) -> BesideCopy | None:
        """A copy is complete, has failed or is cancelled. None where it has ended before: its end is reported once."""
        return self._copies.pop(transfer_id, None)

    def change_layout(
        self, kv_layers: LayerRange, capacity_blocks: int, moved: Sequence[tuple[int, int]]
    ) -> list[BesideCopy]:
        """A layout has been applied while nothing was copied: arenas now have ``kv_layers`` and ``capacity_blocks``,
        and the contents of some blocks moved ``(from, to)``. Returns the copies that end incomplete with it."""
        places = dict(moved)
        for copy in self:
            copy.blocks = [places.get(block, block) for block in copy.blocks]
        gone = [
            copy for copy in self
            if not kv_layers.covers(copy.layers) or max(copy.blocks, default=0) >= capacity_blocks
        ]
        for copy in gone:
            del self._copies[copy.transfer_id]
        return gone

    def clear(self) -> None:
        """The worker is dead."""
        self._copies.clear()
