"""Files of other tuners: T4 results that carry whole measurements, which are read back without loss, and the schedules that a
file lists, which can be raced. T4 results are turned into the lists of a table file, and then checked as such.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tiledsched.core.errors import DatabaseError
from tiledsched.core.fields import Knob
from tiledsched.core.files import from_csv_cell
from tiledsched.core.space import UNKNOWN

RECORD = "tiledsched"
"""The name under which a T4 result carries the whole measurement."""
FAILED_THERE = "failed in the tuner that wrote the file"
"""Begins why a configuration is of no use that another tuner found wrong, or could not compile."""
CUT_OFF = "the file ends in the middle of it"
"""Why the last row of a file is no candidate that was being written when its tuner was stopped."""
NO_TIME = 1e20
"""The time that Kernel Tuner wrote for what failed, before it wrote the kind of failure."""
DOTTED = "schedule."
"""How the columns of a CSV file begin that hold knobs, where others hold something else."""
OTHER_FILE = (
    "give JSON or T4 results that `tiledsched db export` wrote; schedules in other files can be raced: "
    "tiledsched tune --candidates FILE"
)


def rows_of_csv(text: str, name: str) -> list[dict[str, Any]]:
    """The schedule in each row of a CSV file: columns `schedule.KNOB` where the row has any, else a column `schedule` that holds
    an object, else all columns. Empty cells are left out.

    Raises:
        DatabaseError: it is not CSV, or a row has not as many cells as the header.
    """
    rows: list[dict[str, Any]] = []
    try:
        for cells in csv.DictReader(io.StringIO(text, newline=""), strict=True):
            if None in cells or None in cells.values():
                raise DatabaseError(f"{name}: row {len(rows) + 1} has not as many cells as the header; correct it")
            row = {column: _value(cell) for column, cell in cells.items() if cell}
            dotted = {column.removeprefix(DOTTED): value for column, value in row.items() if column.startswith(DOTTED)}
            whole = row.get("schedule")
            rows.append(dotted or (whole if isinstance(whole, dict) else row))
    except csv.Error as error:
        raise DatabaseError(f"{name} is no CSV: {error}; correct it") from error
    return rows


def _value(cell: str) -> Any:
    """What a cell holds: JSON, or text that is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(cell)
    return from_csv_cell(cell)


def of_json(data: Any, name: str) -> dict[str, Any] | None:
    """The lists of a table file, from another tuner's JSON; None where the JSON is no other tuner's.

    T4 metadata give empty lists, because each T4 result carries its whole measurement.

    Raises:
        DatabaseError: it holds times without machine code, or is damaged.
    """
    if not isinstance(data, dict):
        return None
    if "results" in data:
        return of_t4(data, name)
    if "metadata" in data and "measurements" not in data:
        return _table([], [])
    if "cache" in data and "tune_params" in data:
        raise DatabaseError(f"{name} names no machine code, without which a time is no evidence; {OTHER_FILE}")
    return None


