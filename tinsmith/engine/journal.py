"""The journal: histories in the database, written with the outcomes that they belong to, and read by the next engine.

    outcome + what it changed  ->  one transaction  ->  engine ends  ->  models that wait to come back (`replay.py`)

What an engine had computed and not recorded is gone with it, and is computed again. Of a pass that was recorded with an
operation of one model, the replay gives the results of all operations of that model that were in it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.history import CopiedForSave, Event, Fresh, History, Kept, Mark, Passed, Published, Saved, Stepped
from tinsmith.engine.model_state import LoadedModel, ModelState
from tinsmith.engine.passes import ForwardOperation
from tinsmith.errors import TinsmithError
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.records import Command, HistoryChange, StoredHistory

# ---- Written


def change_of(model: LoadedModel) -> HistoryChange | None:
    """Return what has changed in a model's history since this was last asked; None if nothing has.

    The answer has to be recorded, in the order of the answers. A model that would be lost is not in the journal.
    """
    history = model.history
    upto = history.needed_from.seq_id
    released = [(history.released_seq, upto)] if upto > history.released_seq else []
    history.released_seq = max(upto, history.released_seq)
    if history.given_up is not None:
        released.append(history.given_up)
        history.given_up = None
    if not history.kept:
        ends, model.journaled = model.journaled is not None, None
        return HistoryChange(model.model_id, released=released, ends=ends) if ends or released else None
    summary, begins = _summary(model), model.journaled is None
    numbers = history.numbered if begins else sorted(history.added)
    added = [(number, _event_to_json(history.numbered[number])) for number in numbers]
    removed = [] if begins else sorted(history.removed)
    history.added.clear()
    history.removed.clear()
    if summary == model.journaled and not (added or removed or released):
        return None
    model.journaled = summary
    return HistoryChange(model.model_id, summary, added, removed, released, begins)


def _summary(model: LoadedModel) -> dict[str, Any]:
    """All that is to be known of a model, but its events."""
    history = model.history
    return {
        "base_model": model.base_model,
        "shape": asdict(model.shape),
        "kept": [{"source": asdict(kept.source), "mark": asdict(kept.mark)} for kept in history.kept],
        "needed_from": history.kept[0].mark.seq_id,
        "state": history.state,
        "stepped_seq": history.stepped_seq,
        "seconds": history.seconds,
        "open_datums": history.open_datums,
        "open_is_given_up": history.open_is_given_up,
        "copy_failed": history.copy_failed,
        "wanted_s": history.wanted_s,
        "released_seq": history.released_seq,
        "whole_from": history.whole_from,
        "spoiled": model.spoiled,
        "added": model.added_seq,
        "stepped": model.stepped_seq,
        "told_of_empty_step": model.told_of_empty_step,
    }


def _event_to_json(event: Event) -> dict[str, Any]:
    match event:
        case Passed():
            pieces = [(command.seq_id, index) for command, index in event.pieces]
            return {"kind": "passed", "pieces": pieces} | {
                name: getattr(event, name) for name in ("state", "lengths", "pixels", "together", "routed")
            }
        case Stepped():
            return {"kind": "stepped"} | asdict(event)
        case Published():
            return {"kind": "published"} | asdict(event)
        case CopiedForSave():
            return {"kind": "copied", "mark": asdict(event.mark), "seq_id": event.command.seq_id}


# ---- Read


def restored(stored: StoredHistory) -> tuple[ModelState, list[ForwardOperation], set[int]]:
    """Return a model that waits to come back: its state, what is computed in part, and seq_ids that are not queued.

    Raises TinsmithError if the journal is not whole.
    """
    operations = {command.seq_id: command for command, _ in stored.operations}
    queued = {command.seq_id: command for command, is_queued in stored.operations if is_queued}
    events = {number: _event_from_json(event, operations) for number, event in stored.events.items()}
    model = _model_from(stored.model_id, stored.summary)
    model.history.restored(events)
    if model.history.open_is_given_up:
        model.spoil("the engine has ended, and the gradients are of too many datums to compute them again")
    for event in list(events.values()):
        if isinstance(event, CopiedForSave) and event.command.seq_id not in queued:
            model.history.forget_save(event.command)
    passed: defaultdict[int, set[int]] = defaultdict(set)
    for event in events.values():
        for command, index in event.pieces if isinstance(event, Passed) else ():
            passed[command.seq_id].add(index)
    begun = max((seq for seq in queued if seq in passed), default=-1)
    forward = [
        ForwardOperation(command, model.base_model, 0, in_journal=passed[seq])
        for seq, command in queued.items()
        if seq <= begun and command.kind == "forward_backward"
    ]
    saving = {event.command.seq_id for event in events.values() if isinstance(event, CopiedForSave)} & queued.keys()
    under_way = {*saving, *(operation.command.seq_id for operation in forward)}
    ended = {seq for seq in operations if seq not in queued}
    state = ModelState(stored.model_id, loaded=model)
    waiting = [command for seq, command in queued.items() if seq not in under_way]
    # What comes after the end of a session fails at once, before those that wait, which are cancelled
    state.queue = CommandQueue() if stored.session_is_over else _queue(ended, waiting, under_way, model)
    return state, forward, under_way


def _queue(ended: set[int], waiting: list[Command], under_way: set[int], model: LoadedModel) -> CommandQueue:
    """Return a queue that begins with the first command that waits. What is missing before an ended one was given up.

    Raises TinsmithError if something waits that would have to come before what has ended.
    """
    last = max([*ended, *under_way, model.history.stepped_seq])
    again = [command for command in waiting if command.seq_id < last]
    wrong = [command.request_id for command in again if command.kind != "forward_backward"]
    if wrong:
        raise TinsmithError(f"{wrong[0]} has not ended, and operations behind it have")
    queue = CommandQueue(next_seq=last + 1)
    if again:
        queue.next_seq = again[0].seq_id
        queue.ended = set(range(queue.next_seq, last + 1)) - {command.seq_id for command in again}
    return queue


def _model_from(model_id: str, summary: Mapping[str, Any]) -> LoadedModel:
    kept = [Kept(_source_from_json(each["source"]), Mark(**each["mark"])) for each in summary["kept"]]
    names = "state stepped_seq seconds open_datums open_is_given_up copy_failed wanted_s released_seq whole_from"
    history = History(kept, **{name: summary[name] for name in names.split()})
    return LoadedModel(
        model_id,
        summary["base_model"],
        LoraShape(**summary["shape"]),
        history,
        summary["spoiled"],
        summary["added"],
        summary["stepped"],
        summary["told_of_empty_step"],
        dict(summary),
    )


def _source_from_json(source: Mapping[str, Any]) -> Fresh | Saved:
    if "shape" in source:
        return Fresh(LoraShape(**source["shape"]), source["fingerprint"])
    return Saved(**source)


def _event_from_json(event: Mapping[str, Any], operations: Mapping[int, Command]) -> Event:
    fields = {name: value for name, value in event.items() if name != "kind"}
    match event["kind"]:
        case "passed":
            pieces = [(operations[seq_id], index) for seq_id, index in fields.pop("pieces")]
            return Passed(pieces=pieces, **fields)
        case "stepped":
            return Stepped(**fields)
        case "published":
            return Published(**fields)
    return CopiedForSave(Mark(**fields["mark"]), operations[fields["seq_id"]])
