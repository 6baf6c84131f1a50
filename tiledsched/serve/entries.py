"""Everything that may be served: the tables that ship with the package, a bundle's, the site's and the user's own database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import KernelClass
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import known_knobs
from tiledsched.serve.bundle import named_bundle, read_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.location import database_exists, location, site_location
from tiledsched.store.records import Entry, Place
from tiledsched.store.shipped import read_shipped_entries

log = logging.getLogger("tiledsched")
TABLES = (".json", ".json.xz")
"""How the names of tables end."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One of the places that entries are served from."""

    name: str
    """shipped, bundle, site or user."""
    where: str
    """Its file, folder or URL."""
    entries: Sequence[Entry]
    """What it holds."""
    error: str = ""
    """Why some or all of it cannot be read; the other layers serve on."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict, without the entries."""
        return {"layer": self.name, "where": self.where, "entries": len(self.entries), "error": self.error or None}


def layers(settings: Settings, archs: Collection[str] | None = None, kernel: str = "") -> list[Layer]:
    """All there are, each over those before it: what ships, the bundle in use, the site's and the user's own.

    With `archs` or a `kernel`, shipped tables of others are not read, which would take a call's first process longer than all
    else.

    Raises:
        DatabaseError: the user's database cannot be read, and a flag named it. Else that is left out with a warning.
    """
    found = [_shipped(archs, kernel)]
    bundle = named_bundle()
    if bundle is not None:
        mine = [each for each in read_bundle(bundle).entries if kernel in ("", each.kernel)]
        found.append(Layer(name="bundle", where=str(bundle), entries=mine))
    site = site_location(settings.site)
    if site is not None:
        found.append(_site(site, kernel))
    if database_exists(settings.db):
        found.append(_stored("user", settings.db, kernel))
    for layer in found:
        if layer.error and layer.name == "user" and settings.sources.get("db") == "--db":
            raise DatabaseError(layer.error)
        if layer.error:
            log.warning("%s; it is left out", layer.error)
    return found


def _shipped(archs: Collection[str] | None, kernel: str) -> Layer:
    folder = data_files.tuning_db() / "tables"
    paths = [path for path in sorted(folder.glob(f"{kernel or '*'}/*.json")) if archs is None or path.stem in archs]
    entries, errors = _read(paths, read_shipped_entries, kernel)
    return Layer(name="shipped", where=str(folder), entries=entries, error="; ".join(errors))


def _read(paths: Sequence[Path], read: Callable[[Path], list[Entry]], kernel: str) -> tuple[list[Entry], list[str]]:
    """The entries of the tables that can be read, and why the others cannot."""
    entries: list[Entry] = []
    errors = []
    for path in paths:
        try:
            entries += [each for each in read(path) if kernel in ("", each.kernel)]
        except DatabaseError as error:
            errors.append(str(error))
    return entries, errors


def _site(where: str, kernel: str) -> Layer:
    """A database, a table, or a folder of tables."""
    path = Path(where).expanduser()
    if path.is_dir():
        paths = sorted(each for each in path.rglob("*.json*") if each.name.endswith(TABLES))
    elif where.endswith(TABLES):
        paths = [path]
    else:
        return _stored("site", where, kernel)
    from tiledsched.store.exchange import read_entries

    entries, errors = (
        _read(paths, read_entries, kernel) if paths else ([], ["no table is in it; `tiledsched db export` writes one"])
    )
    error = f"the site's layer ({where}) cannot be read: {'; '.join(errors)}" if errors else ""
    return Layer(name="site", where=where, entries=entries, error=error)


def _stored(name: str, url: str | None, kernel: str) -> Layer:
    """A database."""
    where = location(url)
    entries: Sequence[Entry] = ()
    error = ""
    try:
        from tiledsched.store.db import TuningDB  # half a second, which what ships does not need

        with TuningDB.open(url, read_only=True) as db:
            where = db.url if "://" in where else where  # without its password
            entries = db.entries(kernel=kernel or None)
    except DatabaseError as raised:
        where = where.rpartition("@")[2] if "://" in where else where
        error = f"the {name}'s layer ({where}) cannot be read: {raised}"
    return Layer(name=name, where=where, entries=entries, error=error)


def load_entries(settings: Settings, archs: Collection[str] | None = None, kernel: str = "") -> list[Entry]:
    """What all layers serve together."""
    return combined(layers(settings, archs, kernel))


def combined(of: Sequence[Layer]) -> list[Entry]:
    """What layers serve together: of one key the strongest provenance, and among equals the uppermost layer's."""
    found: dict[tuple[Place, str], Entry] = {}
    for layer in of:
        for entry in layer.entries:
            key = entry.place, entry.compiler
            if key not in found or entry.rank <= found[key].rank:
                found[key] = entry if entry.layer == layer.name else entry.replace(layer=layer.name)
    return list(found.values())


def load_table(
    settings: Settings, *, kernel: KernelClass, archs: Collection[str] | None = None, spaces: Sequence[SearchSpace] = ()
) -> LookupTable:
    """The lookup table of a kernel under `settings`; with `archs`, only what was shipped for those; `spaces` in place of the
    kernel's own.

    Settings force knobs of all kernels; each takes those that it has.
    """
    return table_of(load_entries(settings, archs, kernel.name), settings, kernel=kernel, spaces=spaces)


def table_of(
    entries: Sequence[Entry], settings: Settings, *, kernel: KernelClass, spaces: Sequence[SearchSpace] = ()
) -> LookupTable:
    """The same over some entries only."""
    forced = {name: value for name, value in settings.knobs.items() if name in known_knobs(kernel)}
    return LookupTable(
        entries,
        kernel=kernel,
        regime=settings.regime,
        accum_mode=settings.accum_mode,
        forced=forced,
        spaces=spaces,
        rivals=settings.rivals == "serve",
        compiler=compiler_at_hand(),
        at_hand=lambda: _bundled(kernel, settings),
    )


def _bundled(kernel: KernelClass, settings: Settings) -> set[str]:
    """Fingerprints of the kernel's programs in bundles."""
    from tiledsched.serve.prebuilt import usable_bundles

    return {
        program.fingerprint
        for each in usable_bundles(kernel, settings)
        for program in each.programs
        if program.kernel == kernel.name
    }