def of_t4(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The lists of a table file, from T4 results. Results without a time are left out.

    Raises:
        DatabaseError: a result does not name its machine code, or contradicts the measurement that it carries.
    """
    measurements, artifacts, results = [], [], data["results"]
    if not isinstance(results, list) or not all(isinstance(each, dict) for each in results):
        raise DatabaseError(f"{name}: results: expected a list of objects; {OTHER_FILE}")
    for i, result in enumerate(results):
        listed = result.get("measurements")
        record = (
            next((each.get("value") for each in listed if isinstance(each, dict) and each.get("name") == RECORD), None)
            if isinstance(listed, list)
            else None
        )
        if record is None and result.get("invalidity") not in (None, "correct"):
            continue
        try:
            row = json.loads(record) if isinstance(record, str) else None
        except (ValueError, RecursionError):
            row = None
        taken = row.get("measurement") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(taken, dict):
            raise DatabaseError(
                f"{name}: results[{i}] names no machine code, without which a time is no evidence; {OTHER_FILE}"
            )
        if result.get("configuration") != taken.get("schedule"):
            raise DatabaseError(
                f"{name}: results[{i}].configuration: is not that of the measurement it carries; correct one"
            )
        artifacts.append(row.pop("artifact", None))
        measurements.append(row)
    return _table(measurements, artifacts)


def _table(measurements: list[dict[str, Any]], artifacts: Iterable[Any]) -> dict[str, Any]:
    once = {json.dumps(each, sort_keys=True): each for each in artifacts if each}
    return {"entries": [], "measurements": measurements, "artifacts": list(once.values())}


def configurations(text: str, name: str, knobs: Mapping[str, Knob]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The schedules in a file: a JSON list, T4 results, a Kernel Tuner cache, or CSV with a column for each knob (`tile_m` or
    `schedule.tile_m`).

    Other tuners write numbers as text and flags as numbers: a value that says what a choice of its knob says is that choice.

    Args:
        text: the file's text.
        name: the file's name. A file whose name ends in .csv, in any case, is read as CSV.
        knobs: the knobs of the space. In other formats than a JSON list, other names are left out.

    Returns:
        The schedules, and why the other rows of the file give none: each reason with the number of rows.

    Raises:
        DatabaseError: it is none of these.
    """
    rows: list[tuple[Any, str]]
    left_out, ours = Counter[str](), False
    if name.lower().endswith(".csv"):
        rows = [(row, "") for row in rows_of_csv(text, name)]
    else:
        data, left_out = _json_of(text)
        ours = isinstance(data, list)
        if ours and not all(isinstance(each, dict) for each in data):
            return data, left_out
        if ours:
            rows = [(each, "") for each in data]
        elif isinstance(data, dict) and isinstance(data.get("results"), list):
            rows = [_of_result(each) for each in data["results"]]
        elif isinstance(data, dict) and isinstance(data.get("cache"), dict):
            rows = [(each, _failure_of(each)) for each in data["cache"].values()]
        else:
            raise DatabaseError(
                f"{name} names no schedules; give a JSON list of them, T4 results, a Kernel Tuner cache, or CSV with "
                "knobs as columns"
            )
    found = []
    for row, failure in rows:
        chosen = _chosen(row, knobs) if isinstance(row, dict) else {}
        known = {knob: value for knob, value in chosen.items() if knob in knobs or ours}
        wrong = [
            f"{knob} = {value!r} is not one of {list(knobs[knob].choices)}"
            for knob, value in known.items()
            if knob in knobs and not isinstance(value, (bool, int, str))
        ]
        if failure or not known or wrong:
            left_out[failure or next(iter(wrong), UNKNOWN)] += 1
        else:
            found.append(known)
    return found, left_out


def _json_of(text: str) -> tuple[Any, Counter[str]]:
    """The JSON of a file, and why a row at its end was left out.

    The cache of a Kernel Tuner that still runs, or was stopped, is not closed yet; its last line may be cut off.
    """
    try:
        return json.loads(text), Counter()
    except json.JSONDecodeError:
        if '"cache"' in text:
            lines = text.rstrip()
            for whole, cut in ((lines, 0), (lines.rpartition("\n")[0], 1)):
                with suppress(json.JSONDecodeError):
                    return json.loads(whole.rstrip().rstrip(",") + "}}"), +Counter({CUT_OFF: cut})
        raise


def _of_result(result: Any) -> tuple[Any, str]:
    """The configuration of a T4 result, and why it is of no use; empty where it is."""
    if not isinstance(result, dict):
        return None, ""
    invalidity = result.get("invalidity", "correct")
    return result.get("configuration"), "" if invalidity == "correct" else f"{FAILED_THERE}: {invalidity}"


def _failure_of(row: Any) -> str:
    """Why the row of a Kernel Tuner cache has no time; empty where it has one."""
    us = row.get("time") if isinstance(row, dict) else 0.0
    if isinstance(us, (int, float)) and us < NO_TIME:
        return ""
    return f"{FAILED_THERE}: {us if isinstance(us, str) else 'no time'}"


def _chosen(row: Mapping[str, Any], knobs: Mapping[str, Knob]) -> dict[str, Any]:
    """The values of a row by name, as the choices of its knobs."""
    return {
        name.strip(): _choice(value, knobs[name.strip()]) if name.strip() in knobs else value
        for name, value in row.items()
    }


def _choice(value: Any, knob: Knob) -> Any:
    """The choice of a knob that a value says; the value itself where it says none."""
    if any(type(each) is type(value) and each == value for each in knob.choices):
        return value
    words = {_word(each): each for each in knob.choices}
    for flag in (each for each in knob.choices if isinstance(each, bool)):
        words.setdefault(str(int(flag)), flag)
    return words.get(_word(value), value)


def _word(value: Any) -> str:
    """What a value says, whatever its type: 128, 128.0 and "128" say the same, as do true and "True"."""
    if isinstance(value, str):
        value = value.strip().lower()
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()
