"""The tables that ship: read from their serving copies, and listed in the manifest with these.

After a shipped file was changed on purpose, ``python -m tiledsched.store.shipped`` checks every table and landscape,
writes the serving copies and writes the manifest anew.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiledsched.core import data_files
from tiledsched.core.files import write_whole
from tiledsched.store.manifest import LISTED, SCHEMA_VERSION, listed_files, manifest_path, sha256
from tiledsched.store.records import Entry
from tiledsched.store.serving_copy import read_copy, write_copy


def copy_path(table: Path) -> Path:
    """The file of a table's serving copy, beside the table."""
    return table.with_suffix(".serving")


def read_shipped_entries(table: Path) -> list[Entry]:
    """The entries of a table that ships, with the name of their layer.

    They come from the serving copy where the copy is the one that was made of this table, else from the table itself.

    Raises:
        DatabaseError: the table is not the file that shipped.
    """
    name = table.relative_to(data_files.tuning_db()).as_posix()
    listed: Mapping[str, Any] = listed_files(manifest_path()).get(name, {})
    try:
        copy = copy_path(table).read_bytes()
        sound = sha256(copy) == listed.get("serving") and _is_listed(table, listed)
    except OSError:
        sound = False
    if sound:
        return read_copy(copy)
    from tiledsched.store.exchange import read_table  # which serving needs for tables of other layers only

    return [entry.replace(layer="shipped") for entry in read_table(table).entries]


def _is_listed(table: Path, listed: Mapping[str, Any]) -> bool:
    """Whether a table is the listed file. Its five megabytes are only read where it is younger than its copy."""
    is_, copy = table.stat(), copy_path(table).stat()
    if is_.st_size != listed.get("bytes"):
        return False
    if is_.st_mtime_ns <= copy.st_mtime_ns:
        return True
    with table.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sha256(data) == listed["sha256"]


def write_manifest() -> int:
    """Write the serving copy of every table, and the manifest of all that is in the folder of shipped data.

    Returns:
        How many files are listed.

    Raises:
        DatabaseError: a table or a landscape is wrong.
    """
    from tiledsched.store.exchange import parse_table, text_of

    folder = data_files.tuning_db()
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for part in LISTED for path in (folder / part).rglob("*.json*")):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        files[name] = {"sha256": sha256(data)}
        if name.startswith("tables/"):
            text = write_copy(parse_table(text_of(path, data), path.name).entries, layer="shipped")
            write_whole(copy_path(path), text)
            files[name] |= {"bytes": len(data), "serving": sha256(text.encode())}
        if name.startswith("landscapes/"):
            taken = parse_table(text_of(path, data), path.name).measurements[0].measurement
            files[name] |= {"arch": taken.device.arch, "regime": taken.regime, "problem": taken.problem.to_json()}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(listed)}" for name, listed in sorted(files.items()))
    text = f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "files": {{\n{lines}\n  }}\n}}\n'
    write_whole(manifest_path(), text)
    listed_files.cache_clear()
    return len(files)


if __name__ == "__main__":
    print(f"{write_manifest()} files")
