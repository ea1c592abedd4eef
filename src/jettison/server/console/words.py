"""Records of the event log as sentences for an operator: what happened where, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jettison.core.ports import Record

Fields = Mapping[str, Any]

MOST_CHARS = 300
"""Most characters of a sentence, and of a reason."""

_MIB = 2.0**20

_PLAIN = {
    "memory binds": "memory is what requests wait for, and not the processor",
    "a pipeline would cost most of what memory saves": "one pipeline would be slower, by most of what its memory saves",
}
"""Reasons of the log that are short of words."""


class Told(NamedTuple):
    """One record in words."""

    rung: str
    """The mechanism: drop, restore, migrate, sleep, harvest, preempt, recover, scale."""
    what: str
    why: str = ""


def told_all(records: Sequence[Record]) -> list[tuple[Record, Told]]:
    """The records that have words, with them."""
    return [(record, said) for record in records if (said := told(record)) is not None]


def told(record: Record) -> Told | None:
    """The record's words; None for one that is of no use without its neighbours, or of a kind that is not known."""
    rung, make = _SENTENCES.get(record.kind, ("", None))
    if make is None:
        return None
    why = reason_of(record.fields)
    what = make(record.fields)[:MOST_CHARS]
    return Told(rung, what[:1].upper() + what[1:], why[:MOST_CHARS])


def reason_of(fields: Fields) -> str:
    """The reason that a record has, or an empty text."""
    reason = str(fields.get("because") or fields.get("reason") or "")
    return _PLAIN.get(reason, reason)


