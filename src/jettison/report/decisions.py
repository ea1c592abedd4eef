"""The decisions of a run, from its event log: each with its inputs, its prediction and its outcome.

Pure functions over a stored run. A move's later records hold the time since its begin, which is the time of its
decision. This links an outcome to its decision, whatever happened in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jettison.report.results import RunResult

Event = Mapping[str, Any]

SAME_MOMENT_S = 2e-3
"""Tolerance: records of one move agree on its begin up to the rounding of stored times."""

_CONTEXT = ("t", "kind", "group", "workers")


KINDS = (
    "drop", "no drop", "pack", "packed", "restore", "yield", "rebalance", "migrate", "scale out", "recover",
    "pause offline", "give up step", "shed rows", "compute again", "stand still", "stop filling", "sleep",
    "stay awake", "wake", "wake sleepers", "no wake", "preempt", "start instance", "give up start", "release instance",
)
"""Kinds of decisions. ``stand still``: no rule let offline work go on; the others are actions."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Values are as in the event log; keys end in their unit."""

    at_s: float
    kind: str
    """One of ``KINDS``; ``wait`` where an incident has no decision to begin with."""
    group: int | None
    workers: tuple[int, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """The outcome; empty where the log ends before it."""
    plan: tuple[Mapping[str, Any], ...] = ()
    """The merges of a drop: ``groups``, and ``stages`` in pipeline order (``worker``, ``layers``: first and end). Empty
    in logs of versions that did not record it."""


_ASSESSED = ("reason", "load", "merged_compute_load", "separate_compute_load")
_FORESEEN = (
    "memory_wait_s", "compute_wait_s", "stay_request_s", "taken_request_s", "possible_request_s",
    "stay_longest_wait_s", "taken_longest_wait_s",
)  # fmt: skip
"""Of drops made and declined; logs of earlier versions have compute's waits and loads in place of request-seconds."""


def decisions_of(run: RunResult) -> list[Decision]:
    """Every decision in the run's event log, by time; empty where the run has none."""
    log: Sequence[Event] = run.log()
    found: list[Decision] = []
    for event in log:
        make = _MAKERS.get(str(event["kind"]))
        if make is not None and not _is_usual(event):
            found.append(make(event, log, run))
    return sorted(found, key=lambda decision: decision.at_s)


def _pick(event: Event, names: Iterable[str]) -> dict[str, Any]:
    return {name: event[name] for name in names if event.get(name) is not None}


def _rest(event: Event, *left_out: str) -> dict[str, Any]:
    return {k: v for k, v in event.items() if k not in (*_CONTEXT, *left_out) and v is not None}


def _begun_at(log: Sequence[Event], kind: str, at_s: float, duration: str) -> list[Event]:
    """Records of a kind with a move that began at this time."""
    return [
        e for e in log
        if e["kind"] == kind and duration in e and abs(e["t"] - e[duration] / 1e3 - at_s) <= SAME_MOMENT_S
    ]


def _first_after(log: Sequence[Event], kinds: Sequence[str], at_s: float, workers: Iterable[int] = ()) -> Event | None:
    """The next record of one of these kinds; with ``workers``, the next that involves one of them."""
    wanted = set(workers)
    for event in log:
        if event["t"] >= at_s - SAME_MOMENT_S and event["kind"] in kinds:
            touched = set(event.get("workers") or [])
            if not wanted or not touched or wanted & touched:
                return event
    return None


# --- one maker for each kind of record that is a decision


def _drop(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    at_s = event["t"]
    drops = _begun_at(log, "drop", at_s, "decision_to_serving_ms")
    workers = tuple(sorted({w for e in drops for w in e["workers"]}))
    outcome: dict[str, Any] = {}
    if drops:
        outcome |= {
            "groups": [e["group"] for e in drops],
            "bytes_to_kv": sum(e["bytes_to_kv"] for e in drops),
            "remap_ms": max(e["remap_ms"] for e in drops),
            "serving_after_ms": max(e["decision_to_serving_ms"] for e in drops),
            "stalled_requests": sum(e["stalled"] for e in drops),
            "queue_then": sum(e["waiting"] for e in drops),
        }
    served = _begun_at(log, "queue_served", at_s, "decision_to_first_queued_step_ms")
    for name in ("decision_to_first_queued_step_ms", "step_in_flight_ms") if served else ():
        outcome[name] = max(e[name] for e in served)
    exchanged = _begun_at(log, "exchange_done", at_s, "ms")
    if exchanged:
        outcome |= {
            "exchange_ms": max(e["ms"] for e in exchanged), "exchanged_bytes": sum(e["bytes"] for e in exchanged),
        }
    outcome |= _outcome_of_forecast(event, log)
    failed = _first_after(log, ("drop_failed",), at_s)
    if not drops and failed is not None:
        outcome["failed"] = failed.get("reason")
    waited = _longest_wait_s(run, at_s)
    if waited is not None:
        outcome["longest_wait_in_queue_s"] = waited
    return Decision(
        at_s, "drop", event.get("group"), workers,
        _pick(event, (*_ASSESSED, "required_bytes", "overloaded_groups")),
        _pick(event, (*_FORESEEN, "freed_bytes", "sufficient", "pulled_shards", "throughput_cost")), outcome,
        tuple(event.get("merges") or ()),
    )


def _outcome_of_forecast(event: Event, log: Sequence[Event]) -> dict[str, Any]:
    """What a decision's forecast came to; empty where it had none, or the log ends before."""
    if event.get("taken_request_s") is None:
        return {}
    later_s = event["t"] + 2 * SAME_MOMENT_S  # at the moment itself the decision before may end
    seen = _first_after(log, ("forecast_outcome",), later_s)
    # The next decision ends the count; logs of earlier versions do not say whose it is.
    if seen is None or seen.get("decision", event["kind"]) != event["kind"]:
        return {}
    return _pick(seen, ("after_s", "foreseen_request_s", "seen_request_s"))


def _no_drop(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    waited = _longest_wait_s(run, event["t"])
    outcome = {} if waited is None else {"longest_wait_in_queue_s": waited}
    inputs, predicted = _pick(event, _ASSESSED), _pick(event, _FORESEEN)
    return Decision(event["t"], "no drop", event.get("group"), (), inputs, predicted, outcome)


def _restore(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    workers = tuple(event.get("workers") or ())
    outcome: dict[str, Any] = {}
    end = _first_after(log, ("restore_done", "restore_turned"), event["t"], workers)
    if end is not None:
        outcome = {"ended_as": end["kind"], "after_s": end["t"] - event["t"]} | _rest(end)
    about = ("restore_decided", "restore_begin")
    ours = [e for e in log[: log.index(event)] if e["kind"] in about and e.get("group") == event.get("group")]
    decided = ours[-1] if ours and ours[-1]["kind"] == "restore_decided" else {}
    if decided:
        outcome = _outcome_of_forecast(decided, log) | outcome
    predicted = _pick(decided, _FORESEEN)
    return Decision(event["t"], "restore", event.get("group"), workers, _rest(event), predicted, outcome)


def _yield(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _first_after(log, ("restore_begin",), event["t"])
    outcome = {} if end is None else {"restore_began_after_s": end["t"] - event["t"]}
    outcome |= _outcome_of_forecast(event, log)
    inputs, predicted = _rest(event, *_FORESEEN), _pick(event, _FORESEEN)
    return Decision(event["t"], "yield", event.get("group"), (), inputs, predicted, outcome)


def _scale_out(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _first_after(log, ("scale_out_over",), event["t"])
    outcome = {} if end is None else {"need_over_after_s": end["t"] - event["t"]}
    return Decision(event["t"], "scale out", event.get("group"), (), _rest(event), {}, outcome)


def _recover(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    outcome: dict[str, Any] = {}
    for kind, name in (("recovered", "survivor_ready_after_s"), ("worker_joined", "worker_back_after_s")):
        end = _first_after(log, (kind,), event["t"])
        if end is not None:
            outcome[name] = end["t"] - event["t"]
    return Decision(event["t"], "recover", None, (event["worker"],), _rest(event, "worker"), {}, outcome)


def _migrate(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    at_s = event["t"] - event.get("ms", 0.0) / 1e3
    inputs = _pick(event, ("request", "source", "destination"))
    return Decision(at_s, "migrate", event.get("source"), (), inputs, {}, _rest(event, *inputs))


def _pack(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """The move of one request to where the packing wants it. A migration may fail, or end after the log."""
    inputs = _pick(event, ("request", "source", "destination", "how", "goes_as", "reason"))
    outcome: dict[str, Any] = {}
    if event.get("how") == "migrated":
        later = log[bisect_left(log, event["t"], key=lambda e: e["t"]) :]
        end = next((e for e in later if e["kind"] == "migrated" and _began(e, event)), None)
        if end is not None:
            outcome = _rest(end, "request", "source", "destination")
    return Decision(event["t"], "pack", event.get("source"), (), inputs, {}, outcome)


def _began(end: Event, event: Event) -> bool:
    return end.get("request") == event["request"] and abs(end["t"] - end["ms"] / 1e3 - event["t"]) <= SAME_MOMENT_S


def _is_usual(event: Event) -> bool:
    """Whether an epoch of packing made all the moves that it wanted: each of them has a record of its own."""
    return event["kind"] == "packed" and not event.get("refused") and not event.get("pressure")


def _packed(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """An epoch of packing: the requests that it left where they are, and the cost and savings of moving them."""
    refused = event.get("refused") or ()
    outcome = _pick(event, ("queued", "migrated", "recomputed", "owed"))
    if refused:
        outcome["not_worth_it"] = [
            f"{r['request']} ({r['cost_device_s']:.3g} device-seconds for {r['saved_device_s']:.3g})" for r in refused
        ]
    inputs = _rest(event, "refused", *outcome)
    return Decision(event["t"], "packed", None, (), inputs, {}, outcome)


def _sleep(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _next_about(log, ("asleep", "stays_awake"), event)
    outcome: dict[str, Any] = {} if end is None else _rest(end, "worker")
    if end is not None:
        outcome["came_to"] = end["kind"]
    predicted = _pick(event, ("ahead_s", "online_blocks", "growth_blocks", "open_blocks"))
    inputs = _rest(event, "worker", *predicted)
    return Decision(event["t"], "sleep", None, (event["worker"],), inputs, predicted, outcome)


def _stay_awake(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """Instances stay awake for offline work: what they are predicted to do of it, and its price."""
    predicted = _pick(event, ("tokens_per_s", "next_tokens_per_s"))
    end = _first_after(log, ("falling_asleep",), event["t"])
    outcome = {} if end is None else {"next_sleep_after_s": end["t"] - event["t"]}
    return Decision(event["t"], "stay awake", None, (), _rest(event, *predicted), predicted, outcome)


def _wake(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _next_about(log, ("woken",), event)
    outcome = {} if end is None else {"serves_after_s": end["t"] - event["t"]} | _pick(end, ("map_ms", "pulled_bytes"))
    predicted = _pick(event, ("predicted_s",))
    return Decision(
        event["t"], "wake", None, (event["worker"],), _rest(event, "worker", *predicted), predicted, outcome
    )


def _wake_sleepers(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """A wake, or that none is worth it, with what was foreseen and what came of it."""
    predicted = _pick(event, (*_FORESEEN, "wake_s"))
    outcome: dict[str, Any] = {}
    workers = tuple(event.get("workers") or ())
    ends = [_next_about(log, ("woken", "stays_awake"), {"t": event["t"], "worker": w}) for w in workers]
    if any(ends):
        outcome["serves_after_s"] = min(end["t"] for end in ends if end is not None) - event["t"]
    if workers:
        outcome |= _outcome_of_forecast(event, log)
    kind = "wake sleepers" if workers else "no wake"
    return Decision(event["t"], kind, event.get("group"), workers, _rest(event, *predicted), predicted, outcome)


def _start_instance(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """A process that was asked for: how long it was to take, and took, and why it had to wait."""
    end = _next_about(log, ("woken", "instance_given_up"), event)
    waited = _next_about(log, ("instance_waits",), event)
    outcome: dict[str, Any] = {}
    if waited is not None and (end is None or waited["t"] <= end["t"]):
        outcome["waited_for"] = waited.get("reason")
    if end is not None and end["kind"] == "woken":
        outcome |= {"serves_after_s": end["t"] - event["t"]} | _pick(end, ("start_ms", "map_ms", "pulled_bytes"))
    elif end is not None:
        outcome["given_up_after_s"] = end["t"] - event["t"]
    predicted = _pick(event, ("predicted_s",))
    return Decision(
        event["t"], "start instance", None, (event["worker"],), _rest(event, "worker", *predicted), predicted, outcome
    )


def _give_back(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """A process that ended, or the start of one, as nothing needs it; when it was wanted again."""
    kind = "release instance" if event["kind"] == "instance_released" else "give up start"
    again = _next_about(log, ("instance_asked",), event)
    outcome = {} if again is None else {"asked_for_again_after_s": again["t"] - event["t"]}
    return Decision(event["t"], kind, None, (event["worker"],), _rest(event, "worker"), {}, outcome)


def _next_about(log: Sequence[Event], kinds: tuple[str, ...], event: Event) -> Event | None:
    """The next record of these kinds about the same worker."""
    later = log[bisect_left(log, event["t"], key=lambda e: e["t"]) :]
    return next((e for e in later if e["kind"] in kinds and e.get("worker") == event["worker"]), None)


def _rebalance(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    return Decision(event["t"], "rebalance", None, (), _rest(event), {}, {})


def _next_of(log: Sequence[Event], kind: str, event: Event) -> Event | None:
    """The next record of a kind about the same group and request."""
    about = event.get("group"), event.get("request")
    for at in range(bisect_left(log, event["t"], key=lambda e: e["t"]), len(log)):
        other = log[at]
        if other["kind"] == kind and (other.get("group"), other.get("request")) == about:
            return other
    return None


def _pause_offline(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _next_of(log, "offline_resumed", event)
    outcome = {} if end is None else {"paused_s": end["t"] - event["t"]}
    return Decision(event["t"], "pause offline", event["group"], (), _rest(event), {}, outcome)


def _give_up_step(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """A step to be given up. It may have ended before the order reached it."""
    end = _next_of(log, "step_abandoned", {"t": event["t"], "group": event["group"]})
    inputs = _pick(event, ("request", "deadline_ms", "offline", "kept"))
    outcome: dict[str, Any] = {}
    if end is not None and end["t"] - end["after_ms"] / 1e3 > event["t"]:  # a later step
        outcome = {"given_up": False}
    elif end is not None:
        outcome = {"given_up_after_ms": 1e3 * (end["t"] - event["t"]), "tokens": end["tokens"]}
    return Decision(event["t"], "give up step", event["group"], (), inputs, _rest(event, *inputs), outcome)


def _shed_rows(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """A step to shed its offline rows. It may have passed its last safepoint before the order reached it; what was shed
    is computed later, or given up."""
    about = {"t": event["t"], "group": event["group"]}
    inputs = _pick(event, ("request", "online", "offline"))
    shed = _next_of(log, "step_shed", about)
    outcome: dict[str, Any] = {"shed": False}
    if shed is not None and shed["t"] - shed["after_ms"] / 1e3 <= event["t"]:
        outcome = {"shed_after_ms": 1e3 * (shed["t"] - event["t"]), "tokens": shed["tokens"], "layers": shed["layers"]}
        ends = [end for kind in ("slice_computed", "slice_discarded")
                if (end := _next_of(log, kind, {"t": shed["t"], "group": event["group"]})) is not None]
        end = min(ends, key=lambda e: e["t"], default=None)
        if end is not None:
            came_ms = 1e3 * (end["t"] - shed["t"])
            outcome |= {"computed_after_ms": came_ms} if end["kind"] == "slice_computed" else {
                "discarded_after_ms": came_ms, "reason": end["reason"]}
    return Decision(event["t"], "shed rows", event["group"], (), inputs, _rest(event, *inputs), outcome)


def _compute_again(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    return Decision(event["t"], "compute again", event["group"], (), _rest(event), {}, {})


def _preempt(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    request_ids = event["request_ids"]
    inputs: dict[str, Any] = {"reason": event["reason"], "requests": len(request_ids)}
    if len(request_ids) == 1:
        inputs["request"] = request_ids[0]
    return Decision(event["t"], "preempt", event["group"], (), inputs, {}, {"tokens_computed_again": event["tokens"]})


def _stop_filling(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    """No step is filled with offline work any more: the memory that online requests are foreseen to need."""
    end = _next_of(log, "filling_goes_on", event)
    outcome = {} if end is None else {"filled_again_after_s": end["t"] - event["t"]} | _pick(end, ("online_blocks",))
    predicted = _pick(event, ("growth_blocks",))
    return Decision(event["t"], "stop filling", event["group"], (), _rest(event, *predicted), predicted, outcome)


def _stand_still(event: Event, log: Sequence[Event], run: RunResult) -> Decision:
    end = _next_of(log, "offline_goes_on", event)
    outcome = {} if end is None else {"went_on_after_s": end["t"] - event["t"]}
    return Decision(event["t"], "stand still", event["group"], (), _rest(event), {}, outcome)


_MAKERS = {
    "drop_decided": _drop, "drop_declined": _no_drop, "restore_begin": _restore, "yield": _yield,
    "scale_out": _scale_out, "worker_lost": _recover, "migrated": _migrate, "rebalanced": _rebalance,
    "offline_paused": _pause_offline, "step_abandon_asked": _give_up_step,
    "step_shed_asked": _shed_rows, "offline_computed_again": _compute_again,
    "offline_stands": _stand_still, "filling_stops": _stop_filling, "pack": _pack, "packed": _packed,
    "falling_asleep": _sleep, "sleep_put_off": _stay_awake, "waking": _wake, "preempted": _preempt,
    "wake_decided": _wake_sleepers, "wake_declined": _wake_sleepers, "instance_asked": _start_instance,
    "instance_given_up": _give_back, "instance_released": _give_back,
}


def _longest_wait_s(run: RunResult, at_s: float) -> float | None:
    """The longest time from now to a first token, of the requests that waited for one at this time; None without
    details."""
    ends = [row["scheduled_s"] + row["ttft_s"] for row in waiting_at(run, at_s)]
    return max(ends, default=at_s) - at_s if run.requests_detail else None


def waiting_at(run: RunResult, at_s: float) -> list[dict[str, Any]]:
    """Requests that waited for their first token at this time, and got it later."""
    return [
        row for row in run.requests_detail or []
        if row["ttft_s"] is not None and row["scheduled_s"] <= at_s <= row["scheduled_s"] + row["ttft_s"]
    ]
