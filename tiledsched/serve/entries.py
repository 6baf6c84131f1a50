"""Everything that may be served, in layers: the shipped tables, a bundle, the site's layer and the user's database."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched import __version__
from tiledsched.build.sealed import read_sealed, write_sealed
from tiledsched.build.store import default_cache_folder
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import data_files
from tiledsched.core.canonical import stable_id
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import KernelClass
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import known_knobs
from tiledsched.serve.bundle import named_bundle, read_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.evidence import clocks_of, of_kernel, precedence
from tiledsched.store.limit import READ_TIMEOUT_S
from tiledsched.store.location import database_exists, location, site_location
from tiledsched.store.records import Entry, Place
from tiledsched.store.shipped import read_copy, read_shipped_entries, write_copy
from tiledsched.store.spills import Spills, joined, shipped_spills

log = logging.getLogger("tiledsched")
TABLES = (".json", ".json.xz")
"""Endings of the names of table files."""
SETTLED_NS = 2_000_000_000
"""Nanoseconds for which a database has to stay as it is before it is copied: file systems tell times in steps, so that a change
may leave size and time as they were."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One of the places from which entries are served."""

    name: str
    """shipped, bundle, site or user."""
    where: str
    """Its file, folder or URL."""
    entries: Sequence[Entry]
    """The layer's entries."""
    error: str = ""
    """Why some or all of the layer cannot be read; empty where all can. Other layers are served in any case."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict, without the entries."""
        return {"layer": self.name, "where": self.where, "entries": len(self.entries), "error": self.error or None}


def layers(settings: Settings, archs: Collection[str] | None = None, kernel: KernelClass | str = "") -> list[Layer]:
    """All layers, each of which lies over those before it: what ships, the bundle in use, the site's and the user's.

    Args:
        settings: names the site's layer and the user's database.
        archs: read shipped tables of these archs only, which saves time; None for all.
        kernel: read entries of this kernel, or of this name, only; empty for all.

    Raises:
        DatabaseError: the user's database cannot be read, and a flag named it. Any other layer that cannot be read is left out
            with a warning.
    """
    declared = None if isinstance(kernel, str) else kernel
    kernel = kernel if isinstance(kernel, str) else kernel.name
    found = [_shipped(archs, kernel)]
    bundle = named_bundle()
    if bundle is not None:
        mine = [each for each in read_bundle(bundle).entries if kernel in ("", each.kernel)]
        found.append(Layer(name="bundle", where=str(bundle), entries=mine))
    site = site_location(settings.site)
    if site is not None:
        found.append(_site(site, kernel, settings))
    if database_exists(settings.db):
        found.append(_stored("user", settings.db, kernel, settings))
    for layer in found:
        if layer.error and layer.name == "user" and settings.sources.get("db") == "--db":
            raise DatabaseError(layer.error)
        if layer.error:
            log.warning("%s; it is left out", layer.error)
    return [replace(layer, entries=of_kernel(layer.entries, declared)) for layer in found]


def _shipped(archs: Collection[str] | None, kernel: str) -> Layer:
    folder = data_files.tuning_db() / "tables"
    paths = [
        path
        for path in sorted(folder.glob("*/*.json"))
        if kernel in ("", path.parent.name) and (archs is None or path.stem in archs)
    ]
    entries, errors = _read(paths, read_shipped_entries, kernel)
    return Layer(name="shipped", where=str(folder), entries=entries, error="; ".join(errors))


def _read(paths: Sequence[Path], read: Callable[[Path], Sequence[Entry]], kernel: str) -> tuple[list[Entry], list[str]]:
    """The entries of the tables that can be read, and why the others cannot."""
    entries: list[Entry] = []
    errors = []
    for path in paths:
        try:
            entries += [each for each in read(path) if kernel in ("", each.kernel)]
        except DatabaseError as error:
            errors.append(str(error))
    return entries, errors


def _site(where: str, kernel: str, settings: Settings) -> Layer:
    """The site's layer, which may be a database, a table, or a folder of tables."""
    path = Path(os.path.expanduser(where))
    if os.path.isdir(path):
        paths = sorted(each for each in path.rglob("*.json*") if each.name.endswith(TABLES))
    elif where.endswith(TABLES):
        paths = [path]
    else:
        return _stored("site", where, kernel, settings)
    from tiledsched.store.exchange import read_table

    entries, errors = _read(paths, lambda table: read_table(table).entries, kernel)
    if not paths:
        errors = ["no table is in it; `tiledsched db export` writes one"]
    error = f"the site's layer ({where}) cannot be read: {'; '.join(errors)}" if errors else ""
    return Layer(name="site", where=where, entries=entries, error=error)


def _stored(name: str, url: str | None, kernel: str, settings: Settings) -> Layer:
    """A layer in a database. If it is a file, its entries of a kernel are copied to the cache folder, and the first call of a
    process reads the copy, in a tenth of the time, while the file stays as it is."""
    where = location(url)
    copy, state = _copy_path(name, where, kernel, settings), _state(where) if kernel else None
    known = read_sealed(copy, dict[str, Any]) if state else None
    if known is not None and known[0]["state"] == state:
        return Layer(name=name, where=where, entries=read_copy(known[1]))
    entries: Sequence[Entry] = ()
    error = ""
    try:
        from tiledsched.store.db import TuningDB  # imports SQLAlchemy, which takes half a second

        with TuningDB.open(url, read_only=True, limit_s=READ_TIMEOUT_S) as db:
            where = db.url if "://" in where else where  # without its password
            entries = db.entries(kernel=kernel or None)
    except DatabaseError as raised:
        where = where.rpartition("@")[2] if "://" in where else where
        error = f"the {name}'s layer ({where}) cannot be read: {raised}"
    if not error and _is_settled(state):
        write_sealed(copy, {"state": state}, write_copy(entries, "").encode())
    return Layer(name=name, where=where, entries=entries, error=error)


