"""Everything that may be served, in layers: the shipped tables, a bundle, the site's layer and the user's database."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core import data_files
from tiledsched.core.config import INVARIANT, Settings, log
from tiledsched.core.errors import DatabaseError
from tiledsched.core.groups import largest
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import known_knobs
from tiledsched.serve.bundle import named_bundle, read_bundle
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.stored import StoredEntries, StoredSpills
from tiledsched.store.direct import reading
from tiledsched.store.evidence import clocks_of, distinct, of_kernel, precedence
from tiledsched.store.limit import READ_TIMEOUT_S
from tiledsched.store.location import TABLES, database_exists, location, site_location
from tiledsched.store.records import Entry, Place
from tiledsched.store.rows import kernel_condition
from tiledsched.store.shipped import read_shipped_entries
from tiledsched.store.spills import Spills, shipped_spills


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One of the places from which entries are served."""

    name: str
    """shipped, bundle, site or user."""
    where: str
    """Its file, folder or URL."""
    entries: Sequence[Entry]
    """The layer's entries."""
    stored: StoredEntries | None = None
    """Reads the entries near a problem, where they are too many to read all of them; None where `entries` are all."""
    error: str = ""
    """Why some or all of the layer cannot be read; empty where all can. Other layers are served in any case."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict, without the entries."""
        return {"layer": self.name, "where": self.where, "entries": len(self.entries), "error": self.error or None}


def layers(
    settings: Settings,
    archs: Collection[str] | None = None,
    kernel: KernelClass | str = "",
    *,
    near: bool = False,
    limit_s: float | None = READ_TIMEOUT_S,
) -> list[Layer]:
    """All layers, each of which lies over those before it: what ships, the bundle in use, the site's and the user's.

    Args:
        settings: names the site's layer and the user's database.
        archs: read shipped tables of these archs only, which saves time; None for all.
        kernel: read entries of this kernel, or of this name, only; empty for all.
        near: leave the entries of a large database there, and give what reads those near a problem.
        limit_s: how long reading a database may take, in seconds; None for any time.

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
        found.append(_site(site, kernel, near, limit_s))
    if database_exists(settings.db):
        found.append(_stored("user", settings.db, kernel, near, limit_s))
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


def _site(where: str, kernel: str, near: bool, limit_s: float | None) -> Layer:
    """The site's layer, which may be a database, a table, or a folder of tables."""
    path = Path(os.path.expanduser(where))
    if os.path.isdir(path):
        paths = sorted(each for each in path.rglob("*.json*") if each.name.endswith(TABLES))
    elif where.endswith(TABLES):
        paths = [path]
    else:
        return _stored("site", where, kernel, near, limit_s)
    from tiledsched.store.exchange import read_table

    entries, errors = _read(paths, lambda table: read_table(table).entries, kernel)
    if not paths:
        errors = ["no table is in it; `tiledsched db export` writes one"]
    error = f"the site's layer ({where}) cannot be read: {'; '.join(errors)}" if errors else ""
    return Layer(name="site", where=where, entries=entries, error=error)


def _stored(name: str, url: str | None, kernel: str, near: bool, limit_s: float | None) -> Layer:
    """A layer in a database. With `near`, entries of a kernel that has many of them are read when a problem asks for them."""
    found = location(url)
    where, error = found.rpartition("@")[2] if "://" in found else found, ""  # without its password
    entries: Sequence[Entry] = ()
    try:
        with reading(url, limit_s) as rows:
            rows.layer = name
            stored = StoredEntries(url, kernel, rows) if near else None
            if stored is not None and stored.many:
                return Layer(name=name, where=where, entries=(), stored=stored)
            condition, words = kernel_condition(kernel)
            entries = distinct(rows.entries(words, f"WHERE {condition}"))
    except DatabaseError as raised:
        error = f"the {name}'s layer ({where}) cannot be read: {raised}"
    return Layer(name=name, where=where, entries=entries, error=error)


def load_entries(
    settings: Settings,
    archs: Collection[str] | None = None,
    kernel: KernelClass | str = "",
    *,
    limit_s: float | None = READ_TIMEOUT_S,
) -> list[Entry]:
    """The entries that all layers serve together. The arguments are those of :func:`layers`."""
    return combined(layers(settings, archs, kernel, limit_s=limit_s))


def lent_entries(settings: Settings, archs: Collection[str] | None, kernel: KernelClass) -> list[Entry]:
    """The entries of the kernel whose search space another one has, by which that one is served until it is tuned; none of most
    kernels, which have a space of their own.
    """
    if not kernel.borrows():
        return []
    return combined(layers(settings, archs, kernel_named(kernel.space)))


