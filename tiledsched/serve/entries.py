"""Everything that may be served: the tables that ship with the package, a bundle's, and the user's own database."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from tiledsched import data_files
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.config import Settings
from tiledsched.errors import DatabaseError
from tiledsched.kernel import KernelClass
from tiledsched.serve.bundle import named_bundle, read_bundle
from tiledsched.serve.lookup import Table
from tiledsched.space import SearchSpace
from tiledsched.space_files import known_knobs
from tiledsched.store.exchange import read_entries
from tiledsched.store.location import database_exists
from tiledsched.store.records import EntryRecord

log = logging.getLogger("tiledsched")


def load_entries(url: str | None, archs: Collection[str] | None = None, kernel: str = "") -> list[EntryRecord]:
    """Entries of shipped tables, of the bundle in use, and of the database (where there is one).

    At equal provenance a later one of these wins. With `archs` or a `kernel`, tables of others are not read, which would
    take a call's first process longer than all else.
    """
    found: dict[tuple[str, ...], EntryRecord] = {}
    for path in sorted((data_files.tuning_db() / "tables").glob(f"{kernel or '*'}/*.json")):
        if archs is None or path.stem in archs:
            try:
                found.update((entry.key, entry) for entry in read_entries(path))
            except DatabaseError as error:  # what is left still serves
                log.warning("%s; it is left out", error)
    later: list[EntryRecord] = []
    bundle = named_bundle()
    if bundle is not None:
        later.extend(each for each in read_bundle(bundle).entries if kernel in ("", each.kernel))
    if database_exists(url):
        from tiledsched.store.db import TuningDB  # half a second, which what ships does not need

        with TuningDB.open(url, read_only=True) as db:
            later.extend(db.entries(kernel=kernel or None))
    for entry in later:
        if entry.key not in found or entry.rank <= found[entry.key].rank:
            found[entry.key] = entry
    return list(found.values())


def load_table(settings: Settings, *, kernel: KernelClass, archs: Collection[str] | None = None,
               spaces: Sequence[SearchSpace] = ()) -> Table:  # fmt: skip
    """The lookup table of a kernel under `settings`; with `archs`, only what was shipped for those; `spaces` in place of the
    kernel's own.

    Settings force knobs of all kernels; each takes those that it has.
    """
    forced = {name: value for name, value in settings.knobs.items() if name in known_knobs(kernel)}
    return Table(load_entries(settings.db, archs, kernel.name), kernel=kernel, regime=settings.regime,
                 accum_mode=settings.accum_mode, forced=forced, spaces=spaces, compiler=compiler_at_hand(),
                 at_hand=lambda: _bundled(kernel, settings))  # fmt: skip


def _bundled(kernel: KernelClass, settings: Settings) -> set[str]:
    """Fingerprints of the kernel's programs in bundles."""
    from tiledsched.serve.prebuilt import usable_bundles

    return {program.fingerprint for each in usable_bundles(kernel, settings) for program in each.programs
            if program.kernel == kernel.name}  # fmt: skip