def _copy_path(name: str, where: str, kernel: str, settings: Settings) -> Path:
    """The file that keeps a copy of a layer's entries of a kernel."""
    key = stable_id([name, os.path.abspath(where), kernel, __version__], 40)
    return default_cache_folder(settings.cache) / "entries" / key


def _state(where: str) -> list[list[int]] | None:
    """Sizes and times of the files of a database; None where it is none in a file. A change of the database changes them."""
    if "://" in where:
        return None
    found = []
    for path in (where, f"{where}-wal"):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(os.path.expanduser(path))
            if status.st_size:  # a log that was written back is empty, or gone
                found.append([status.st_ino, status.st_size, status.st_mtime_ns])
    return found or None


def _is_settled(state: list[list[int]] | None) -> bool:
    """Whether a database in a file has been as it is for long enough to be copied."""
    return bool(state) and time.time_ns() - max(each[-1] for each in state or ()) > SETTLED_NS


def load_entries(
    settings: Settings, archs: Collection[str] | None = None, kernel: KernelClass | str = ""
) -> list[Entry]:
    """The entries that all layers serve together. The arguments are those of :func:`layers`."""
    return combined(layers(settings, archs, kernel))


def combined(of: Sequence[Layer]) -> list[Entry]:
    """The entries that layers serve together: for each key the one of strongest provenance, and among equals one whose clock was
    not held down, and then the uppermost.
    """
    seen_mhz = clocks_of(entry for layer in of for entry in layer.entries)
    found: dict[tuple[Place, str], Entry] = {}
    for layer in of:
        for entry in layer.entries:
            key = entry.place, entry.compiler
            if key not in found or precedence(entry, seen_mhz) <= precedence(found[key], seen_mhz):
                found[key] = entry if entry.layer == layer.name else entry.replace(layer=layer.name)
    return list(found.values())


def load_table(
    settings: Settings, *, kernel: KernelClass, archs: Collection[str] | None = None, spaces: Sequence[SearchSpace] = ()
) -> LookupTable:
    """The lookup table of a kernel.

    Args:
        settings: layers, regime, accuracy class and forced knobs. A kernel ignores forced knobs that it does not have.
        kernel: the kernel.
        archs: read shipped tables of these archs only; None for all.
        spaces: search spaces in place of the kernel's own.
    """
    return table_of(load_entries(settings, archs, kernel), settings, kernel=kernel, spaces=spaces)


def table_of(
    entries: Sequence[Entry],
    settings: Settings,
    *,
    kernel: KernelClass,
    spaces: Sequence[SearchSpace] = (),
    compiler: str | None = None,
) -> LookupTable:
    """The lookup table of a kernel over some entries. The other arguments are those of :func:`load_table`; `compiler` is the
    version that builds what is served, None for the one of this machine.
    """
    forced = {name: value for name, value in settings.knobs.items() if name in known_knobs(kernel)}
    return LookupTable(
        entries,
        kernel=kernel,
        regime=settings.regime,
        accum_mode=settings.accum_mode,
        forced=forced,
        spaces=spaces,
        rivals=settings.rivals == "serve",
        compiler=compiler_at_hand() if compiler is None else compiler,
        at_hand=lambda: _bundled(kernel),
        spills_of=lambda arch: known_spills(kernel, settings, arch),
    )


def known_spills(kernel: KernelClass, settings: Settings, arch: str) -> Spills:
    """What is known of the kernel's programs that spill registers or do not build under the compiler of this machine: what
    ships, and what `tune`, `refresh` and `warmup` stored in the user's database. Without a compiler, what the bundle in use says.
    """
    compiler = compiler_at_hand()
    if not compiler:
        from tiledsched.serve.prebuilt import usable_bundle

        bundle = usable_bundle(kernel)
        if bundle is not None and bundle.programs_of(kernel, arch):  # what was chosen when it was made is what it holds
            return bundle.spills.get(kernel.name, {}).get(arch, {})
    learnt = stored_spills(settings, kernel=kernel.name, source_hash=kernel.source_hash(), arch=arch)
    return joined(shipped_spills(kernel.name, arch, compiler), learnt)


def stored_spills(settings: Settings, **of: str) -> Spills:
    """What the user's database knows of programs that spill or do not build under the compiler of this machine; `of` is as for
    :meth:`tiledsched.store.db.TuningDB.spills`. It is copied to the cache folder, as entries are."""
    compiler = compiler_at_hand()
    if not (compiler and database_exists(settings.db)):
        return {}
    where = location(settings.db)
    copy, state = _copy_path("spills", where, f"{compiler} {sorted(of.items())}", settings), _state(where)
    known = read_sealed(copy, dict[str, Any]) if state else None
    if known is not None and known[0]["state"] == state:
        copied: Spills = json.loads(known[1])
        return copied
    from tiledsched.store.db import TuningDB  # imports SQLAlchemy, which takes half a second

    try:
        with TuningDB.open(settings.db, read_only=True, limit_s=READ_TIMEOUT_S) as db:
            found = db.spills(compiler, **of)
    except DatabaseError:  # which a warning has said, when its entries were read
        return {}
    if _is_settled(state):
        write_sealed(copy, {"state": state}, json.dumps(found).encode())
    return found


def _bundled(kernel: KernelClass) -> set[str]:
    """Fingerprints of the kernel's programs that the bundle in use holds."""
    from tiledsched.serve.prebuilt import usable_bundle

    bundle = usable_bundle(kernel)
    return {each.fingerprint for each in (bundle.programs if bundle else ()) if each.kernel == kernel.name}
