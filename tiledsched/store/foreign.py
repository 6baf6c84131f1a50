"""Measurements in other formats, which are read back without loss: CSV for data frames and spreadsheets, T4 results for other
tuners. Both are turned into the lists of a table file, and then checked as such.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from tiledsched.core.errors import DatabaseError
from tiledsched.core.files import csv_text, from_csv_cell
from tiledsched.measure.runner import Measurement

RECORD = "tiledsched"
"""The name under which a T4 result carries the whole measurement."""
TAKEN = frozenset(field.name for field in fields(Measurement))
OTHER_FILE = (
    "give a file that `tiledsched db export --landscapes` wrote; configurations from elsewhere can be raced: "
    "tiledsched tune --candidates FILE"
)


def to_csv(measurements: Iterable[Mapping[str, Any]], artifacts: Iterable[Mapping[str, Any]]) -> str:
    """The text of a CSV file with a row for each measurement, and a column for each of its values and its machine code's facts.

    Nested values have names with dots, such as `schedule.tile_m`. Text stands as it is unless it would be read as JSON, and
    all other values as JSON.

    Args:
        measurements: rows as in a table file.
        artifacts: rows as in a table file.
    """
    known = {(each["arch"], each["fingerprint"]): each for each in artifacts}
    rows = []
    for row in measurements:
        taken = row["measurement"]
        artifact = known.get((taken["device"]["arch"], taken["fingerprint"]), {})
        whole = {**row, **taken, "artifact": artifact}
        del whole["measurement"]
        rows.append(dict(_flat(whole, "")))
    return csv_text(rows)


def _flat(value: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flat(each, f"{before}{key}.")
        else:
            yield (
                before + key,
                each if isinstance(each, str) and not _is_json(each) else json.dumps(each, ensure_ascii=False),
            )


def _is_json(text: str) -> bool:
    if not text:
        return True
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def rows_of_csv(text: str, name: str) -> list[dict[str, Any]]:
    """The rows of a CSV file as nested objects. Empty cells are left out.

    Raises:
        DatabaseError: it is not CSV with a header, or one name stands both for a value and for an object.
    """
    rows: list[dict[str, Any]] = []
    try:
        for cells in csv.DictReader(io.StringIO(text, newline=""), strict=True):
            row: dict[str, Any] = {}
            for column, cell in cells.items():
                if column is None or cell is None:
                    raise DatabaseError(f"{name}: row {len(rows) + 1} has not as many cells as the header; correct it")
                if cell:
                    _put(row, column, json.loads(cell) if _is_json(cell) else from_csv_cell(cell))
            rows.append(row)
    except (csv.Error, AttributeError, TypeError) as error:
        raise DatabaseError(f"{name} is no CSV with a header of different names: {error}; {OTHER_FILE}") from error
    return rows


def _put(row: dict[str, Any], column: str, value: Any) -> None:
    *path, last = column.split(".")
    for key in path:
        row = row.setdefault(key, {})
    row[last] = value


def of_csv(text: str, name: str) -> dict[str, Any]:
    """The lists of a table file, from CSV.

    Raises:
        DatabaseError: it is not CSV with measurements.
    """
    rows = rows_of_csv(text, name)
    if not rows or not all("uid" in row and "fingerprint" in row for row in rows):
        raise DatabaseError(
            f"{name}: its rows name no machine code (uid, fingerprint), without which a time is no evidence; {OTHER_FILE}"
        )
    artifacts = [row.pop("artifact", None) for row in rows]
    measurements = []
    for row in rows:
        taken = {key: row.pop(key) for key in list(row) if key in TAKEN}
        measurements.append({**row, "measurement": taken})
    return _table(measurements, artifacts)


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
    measurements, artifacts = [], []
    for i, result in enumerate(_results(data, name)):
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


def _results(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    results = data["results"]
    if not isinstance(results, list) or not all(isinstance(each, dict) for each in results):
        raise DatabaseError(f"{name}: results: expected a list of objects; {OTHER_FILE}")
    return results


def _table(measurements: list[dict[str, Any]], artifacts: Iterable[Any]) -> dict[str, Any]:
    once = {json.dumps(each, sort_keys=True): each for each in artifacts if each}
    return {"entries": [], "measurements": measurements, "artifacts": list(once.values())}


def configurations(text: str, name: str, knobs: Iterable[str]) -> list[dict[str, Any]]:
    """The schedules in a file: a JSON list, T4 results, a Kernel Tuner cache, or CSV with a column for each knob (`tile_m` or
    `schedule.tile_m`).

    Args:
        text: the file's text.
        name: the file's name. A file whose name ends in .csv is read as CSV.
        knobs: the knobs of the space. Other values are left out.

    Raises:
        DatabaseError: it is none of these.
    """
    wanted = frozenset(knobs)

    def of(found: Iterable[Any], pick: Callable[[Any], Any]) -> list[dict[str, Any]]:
        schedules = [pick(each) for each in found if isinstance(each, dict)]
        return [
            {knob: value for knob, value in each.items() if knob in wanted}
            for each in schedules
            if isinstance(each, dict)
        ]

    if name.endswith(".csv"):
        return of(rows_of_csv(text, name), lambda row: row.get("schedule", row))
    data = json.loads(text)
    if isinstance(data, list):
        return data
    if isinstance(data, dict) and isinstance(data.get("results"), list):
        return of(
            (
                each
                for each in data["results"]
                if isinstance(each, dict) and each.get("invalidity", "correct") == "correct"
            ),
            lambda result: result.get("configuration"),
        )
    if isinstance(data, dict) and isinstance(data.get("cache"), dict):
        return of(data["cache"].values(), lambda row: row if isinstance(row.get("time"), (int, float)) else None)
    raise DatabaseError(
        f"{name} names no schedules; give a JSON list of them, T4 results, a Kernel Tuner cache, or CSV with knobs as columns"
    )
