"""The commands about searching: `bench-search` compares ways to, `dashboard` shows what one did."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tiledsched.cli import output
from tiledsched.cli.commands import _open, _said
from tiledsched.cli.store_commands import _listed
from tiledsched.core.errors import ConfigError


def dashboard(options: argparse.Namespace) -> int:
    """Write studies, and show them until interrupted where optuna-dashboard is installed."""
    from tiledsched.build.artifacts import default_cache_folder
    from tiledsched.core.registry import kernel_named
    from tiledsched.core.space_files import space_for
    from tiledsched.tuning.study_storage import open_storage, write_studies

    place = options.storage or str(default_cache_folder() / "studies.log")
    with _open(options, read_only=True) as db:
        lines = db.landscapes(options.arch, _listed(options))
        if not lines:
            raise ConfigError(
                "nothing is measured in this database; tune on a GPU first, or db import a file of tuning_db/landscapes"
            )
        if options.storage is None:  # a copy of the database, written anew
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).unlink(missing_ok=True)
        storage = open_storage(place)
        studies = []
        for kernel, arch in sorted({(line.problem.kernel, line.arch) for line in lines}):
            mine = [
                (line.problem, line.device_name, line.regime)
                for line in lines
                if (line.problem.kernel, line.arch) == (kernel, arch)
            ]
            studies += write_studies(db, storage, mine, space_for(arch, kernel_named(kernel)))
    trials = {study.study_name: len(study.get_trials(deepcopy=False)) for study in studies}
    _said(
        options,
        {"storage": place, "studies": trials},
        "\n".join([*(f"{name}: {count} trials" for name, count in trials.items()), f"written to {place}"]),
    )
    if options.write_only or options.json:
        return 0
    try:
        run_server = importlib.import_module("optuna_dashboard").run_server
    except ImportError:
        output.note(f"to look at them: pip install optuna-dashboard, then: optuna-dashboard {place}")
        return 0
    output.note(f"http://localhost:{options.port} shows them until Ctrl-C")
    try:
        run_server(storage, port=options.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {options.port}: {error.strerror}; pass another --port") from error
    return 0