def combined(of: Sequence[Layer], seen_mhz: Mapping[str, int] | None = None) -> list[Entry]:
    """The entries that layers serve together: for each key the one of strongest provenance, and among equals one whose clock was
    not held down, and then the uppermost. `seen_mhz` has the clocks of further entries.
    """
    seen_mhz = clocks_of((entry for layer in of for entry in layer.entries), seen_mhz or {})
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
    """The lookup table of a kernel. Of a database with many entries of it, those near a problem are read when it is looked up.

    Args:
        settings: layers, regime, accuracy class and forced knobs. A kernel ignores forced knobs that it does not have.
        kernel: the kernel.
        archs: read shipped tables of these archs only; None for all.
        spaces: search spaces in place of the kernel's own.
    """
    # Which entries lie near a problem depends on its batch.
    found = layers(settings, archs, kernel, near=settings.schedule_class != INVARIANT)
    near = Near(found, kernel) if any(layer.stored for layer in found) else None
    entries = [*combined(found), *lent_entries(settings, archs, kernel)]
    return table_of(entries, settings, kernel=kernel, spaces=spaces, near=near)


def table_of(
    entries: Sequence[Entry],
    settings: Settings,
    *,
    kernel: KernelClass,
    spaces: Sequence[SearchSpace] = (),
    compiler: str | None = None,
    near: Near | None = None,
) -> LookupTable:
    """The lookup table of a kernel over some entries. The other arguments are those of :func:`load_table`; `compiler` is the
    version that builds what is served, None for the one of this machine; `near` gives further entries.
    """
    forced = {name: value for name, value in settings.knobs.items() if name in known_knobs(kernel)}
    return LookupTable(
        entries,
        kernel=kernel,
        regime=settings.regime,
        accum_mode=settings.schedule_class,
        forced=forced,
        spaces=spaces,
        near=near,
        rivals=settings.rivals == "serve",
        compiler=compiler_at_hand() if compiler is None else compiler,
        at_hand=lambda: _bundled(kernel),
        spills_of=lambda arch: known_spills(kernel, settings, arch),
    )


class Near:
    """The entries of all layers that lie near a problem, where databases hold too many to read all of them.

    Args:
        found: the layers.
        kernel: whose entries these are.
    """

    def __init__(self, found: Sequence[Layer], kernel: KernelClass) -> None:
        self._layers, self._kernel = found, kernel
        stored = [layer.stored for layer in found if layer.stored]
        self.raced, self.in_graphs = any(each.raced for each in stored), any(each.in_graphs for each in stored)
        """Whether rivals were timed for any of the entries that are in databases, and whether any was timed in graphs."""
        self.seen_mhz = largest(clock for each in stored for clock in each.seen_mhz.items())
        """By the name of each GPU, the highest clock behind the entries that are in databases."""

    def entries(self, problem: Problem, archs: Sequence[str], *, alone: bool = False) -> list[Entry]:
        """The entries on some archs near a problem, or only its own, together with those that other layers have for the same
        problems."""
        stored = [layer.stored.near(problem, archs, alone=alone) if layer.stored else [] for layer in self._layers]
        own = [of_kernel(some, self._kernel) for some in stored]
        problems = {entry.problem for some in own for entry in some}
        whole = [
            replace(
                layer,
                entries=[*(each for each in layer.entries if each.problem in problems and each.arch in archs), *some],
            )
            for layer, some in zip(self._layers, own, strict=True)
        ]
        return combined(whole, self.seen_mhz)

    def device_names(self, arch: str) -> set[str]:
        """The GPUs of an arch on which something was measured."""
        return {name for layer in self._layers if layer.stored for name in layer.stored.device_names(arch)}


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
    shipped = shipped_spills(kernel.name, arch, compiler)
    return stored_spills(settings, shipped, kernel=kernel.name, source_hash=kernel.source_hash(), arch=arch)


def stored_spills(settings: Settings, shipped: Spills, **of: str) -> Spills:
    """What the user's database knows, beside what ships, of programs that spill or do not build under the compiler of this
    machine; `of` are values of columns of builds.
    """
    compiler = compiler_at_hand()
    return StoredSpills(settings.db, compiler, shipped, of) if compiler and database_exists(settings.db) else shipped


def _bundled(kernel: KernelClass) -> set[str]:
    """Fingerprints of the kernel's programs that the bundle in use holds."""
    from tiledsched.serve.prebuilt import usable_bundle

    bundle = usable_bundle(kernel)
    return {each.fingerprint for each in (bundle.programs if bundle else ()) if each.kernel == kernel.name}
