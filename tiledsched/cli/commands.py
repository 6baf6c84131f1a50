"""What each command calls and prints. Imports stay inside the functions: `show` must not wait for a compiler."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli import output
from tiledsched.cli.problems import filtered, problems_of
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import installing
from tiledsched.core.kernel import told

if TYPE_CHECKING:
    from tiledsched.core.problem import Problem
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.run import TuneReport
    from tiledsched.tuning.session import Session

SCHEMA_VERSION = 1


def _settings(options: argparse.Namespace) -> Settings:
    flags = {name: getattr(options, name, None) for name in ("db", "regime", "accum_mode", "rivals")}
    return load_settings(flags)


def _open(options: argparse.Namespace, *, read_only: bool = False) -> TuningDB:
    from tiledsched.store.db import TuningDB

    return TuningDB.open(_settings(options).db, read_only=read_only)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))


def _said(options: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    if options.json:
        _print_json(value)
    else:
        print(text)


def _problems(options: argparse.Namespace) -> list[Problem]:
    return problems_of(options.declaration, options)


def _session(options: argparse.Namespace) -> Session:
    from tiledsched.tuning.session import Session

    return Session(options.arch, settings=_settings(options), jobs=getattr(options, "jobs", None))


def _chosen(options: argparse.Namespace, kind: type[Any]) -> Any:
    """The options of a command as its flags give them."""
    from tiledsched.tuning.options import options_of

    names = {each.name: each.flag[2:].replace("-", "_") for each in options_of(kind)}
    return kind(**{name: getattr(options, flag) for name, flag in names.items()})


def _command(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of this run, to be noted with what it finds."""
    left_out = ("run", "db", "json", "verbose", "declaration", "words")
    return {key: value for key, value in vars(options).items() if key not in left_out}


def tune(options: argparse.Namespace) -> int:
    """Tune, then print what is served now."""
    # The surrogate's matrices are small: more threads win nothing, and the cores are wanted for compiling.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tiledsched.cli.progress import TuneProgress
    from tiledsched.tuning.options import TuneOptions

    problems = _problems(options)
    with TuneProgress(len(problems), options.budget) as watcher, _session(options) as session:
        report = session.tune(
            options.declaration, problems, _chosen(options, TuneOptions), watcher=watcher, command=_command(options)
        )
    files = _written_report(options, options.report) if options.report else []
    if options.json:
        _print_json(
            {
                "run": report.run_id,
                "results": [output.result_json(result) for result in report.results],
                "entries": [output.entry_json(entry) for entry in report.entries],
                "files": [str(path) for path in files],
            }
        )
    else:
        output.print_tuned(report)
        if files:
            output.print_report(files)
        output.print_next(_next_steps(options, report))
    return 0


def refresh(options: argparse.Namespace) -> int:
    """Bring what is served up to the compiler at hand, and say what moved."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tiledsched.cli.progress import TuneProgress
    from tiledsched.tuning.options import RefreshOptions

    problems, chosen = _measured(options, options.arch), _chosen(options, RefreshOptions)
    with TuneProgress(0, options.budget) as watcher, _session(options) as session:
        report = session.refresh(
            options.declaration, problems or None, chosen, watcher=watcher, command=_command(options)
        )
    if options.json:
        _print_json(report.to_json())
    else:
        output.print_refreshed(report)
    return 0


def _measured(options: argparse.Namespace, arch: str) -> list[Problem]:
    """The measured problems of an arch that the filters of a command let through."""
    from tiledsched.serve.entries import load_entries

    entries = load_entries(_settings(options), {arch}, options.declaration.name)
    known = {entry.problem for entry in entries if entry.arch == arch and entry.provenance == "measured"}
    problems = filtered(options, known)
    if known and not problems:
        raise ConfigError("nothing that was measured is like that; leave out a filter")
    return problems


def _next_steps(options: argparse.Namespace, report: TuneReport) -> list[tuple[str, str]]:
    """What to look at next, as commands that can be copied."""
    kernel = [options.kernel] if options.kernel else []
    same = [*kernel, *_given(options, "arch", "db")]
    problem = ["--problem", told(report.entries[0].problem)]
    why = ["explain", *same, *_given(options, "accum_mode", "regime", "rivals", "space"), *problem]
    steps = [("why this one, and what it beat", why)]
    if not options.report:
        steps.append(
            ("which knobs matter, with pictures", ["report", *same, *_given(options, "regime"), "--out", "report"])
        )
    if report.measured:
        steps.append(("how it does beside others", ["bench", *kernel, *_given(options, "db", "regime"), *problem]))
    elif any(result.left for result in report.results):
        everything = max(result.schedules + result.left for result in report.results)
        steps.append(("build the others, too", [*options.words, "--trials", str(everything)]))
    return [(purpose, shlex.join([output.program(), *words])) for purpose, words in steps]


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """Flags as they were given."""
    return [
        word
        for name in names
        if (value := getattr(options, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def check(options: argparse.Namespace) -> int:
    """Compare what schedules give in the interpreter with the reference; exit code 1 where some are wrong."""
    from tiledsched.tuning.options import CheckOptions
    from tiledsched.tuning.session import Session

    named = _problems(options) if options.problem or options.suite else None
    rows = []
    for row in Session(options.arch).check(options.declaration, named, _chosen(options, CheckOptions)):
        rows.append(row)
        if not options.json:
            output.print_checked(row)
    if options.json:
        _print_json({"rows": [row.to_json() for row in rows]})
    else:
        output.print_checks(rows)
    return 0 if rows and all(row.passed for row in rows) else 1


def _folder(path: str) -> Path:
    """A folder to write to, made where needed."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}; give another one") from error
    return Path(path)


