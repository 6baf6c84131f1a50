"""Checks that the ranks of one job serve the same schedules: with different ones, some wait for others at every collective."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tiledsched import __version__
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.canonical import stable_id
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import required
from tiledsched.core.files import read_bounded
from tiledsched.serve.bundle import named_bundle
from tiledsched.serve.entries import load_entries, stored_spills
from tiledsched.store.manifest import listed_files, manifest_path
from tiledsched.store.spills import FILE, joined

MAX_NAMED = 8
"""Ranks that a message names."""


def choice_digest(settings: Settings | None = None) -> str:
    """A hash of everything that decides what this process serves: entries of every layer, machine code in bundles, what is known
    of programs that spill, forced knobs, regime, accuracy class, compiler and version. Processes with equal digests serve the
    same schedules.

    Raises:
        TiledschedError: a table or bundle cannot be read.
    """
    settings = settings or load_settings()
    bundle = named_bundle()
    bundles = [] if bundle is None else [hashlib.sha256(read_bounded(bundle)).hexdigest()]
    entries = sorted(
        [*entry.key, entry.provenance, entry.schedule.id, entry.fingerprint or ""] for entry in load_entries(settings)
    )
    spills = [
        {name: each["sha256"] for name, each in listed_files(manifest_path()).items() if name.endswith(FILE)},
        joined(stored_spills(settings, {})),
    ]
    decides = [
        __version__,
        compiler_at_hand(),
        settings.regime,
        settings.schedule_class,
        dict(settings.knobs),
        bundles,
        entries,
        spills,
    ]
    return stable_id(decides, 24)


@required()
def check_ranks(group: Any = None) -> str:
    """Compare :func:`choice_digest` over the ranks of a job; every rank calls it, once, after `init_process_group`.

    Args:
        group: of `torch.distributed`; None for all ranks.

    Returns:
        The digest, which all ranks share. Where `torch.distributed` is not initialised, this process's own.

    Raises:
        ConfigError: on every rank, where some differ; the message names them.
    """
    from torch import distributed

    mine = choice_digest()
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    all_of_them: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(all_of_them, mine, group=group)
    differ(all_of_them)
    return mine


def differ(digests: Sequence[str | None]) -> None:
    """Raise ConfigError unless all digests are equal; the message names the ranks that differ from the most frequent one."""
    ((usual, count),) = Counter(digests).most_common(1)
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != usual]
    if odd:
        named = ", ".join(odd[:MAX_NAMED]) + (", ..." if len(odd) > MAX_NAMED else "")
        raise ConfigError(
            f"ranks would run different schedules: {named} differ from the other {count}; give all of them one bundle: "
            "TILEDSCHED_BUNDLE=FILE, made with tiledsched warmup -o FILE"
        )
