"""The commands about searching: `bench-search` compares ways to, `dashboard` shows what one did."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tiledsched.cli import output
from tiledsched.cli.commands import _open, _print_json, _said
from tiledsched.cli.store_commands import _listed
from tiledsched.errors import ConfigError


def bench_search(options: argparse.Namespace) -> int:
    """Replay every method on recorded landscapes, then print what each came to."""
    from tiledsched.build.pool import default_jobs
    from tiledsched.studies.search.bench import held_out_landscapes, run_bench, shipped_landscapes
    from tiledsched.studies.search.figure import draw
    from tiledsched.studies.search.methods import METHODS
    from tiledsched.studies.search.scores import read_runs, summarise, write_runs

    path = Path(options.csv) if options.csv else None
    paths = (
        [Path(each) for each in options.landscapes]
        if options.landscapes
        else [*shipped_landscapes(options.declaration.name), *held_out_landscapes(options.declaration.name)]
    )
    for each in paths:
        if not each.is_file():
            raise ConfigError(
                f"there is no landscape at {each}; give files that `tiledsched record` or `landscapes --export` wrote"
            )
    samplers = options.samplers if options.samplers is not None else list(METHODS)
    runs = read_runs(path) if path is not None and path.exists() else []
    for sampler in samplers:
        mine = run_bench(
            paths, [sampler], seeds=options.seeds, jobs=options.jobs or default_jobs(), progress=output.note
        )
        runs = [run for run in runs if run.sampler != sampler] + mine
        if path is not None:
            write_runs(runs, path)
    held_out = {path.name.removesuffix(".json.xz") for path in held_out_landscapes()}
    fitted = summarise([run for run in runs if run.landscape not in held_out])
    unseen = summarise([run for run in runs if run.landscape in held_out])
    if options.figure:
        draw(fitted or unseen, Path(options.figure))
    if options.json:
        _print_json(
            {"rows": [{**line.to_json(), "held_out": lines is unseen} for lines in (fitted, unseen) for line in lines]}
        )
        return 0
    if fitted:
        output.print_searches(fitted)
    if unseen:
        output.print_searches(unseen, "landscapes that nothing was fitted to")
    return 0


def dashboard(options: argparse.Namespace) -> int:
    """Write studies, and show them until interrupted where optuna-dashboard is installed."""
    from tiledsched.build.artifacts import default_cache_folder
    from tiledsched.kernel_names import kernel_named
    from tiledsched.search.study_storage import open_storage, write_studies
    from tiledsched.space_files import space_for

    place = options.storage or str(default_cache_folder() / "studies.log")
    with _open(options, read_only=True) as db:
        lines = db.landscapes(options.arch, _listed(options))
        if not lines:
            raise ConfigError("nothing is measured in this database; tune on a GPU first, or db import a file of "
                              "tuning_db/landscapes")  # fmt: skip
        if options.storage is None:  # a copy of the database, written anew
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).unlink(missing_ok=True)
        storage = open_storage(place)
        studies = []
        for kernel, arch in sorted({(line.problem.kernel, line.arch) for line in lines}):
            mine = [(line.problem, line.device_name, line.regime) for line in lines
                    if (line.problem.kernel, line.arch) == (kernel, arch)]  # fmt: skip
            studies += write_studies(db, storage, mine, space_for(arch, kernel_named(kernel)))
    trials = {study.study_name: len(study.get_trials(deepcopy=False)) for study in studies}
    _said(options, {"storage": place, "studies": trials},
          "\n".join([*(f"{name}: {count} trials" for name, count in trials.items()), f"written to {place}"]))  # fmt: skip
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