def record(options: argparse.Namespace) -> int:
    """Record landscapes, a line for each file as it is written."""
    from tiledsched.tuning.options import RecordOptions

    if not options.build_only and not options.out:
        raise ConfigError("record needs a folder for the landscapes; pass --out DIR, or --build-only")
    problems, folder = _problems(options), _folder(options.out) if options.out else None
    with _session(options) as session:
        run_id, results = session.record(
            options.declaration,
            problems,
            _chosen(options, RecordOptions),
            folder=folder,
            progress=output.note,
            on_result=(lambda result: None) if options.json else output.print_recorded,
            command=_command(options),
        )
    if options.json:
        _print_json({"run": run_id, "problems": [output.recorded_json(result) for result in results]})
    return 0


def explain(options: argparse.Namespace) -> int:
    """Say for each problem what it is served with, and why."""
    from tiledsched.core.space_files import chosen_space
    from tiledsched.serve.entries import load_table
    from tiledsched.serve.explain import explain_problem

    settings = _settings(options)
    spaces = [chosen_space(options.arch, options.declaration, options.space)] if options.space else []
    table = load_table(settings, kernel=options.declaration, archs={options.arch}, spaces=spaces)
    found = [
        explain_problem(table, problem, options.arch, options.device, settings.sources)
        for problem in _problems(options)
    ]
    if options.json:
        rows = [each.to_json() for each in found]
        _print_json({**rows[0], "rows": rows})  # of one problem also at the top, where scripts have always found it
    else:
        print("\n\n".join(map(str, found)))
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report and name its files."""
    files = _written_report(options, options.out, options.device)
    _said(options, {"files": [str(path) for path in files]}, "\n".join(map(str, files)))
    return 0


def _written_report(options: argparse.Namespace, folder: str, device_name: str | None = None) -> list[Path]:
    """The files of a report on the kernel and archs of a command: what the database holds, over what ships."""
    from tiledsched.report import WithShipped, build_report, write_report
    from tiledsched.serve.entries import load_entries
    from tiledsched.store.db import TuningDB
    from tiledsched.store.location import database_exists
    from tiledsched.tuning.tuner import modelled_times

    settings, kernel = _settings(options), options.declaration
    named = options.db or database_exists(settings.db)
    with _open(options, read_only=True) if named else TuningDB.open(":memory:") as db:
        found = []
        for arch in [options.arch] if isinstance(options.arch, str) else options.arch:
            served = load_entries(settings, {arch})
            known = WithShipped(db, kernel, arch, served)
            found.append(
                build_report(
                    known,
                    arch,
                    kernel=kernel,
                    regime=settings.regime,
                    device_name=device_name,
                    model_times=modelled_times(arch, kernel),
                    served=served,
                )
            )
    return write_report(found, Path(folder))


def compare(options: argparse.Namespace) -> int:
    """Say what moved from A to B; exit code 1 where something is slower."""
    from tiledsched.report.compare import compare as compared
    from tiledsched.report.comparison_sources import Wanted, read_side

    db, wanted = (
        _settings(options).db,
        Wanted(kernel=options.only, arch=options.arch or "", regime=options.regime or ""),
    )
    found = compared(read_side(options.a, db, wanted), read_side(options.b, db, wanted), options.threshold / 100)
    if not found.rows:
        raise ConfigError(
            f"{options.a} and {options.b} have no problem in common: {len(found.only_a)} only in the first, "
            f"{len(found.only_b)} only in the second"
        )
    if options.json:
        _print_json(found.to_json())
    else:
        output.print_compared(found, everything=options.all)
        undecided = next((row for row in found.rows if row.verdict == "undecided" and row.b.words), None)
        if undecided is not None:
            words = ["tune", undecided.b.kernel, "--arch", undecided.b.arch, "--problem", undecided.b.words]
            where = options.b if options.b.endswith(".db") else options.db
            words += ["--db", where] if where else []
            output.print_next([("what decides one of the undecided", shlex.join([output.program(), *words]))])
            print()
        print(f"compare: {found.line()}")
    return 1 if found.regressed else 0


def completion(options: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            f"completion is written by shtab, which is not here; run: {installing('completion')}"
        ) from None
    from tiledsched.cli.parser import make_parser

    print(shtab.complete(_with_paths(make_parser(), {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}), options.shell))
    return 0


def _with_paths(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> argparse.ArgumentParser:
    """The parser, whose flags that take a file or folder say so in shtab's words, down to the last command."""
    for action in parser._actions:
        if action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _with_paths(each, kinds)
    return parser
