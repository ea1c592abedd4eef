"""The blocks of one group's requests, alike in every stage: how much room there is, which requests take and give it,
what is cached.

It works on the ledgers of the group's workers, which other groups may share. ``core.serving.queues`` has the requests,
and ``core.serving.group`` decides which of them gets blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from jettison.core.changes import Changes
from jettison.core.requests import RequestState
from jettison.core.serving.holds import Holder
from jettison.core.serving.limits import SchedulerLimits
from jettison.memory.blocks import BlockLedger
from jettison.memory.prefix import PrefixHasher
from jettison.types import GroupId, RequestId, WorkerId


class GroupBlocks:
    """The blocks of a group's requests in every stage: counts of them, and the calls that take, share and give them
    back."""

    def __init__(
        self,
        group_id: GroupId,
        worker_ids: tuple[WorkerId, ...],
        ledgers: Mapping[WorkerId, BlockLedger],
        limits: SchedulerLimits,
        hasher: PrefixHasher,
        changes: Changes,
    ) -> None:
        self.ledgers = tuple(ledgers[w] for w in worker_ids)
        """Ledgers of its workers, in pipeline order."""
        self.landing: Mapping[WorkerId, int] = {}
        """Blocks that incoming KV will need, of all owners: admission leaves them free. ``reserve`` sets it."""
        self.admission_cap: int | None = None
        """Admission stops at this number of blocks, the least that an owner asks for, although more are free: the group
        is to fit into less memory soon. ``cap_admission`` and ``uncap_admission`` set it."""
        self.caps: dict[Holder, int] = {}
        """The cap that each owner has asked for. Read it."""
        self._reserved: dict[Holder, Mapping[WorkerId, int]] = {}
        self._group_id = group_id
        self._worker_ids = worker_ids
        self._limits = limits
        self._hasher = hasher
        self._changes = changes
        # Most groups have one stage: numbers read at every step then need no loop.
        self._only_ledger = self.ledgers[0] if len(worker_ids) == 1 else None
        self._seals = limits.enable_prefix_caching

    # --- settings of other modules ----------------------------------------------------------------------------

    @property
    def seals(self) -> bool:
        """Whether full blocks are registered in the prefix cache, and prefixes taken from it. False where prefixes are
        not cached, and while the group's blocks hold fewer layers than others in the same ledgers. Changing it has the
        group planned again."""
        return self._seals

    @seals.setter
    def seals(self, seals: bool) -> None:
        if seals != self._seals:
            self._seals = seals
            self._changes.touch(self._group_id)

    def reserve(self, owner: Holder, blocks: Mapping[WorkerId, int]) -> None:
        """Have admission leave ``blocks`` free at each worker for ``owner``, beside the reservations of others. A
        change has the group planned again.

        They replace the owner's earlier reservation; an empty one removes it.
        """
        if blocks == self._reserved.get(owner, {}):
            return
        self._reserved[owner] = blocks
        if not blocks:
            del self._reserved[owner]
        landing: Counter[WorkerId] = Counter()
        for reserved in self._reserved.values():
            landing.update(reserved)
        self.landing = landing
        self._changes.touch(self._group_id)

    def reserve_everywhere(self, owner: Holder, num_blocks: int) -> None:
        """``reserve`` as many at each of the group's workers; 0 removes the owner's reservation."""
        self.reserve(owner, dict.fromkeys(self._worker_ids, num_blocks) if num_blocks else {})

    def cap_admission(self, owner: Holder, num_blocks: int) -> None:
        """Have admission stop at ``num_blocks`` held ones until ``owner`` removes its cap, which replaces its earlier
        one. Of several owners' caps the least holds; where that changes, the group is planned again."""
        self.caps[owner] = num_blocks
        self._note_caps()

    def uncap_admission(self, owner: Holder) -> None:
        """Remove the cap of ``owner``, if it has one; where the least cap changes by that, the group is planned
        again."""
        self.caps.pop(owner, None)
        self._note_caps()

    def _note_caps(self) -> None:
        cap = min(self.caps.values(), default=None)
        if cap != self.admission_cap:
            self.admission_cap = cap
            self._changes.touch(self._group_id)

    # --- room -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change of a ledger of the group's workers, by any group."""
        if self._only_ledger is not None:
            return self._only_ledger.version
        return sum(ledger.version for ledger in self.ledgers)

    @property
    def capacity(self) -> int:
        """All blocks of the tightest stage, held ones included."""
        if self._only_ledger is not None:
            return self._only_ledger.capacity
        return min(ledger.capacity for ledger in self.ledgers)

    @property
    def num_allocatable(self) -> int:
        """Free and cached blocks of the tightest stage, reserved ones included."""
        if self._only_ledger is not None:
            return self._only_ledger.num_free
        return min(ledger.num_free for ledger in self.ledgers)

    @property
    def num_free(self) -> int:
        """Blocks that admission may take, watermark included: allocatable blocks of the tightest stage, less those
        reserved for incoming KV there, and no more than the cap on admission leaves. Negative where more are reserved
        than allocatable, or more held than the cap."""
        if self.landing:
            num_free = min(
                ledger.num_free - self.landing.get(worker_id, 0)
                for ledger, worker_id in zip(self.ledgers, self._worker_ids, strict=True)
            )
        else:
            num_free = self.num_allocatable
        if self.admission_cap is None:
            return num_free
        return min(num_free, self.admission_cap - self.num_used)

    @property
    def num_used(self) -> int:
        """Blocks held in the fullest stage."""
        if self._only_ledger is not None:
            return self._only_ledger.num_held
        return max(ledger.num_held for ledger in self.ledgers)

    def num_used_by(self, request_ids: Iterable[RequestId]) -> int:
        """Blocks of these requests in the first stage, a shared block once for each of them; none for an unknown
        request. (The ledgers may hold blocks of other groups' requests, too.)"""
        tables = self.ledgers[0].tables
        return sum([len(tables[request_id].ids) for request_id in request_ids if request_id in tables])

    def num_distinct(self, request_ids: Iterable[RequestId]) -> int:
        """Blocks of these requests in the first stage, each block once; none for an unknown request. O(their blocks),
        where any is shared."""
        tables, shared = self.ledgers[0].tables, self.ledgers[0].shared
        held = [tables[request_id].ids for request_id in request_ids if request_id in tables]
        twice = [i for ids in held if not shared.isdisjoint(ids) for i in ids if i in shared] if shared else []
        return sum(map(len, held)) - len(twice) + len(set(twice))

    def num_used_without(self, request_ids: Iterable[RequestId]) -> int:
        """Blocks held in the fullest stage, without those that one of these requests holds alone in the first stage."""
        ledger = self.ledgers[0]
        return self.num_used - sum(ledger.num_exclusive_blocks(r) for r in request_ids if ledger.has(r))

    def num_to_grow(self, states: Iterable[RequestState], num_steps: int) -> int:
        """Blocks that these requests lack for their present tokens and ``num_steps`` more, one a step."""
        tables, size = self.ledgers[0].tables, self._limits.block_size
        total = 0
        for state in states:
            table = tables.get(state.request_id)
            lacking = -(-(state.num_tokens + num_steps) // size) - (len(table.ids) if table is not None else 0)
            if lacking > 0:
                total += lacking
        return total

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free, so that running requests can grow: a share of the capacity."""
        return int(self._limits.watermark * self.capacity)

    def is_oversized(self, state: RequestState) -> bool:
        """Whether the group could not hold the request's tokens even if it were alone: it has to wait for a larger
        group."""
        return self._limits.blocks_for(state.num_tokens) > self.capacity

    # --- taking and giving ------------------------------------------------------------------------------------

    def admit(self, state: RequestState, num_cached_tokens: int) -> int:
        """Take blocks in every stage for all tokens of a request, which must have none; the blocks of its cached prefix
        are shared.

        Returns how many tokens are cached after all: an admission before this one in the same plan may have evicted
        cached blocks that the plan counted on. The plan counted these as allocatable as well, so there is room to
        compute them instead.
        """
        assert not self.ledgers[0].has(state.request_id), f"{state} has blocks already"
        num_cached_blocks = 0
        if num_cached_tokens:
            hashes = state.hashes[: num_cached_tokens // self._limits.block_size]
            found = [ledger.lookup(hashes) for ledger in self.ledgers]
            num_cached_blocks = min(len(ids) for ids in found)
            for ledger, ids in zip(self.ledgers, found, strict=True):
                ledger.adopt_prefix(state.request_id, ids[:num_cached_blocks])
        num_new = self._limits.blocks_for(state.num_tokens) - num_cached_blocks
        for ledger in self.ledgers:
            ledger.allocate(state.request_id, num_new)
        return num_cached_blocks * self._limits.block_size

    def can_admit(self, state: RequestState, num_cached_tokens: int) -> bool:
        """Whether every stage has room for a request that was planned with so many cached tokens, as its cached prefix
        is now. A plan counts on blocks that other requests hold. Where these come after a cached block in the chain,
        and growth or an admission in the same plan has evicted that one, no look-up finds them: then this request takes
        more than planned, or one before it has."""
        total = self._limits.blocks_for(state.num_tokens)
        if not num_cached_tokens:
            return total <= min(ledger.num_free for ledger in self.ledgers)
        hashes = state.hashes[: num_cached_tokens // self._limits.block_size]
        found = [ledger.lookup(hashes) for ledger in self.ledgers]
        num = min(len(ids) for ids in found)
        return all(
            total - sum(map(ledger.is_held, ids[:num])) <= ledger.num_free
            for ledger, ids in zip(self.ledgers, found, strict=True)
        )

    def grow(self, state: RequestState, num_blocks: int) -> None:
        """Append ``num_blocks`` allocatable blocks to the request's table in every stage. Raises OutOfBlocksError where
        a stage has too few."""
        for ledger in self.ledgers:
            ledger.allocate(state.request_id, num_blocks)

    def release(self, state: RequestState) -> None:
        """Give back the request's blocks in every stage that has some; sealed ones stay in the prefix cache."""
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                ledger.release(state.request_id)

    def num_tokens_held(self, state: RequestState) -> int:
        """Tokens that the request's blocks have room for, in the stage that has the fewest of them; 0 without
        blocks."""
        return min(ledger.num_blocks_of(state.request_id) for ledger in self.ledgers) * self._limits.block_size

    def num_exclusive(self, state: RequestState) -> int:
        """Blocks that the request shares with no other, in the stage that has the most of them; 0 for a request without
        blocks."""
        most = 0
        for ledger in self.ledgers:
            if ledger.has(state.request_id):
                most = max(most, ledger.num_exclusive_blocks(state.request_id))
        return most

    # --- prefix cache -----------------------------------------------------------------------------------------

    def uses_cache(self, state: RequestState) -> bool:
        """Whether the request takes a prefix from the cache: the group seals blocks, and the client wants no logprobs
        of the prompt, which need all of it to be computed."""
        return self._seals and state.prompt_logprobs is None

    def prompt_names(self, state: RequestState) -> list[bytes]:
        """Chain hashes of the full blocks of the request's prompt; none where it takes nothing from the cache."""
        if not self.uses_cache(state):
            return []
        return self._hashes(state, state.num_prompt // self._limits.block_size)

    def cached_prefix(self, state: RequestState, most_tokens: int | None = None) -> tuple[int, int]:
        """(tokens found in the cache of every stage, allocatable blocks that admission takes). A request that takes
        nothing from the cache has (0, all blocks of its tokens).

        ``most_tokens``: most tokens to look up; None: all but the last, which is to be computed.
        """
        total = self._limits.blocks_for(state.num_tokens)
        if not self.uses_cache(state):
            return 0, total
        most_tokens = state.num_tokens - 1 if most_tokens is None else most_tokens
        hashes = self._hashes(state, most_tokens // self._limits.block_size)
        hits = [ledger.lookup(hashes) for ledger in self.ledgers]
        num = min(len(found) for found in hits)
        shared = min(
            sum(ledger.is_held(block) for block in found[:num])
            for ledger, found in zip(self.ledgers, hits, strict=True)
        )
        return num * self._limits.block_size, total - shared

    def num_with_one_holder(self, state: RequestState, num_cached_tokens: int) -> int:
        """Blocks of a request's cached prefix that exactly one other request holds, in the stage that has the most of
        them."""
        hashes = self._hashes(state, num_cached_tokens // self._limits.block_size)
        return max(
            sum(ledger.is_held(block) and not ledger.is_shared(block) for block in ledger.lookup(hashes))
            for ledger in self.ledgers
        )

    def seal(self, state: RequestState) -> None:
        """Register the request's computed full blocks in the prefix cache. Nothing for a request that is ending, or
        that attends to KV on other workers."""
        # A stage that attends to a block remotely must not have it in its prefix cache.
        if state.ending is None and not state.remote:
            state.num_sealed = self.seal_between(state, state.num_sealed, state.num_computed)

    def seal_between(self, state: RequestState, num_sealed: int, num_tokens: int) -> int:
        """Register the full blocks of ``num_tokens`` leading tokens in every stage's prefix cache, except for the first
        ``num_sealed``, which are registered. Returns how many are registered now. Nothing while the group does not
        seal."""
        if not self._seals:
            return num_sealed
        num_full = num_tokens // self._limits.block_size
        hashes = self._hashes(state, num_full)
        for index in range(num_sealed, num_full):
            for ledger in self.ledgers:
                ledger.seal(state.request_id, index, hashes[index])
        return num_full

    def _hashes(self, state: RequestState, num_blocks: int) -> list[bytes]:
        """Chain hashes of the request's first ``num_blocks`` full blocks; missing ones are computed and kept in the
        request."""
        known = len(state.hashes)
        if known < num_blocks:
            size = self._limits.block_size
            parent = state.hashes[-1] if state.hashes else None
            state.hashes += self._hasher.chain(
                state.tokens_between(known * size, num_blocks * size), state.request.cache_salt, parent
            )
        return state.hashes[:num_blocks]

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the ledgers' invariants, for tests and idle moments. Raises AssertionError."""
        for ledger in self.ledgers:
            ledger.check()

    def check_holds(self, state: RequestState) -> None:
        """Check that a running request has blocks for all that it has computed or has in flight. Raises
        AssertionError."""
        for ledger in self.ledgers:
            have = ledger.num_blocks_of(state.request_id) * self._limits.block_size
            assert have >= state.num_computed + state.num_pending, state