def amount(num_bytes: float) -> str:
    """Bytes in MiB, or in GiB from 8 of them."""
    mib = num_bytes / _MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 8192 else f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def span(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 0.0995:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def counted(num: object, one: str, many: str | None = None) -> str:
    """``1 request``, ``2 requests``."""
    return f"{num:,} {one if num == 1 else many or one + 's'}" if isinstance(num, int) else f"some {many or one + 's'}"


def listed(name: str, ids: object) -> str:
    """``instance 3``, ``instances 0 and 1``."""
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        return f"{name} {ids}"
    found = [str(each) for each in ids]
    if len(found) == 1:
        return f"{name} {found[0]}"
    shown = ", ".join(found[:-1][:12]) + (" and more" if len(found) > 13 else f" and {found[-1]}") if found else "none"
    return f"{name}s {shown}"


def _drop_decided(f: Fields) -> str:
    asked = listed("group", f.get("overloaded_groups") or [f.get("group")])
    return (
        f"{asked.capitalize()}: {amount(f.get('required_bytes', 0))} are missing for requests. Layers that other "
        f"instances hold are to be dropped, which gives {amount(f.get('freed_bytes', 0))}."
    )


def _drop(f: Fields) -> str:
    return (
        f"{listed('instance', f['workers']).capitalize()} dropped layers and run as one pipeline (group {f['group']}):"
        f" {amount(f['bytes_to_kv'])} more for requests, serving again after "
        f"{span(f.get('decision_to_serving_ms', 0.0) / 1e3)}."
    )


def _drop_declined(f: Fields) -> str:
    return f"Group {f.get('group')} lacks memory, and dropping layers would not help: its requests wait."


def _restore_begin(f: Fields) -> str:
    return (
        f"{listed('instance', f['workers']).capitalize()} take their layers back: "
        f"{counted(f.get('pulled_shards'), 'part')} are fetched, {counted(f.get('intact_shards'), 'part')} "
        "are still there."
    )


def _restore_done(f: Fields) -> str:
    took = f" It took {span(f['ms'] / 1e3)}." if "ms" in f else ""
    return f"{listed('instance', f.get('workers', [])).capitalize()} hold all layers and serve apart again.{took}"


def _migrated(f: Fields) -> str:
    return (
        f"A request moved from group {f.get('source')} to group {f.get('destination')} in "
        f"{span(f.get('ms', 0.0) / 1e3)}; it stood still for {span(f.get('stop_ms', 0.0) / 1e3)} of it."
    )


def _preempted(f: Fields) -> str:
    num = len(f.get("request_ids", ()))
    its = "its" if num == 1 else "their"
    return (
        f"{counted(num, 'request')} of group {f.get('group')} gave {its} memory up; what was there "
        f"({counted(f.get('tokens'), 'token')}) is computed again or copied back."
    )


def _rebalanced(f: Fields) -> str:
    num = f.get("requests")
    were = "was" if num == 1 else "were"
    return f"{counted(num, 'waiting request')} {were} sent to {listed('group', f.get('to', []))}."


def _pack(f: Fields) -> str:
    return f"A request goes from group {f.get('source')} to group {f.get('destination')}, so that fewer are in use."


def _falling_asleep(f: Fields) -> str:
    return f"Instance {f['worker']} is put to sleep; {counted(f.get('requests'), 'request')} go elsewhere or end first."


def _asleep(f: Fields) -> str:
    return f"Instance {f['worker']} sleeps, its memory given back (after {span(f.get('ms', 0.0) / 1e3)})."


def _woken(f: Fields) -> str:
    return f"Instance {f['worker']} is awake again (after {span(f.get('ms', 0.0) / 1e3)})."


def _worker_lost(f: Fields) -> str:
    return (
        f"Instance {f['worker']} is dead: {counted(f.get('requests'), 'request')} start over from the tokens that they"
        " have, and the process is started again."
    )


def _offline_stands(f: Fields) -> str:
    return f"Batch work of group {f.get('group')} stands still; requests of the chat go first."


def _paused(f: Fields) -> str:
    return f"Batch work of group {f['group']} is paused: {counted(f.get('running'), 'request')} give way."


def _group(text: str) -> Callable[[Fields], str]:
    """A sentence about one group, one instance, or several of either."""

    def make(f: Fields) -> str:
        workers = f.get("workers") or [f.get("worker", "?")]
        return text.format(
            group=f.get("group", "?"), worker=f.get("worker", "?"), workers=listed("instance", workers),
            Workers=listed("instance", workers).capitalize(), requests=counted(f.get("requests"), "request"),
            tokens=counted(f.get("tokens"), "token"))

    return make


_SENTENCES: dict[str, tuple[str, Callable[[Fields], str]]] = {
    "drop_decided": ("drop", _drop_decided),
    "drop": ("drop", _drop),
    "drop_declined": ("drop", _drop_declined),
    "drop_failed": ("drop", _group("A drop failed; {workers} serve on apart.")),
    "exchange_done": ("drop", _group("All KV cache is where the new pipeline needs it (group {group}).")),
    "restore_begin": ("restore", _restore_begin),
    "restore_done": ("restore", _restore_done),
    "restore_turned": ("restore", _group("A restore was called off: group {group} stays one pipeline.")),
    "split": ("restore", _group("The pipeline has parted; running requests go home one by one.")),
    "yield": ("restore", _group("Group {group} makes room for taking its layers back.")),
    "migrated": ("migrate", _migrated),
    "rebalanced": ("migrate", _rebalanced),
    "pack": ("migrate", _pack),
    "preempted": ("preempt", _preempted),
    "falling_asleep": ("sleep", _falling_asleep),
    "asleep": ("sleep", _asleep),
    "stays_awake": ("sleep", _group("Instance {worker} does not go to sleep.")),
    "sleep_put_off": ("sleep", _group("Idle instances stay awake for batch work.")),
    "wake_decided": ("sleep", _group("{Workers} are woken.")),
    "wake_declined": ("sleep", _group("Group {group} is short of something; waking a sleeper would not help in time.")),
    "woken": ("sleep", _woken),
    "worker_lost": ("recover", _worker_lost),
    "worker_joined": ("recover", _group("The process of instance {worker} is there, and empty yet.")),
    "worker_gone": ("recover", _group("Instance {worker} is gone for good: it died too often.")),
    "recovered": ("recover", _group("Instance {worker} serves again.")),
    "came_home": ("recover", _group("Instance {worker} holds all layers again.")),
    "recovery_stuck": ("recover", _group("Instance {worker} stays down.")),
    "step_failed": ("recover", lambda f: f"A step failed: {f.get('message', '')}."),
    "offline_paused": ("harvest", _paused),
    "offline_resumed": ("harvest", _group("Batch work of group {group} goes on.")),
    "offline_stands": ("harvest", _offline_stands),
    "offline_goes_on": ("harvest", _group("Batch work of group {group} goes on.")),
    "offline_yields": ("harvest", _group("{requests} of batches with later deadlines gave way to nearer ones.")),
    "offline_spread": ("harvest", _group("{requests} of batches go from group {group} to others.")),
    "offline_computed_again": ("harvest", _group("{requests} of batches in group {group} are computed again.")),
    "filling_stops": ("harvest", _group("Group {group} takes no more batch work for now: the chat will need its "
                                        "memory.")),
    "filling_goes_on": ("harvest", _group("Group {group} takes batch work again.")),
    "step_abandoned": ("harvest", _group("A step of batch work was given up for a request of the chat ({tokens}).")),
    "scale_out": ("scale", _group("Group {group} lacks memory that no instance here has: start another.")),
    "scale_out_over": ("scale", _group("No further instance is needed any more.")),
    "instance_asked": ("scale", _group("A process for instance {worker} is asked for.")),
    "instance_waits": ("scale", _group("Instance {worker} cannot be started yet.")),
    "instance_given_up": ("scale", _group("Instance {worker} is not started: nothing needs it any more.")),
    "instance_released": ("scale", _group("The process of instance {worker} has ended, as it was not needed.")),
}  # fmt: skip

UNTOLD = frozenset({
    "chunk_overtaken", "forecast_outcome", "packed", "queue_served", "restore_decided", "slice_computed",
    "slice_discarded", "step_shed", "step_shed_asked", "step_abandon_asked", "waking",
})  # fmt: skip
"""Kinds that the page leaves out: several a second, or told by another one."""

KINDS = frozenset(_SENTENCES)
"""Kinds with a sentence."""
