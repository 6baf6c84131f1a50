"""Every command and flag. Importing this imports neither a compiler nor a GPU library."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tiledsched import __version__
from tiledsched.cli import bench_commands, commands, fleet_commands, fleet_flags, search_commands, store_commands
from tiledsched.cli.problems import example, kernel_word
from tiledsched.core.device import arch_named
from tiledsched.core.errors import ConfigError, FailureKind
from tiledsched.core.fields import DTYPES
from tiledsched.core.flags import count, names, positive, words
from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import kernel_named, load_kernel
from tiledsched.measure.nvml import devices
from tiledsched.store.records import PROVENANCES
from tiledsched.tuning.effort import EFFORTS
from tiledsched.tuning.samplers import OURS, SAMPLERS, sampler_named

EPILOG = """exit codes: 0 done, 1 no valid schedule or a regression found, 2 usage or configuration, 130 interrupted.
Data goes to stdout, progress and logs to stderr. Settings: flags, then TILEDSCHED_* variables, then tiledsched.toml,
then the user's config.toml."""
REGIMES = ("burst", "sustained")
USUAL = "attention"
"""The kernel of a command that names none."""
USUAL_ARCH = "sm_121"
"""The arch of a command that names none, where there is no GPU."""
FLEET = "fleet"
"""The command whose own commands are those of one GPU."""
KERNEL = "which kernel: a shipped name (attention, matmul, ...), package.module:Class or path/file.py:Class"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command, with the flags of the kernel that it names; `options.declaration` is that kernel.

    A user's file is imported only where it is named.

    Raises:
        ConfigError: there is no such kernel, or no such flag.
    """
    arguments = arguments or ["--help"]
    commands = _common()
    place = next((place for place, word in enumerate(arguments) if word in commands), None)
    if place is not None and arguments[place] == FLEET:
        commands, above = _subparsers(commands[FLEET]), place
        place = next((each for each, word in enumerate(arguments) if each > above and word in commands), None)
    actions = commands[arguments[place]]._actions if place is not None else []
    word = None
    dests = {action.dest for action in actions}
    if place is not None and dests & {"kernel", "listed"}:
        flags = {text: action for action in actions for text in action.option_strings}
        word = kernel_word(arguments[place + 1 :], flags)
    parser = make_parser(_known(word, any_name="listed" in dests) if word else None)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        command, found = arguments[place or 0], _subparsers(parser)
        of = found if FLEET not in arguments[: place or 0] else _subparsers(found[FLEET])
        raise ConfigError(_unknown(unknown[0], command, of[command], options.declaration))
    options.words = list(arguments)
    if options.usual_arch and options.arch is None:
        options.arch = next((device.arch for device in devices()), USUAL_ARCH)
        print(f"tiledsched: for {options.arch}; --arch names another", file=sys.stderr)
    return options


def _known(name: str, *, any_name: bool) -> KernelClass | None:
    """The kernel of that name; None for one that only tables know, where any name will do."""
    try:
        return load_kernel(name)
    except ConfigError:
        if any_name:
            return None
        raise


def _unknown(word: str, command: str, parser: argparse.ArgumentParser, kernel: KernelClass) -> str:
    """What is said of a word that a command does not take: which one may be meant, and where all of them are."""
    if not word.startswith("-"):
        return f"{command} takes no {word!r}; see tiledsched {command} --help"
    flags = [text for action in parser._actions for text in action.option_strings]
    alike = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), [flag.lstrip("-") for flag in flags], n=1)
    hint = f"did you mean --{alike[0]}? " if alike else ""
    if "--problem" in flags and not alike:
        hint = f"sizes of {kernel.name} go by name, e.g. --problem {example(kernel)}; "
    return f"{command} has no flag {word}; {hint}see tiledsched {command} --help"


def make_parser(kernel: KernelClass | None = None) -> argparse.ArgumentParser:
    """The whole command line, for problems of `kernel`, or of the usual one."""
    return _make(kernel or kernel_named(USUAL))


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    found: dict[str, argparse.ArgumentParser] = action.choices
    return found


@cache
def _common() -> dict[str, argparse.ArgumentParser]:
    """Every command with the flags that it has for any kernel: to be looked at, not to parse with."""
    return _subparsers(_make(None))


def _make(kernel: KernelClass | None) -> argparse.ArgumentParser:
    """Of no kernel: only the flags that all have."""
    parser = argparse.ArgumentParser(
        prog="tiledsched",
        description="Find, prove, keep and serve the best schedule of cuTile kernels.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tiledsched {__version__}")
    parser.set_defaults(verbose=False, declaration=kernel, usual_arch=False)
    subs = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_tune,
        _add_check,
        _add_record,
        _add_show,
        _add_explain,
        _add_report,
        _add_compare,
        _add_bench,
        _add_ablate,
        _add_study,
        _add_ladder,
        _add_profile,
        _add_landscapes,
        _add_dashboard,
        _add_refresh,
        _add_warmup,
        _add_bundle,
    ):
        add(subs, kernel)
    _add_fleet(subs, kernel)
    _add_doctor(subs)
    _add_db(subs)
    _add_completion(subs)
    return parser


def _command(
    subs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, *, db: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done to stderr")
    if db:
        parser.add_argument(
            "--db", metavar="URL", help="database path or URL (default: TILEDSCHED_DB, or the user's data directory)"
        )
    parser.add_argument("--json", action="store_true", help="print JSON with a schema_version")
    parser.set_defaults(run=run)
    return parser


def _arch_flag(
    parser: argparse.ArgumentParser,
    text: str = "",
    *,
    required: bool = False,
    usual: bool = True,
    several: bool = False,
) -> None:
    """`--arch`; with `usual`, that of the GPU here, or else of the usual one, where it is not given. With `several`, a list."""
    said = text or f"target, e.g. sm_90 or h200 (default: that of the GPU here, or else {USUAL_ARCH})"
    parser.add_argument(
        "--arch",
        type=_archs_named if several else arch_named,
        required=required,
        metavar="ARCH[,ARCH]" if several else "ARCH",
        help=said,
    )
    parser.set_defaults(usual_arch=usual and not required)


def _archs_named(text: str) -> list[str]:
    """Arch names with commas between them, each once."""
    return list(dict.fromkeys(arch_named(word) for word in text.split(",") if word))


def _kernel_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help=f"{KERNEL} (default: {USUAL})")


def _problem_flags(parser: argparse.ArgumentParser, kernel: KernelClass | None, *, own: bool = True) -> None:
    """KERNEL, `--problem` and `--suite`, and, with `own`, those that the kernel adds."""
    _kernel_flag(parser)
    suites = tuple(kernel.suites) if kernel else ()
    known = f"{', '.join(suites) or 'none'}" if kernel else "its own"
    such = f"; e.g. {example(kernel)}" if kernel else ""
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="K=V,...",
        help="problems by name, in every combination of values with : between them" + such,
    )
    parser.add_argument("--suite", metavar="NAME[,NAME]", help=f"named sets of problems: {known}")
    if own and kernel is not None and kernel.add_flags is not None:
        kernel.add_flags(parser.add_argument_group(f"problems of {kernel.name}"))


def _add_tune(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "tune",
        commands.tune,
        "find the best schedules for an arch: measured where its GPU is present, else built and ranked by the model",
    )
    _arch_flag(parser)
    _problem_flags(parser, kernel)
    _way_flags(parser)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument(
        "--effort",
        default="default",
        choices=tuple(EFFORTS),
        help="how many programs are measured and "
        "race for the decision, or, without a GPU, are built (default: default)",
    )
    parser.add_argument(
        "--trials",
        type=positive,
        metavar="N",
        help="distinct programs to measure per problem, at most; "
        "without a GPU, schedules to build (default: as the effort says)",
    )
    parser.add_argument("--report", metavar="DIR", help="also write the report with its pictures to this folder")
    parser.add_argument(
        "--sampler",
        type=sampler_named,
        default=OURS,
        metavar="NAME",
        help="what proposes schedules: "
        f"{', '.join(SAMPLERS)}, or module:Class of any sampler of Optuna (default: {OURS})",
    )
    parser.add_argument(
        "--storage", metavar="URL", help="keep Optuna's studies there while tuning: a file, or the URL of a database"
    )
    parser.add_argument(
        "--runner",
        choices=("auto", "gpu", "none"),
        default="auto",
        help="measure on the GPU, or only "
        "build and rank; auto measures where a GPU of the arch is present (default: auto)",
    )
    parser.add_argument(
        "--candidates",
        metavar="FILE",
        help="search only these schedules, the default and what is served: a JSON list, CSV, T4 results "
        "or a Kernel Tuner cache",
    )
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="also try what differs from the fastest so far in one or "
        "two knobs, beyond what the space or the list explores",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument(
        "--compile-timeout", type=float, default=120.0, metavar="SECONDS", help="per schedule (default: 120)"
    )


def _way_flags(parser: argparse.ArgumentParser) -> None:
    """What is searched and what decides: `tune` and `explain` spell it alike."""
    parser.add_argument("--accum-mode", choices=("fp32", "fp16"), help="accuracy class (default: fp32)")
    parser.add_argument(
        "--regime", choices=REGIMES, help="cool and at full clocks, or at the power cap (default: burst)"
    )
    parser.add_argument(
        "--rivals",
        choices=("serve", "record", "off"),
        help="whether a tune times other implementations beside "
        "each winner, and whether those that are faster serve (default: serve, which is both)",
    )
    parser.add_argument("--space", metavar="FILE", help="your own search space (TOML) in place of the kernel's")


def _add_check(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "check",
        commands.check,
        "run a kernel on the CPU, in the interpreter, and compare what its schedules give with its reference",
        db=False,
    )
    _problem_flags(parser, kernel, own=False)
    _arch_flag(parser, "whose search space (default: sm_90)", usual=False)
    parser.set_defaults(arch="sm_90")
    parser.add_argument(
        "--schedules",
        type=positive,
        default=20,
        metavar="N",
        help="schedules of each problem: the default and others drawn from the space (default: 20)",
    )
    parser.add_argument("--space", metavar="FILE", help="your own search space (TOML)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of schedules and inputs (default: 0)")


def _add_record(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "record",
        commands.record,
        "record landscapes: measure a broad choice of programs of each problem, for replay anywhere",
    )
    _arch_flag(parser)
    _problem_flags(parser, kernel)
    parser.add_argument(
        "--programs", type=positive, default=300, metavar="N", help="distinct programs per problem (default: 300)"
    )
    parser.add_argument(
        "--sustained-leaders",
        type=count,
        default=24,
        metavar="N",
        help="how many of the fastest are measured in the sustained regime, too (default: 24)",
    )
    parser.add_argument("--build-only", action="store_true", help="build the programs and stop; needs no GPU")
    parser.add_argument("-o", "--out", metavar="DIR", help="folder for the landscape files")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument("--accum-mode", choices=("fp32", "fp16"), help="accuracy class (default: fp32)")
    parser.add_argument("--space", metavar="FILE", help="your own search space (TOML)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of schedules (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument(
        "--compile-timeout", type=float, default=120.0, metavar="SECONDS", help="per schedule (default: 120)"
    )


def _add_show(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(subs, "show", store_commands.show, "list what is tuned, with provenance")
    _listed_kernel(parser)
    _arch_flag(parser, "only this arch", usual=False)
    parser.add_argument("--provenance", type=words(PROVENANCES), metavar="P[,P]", help=f"only {', '.join(PROVENANCES)}")
    parser.add_argument("--regime", choices=REGIMES, help="only what was measured in it")
    parser.add_argument("--device", metavar="NAME", help="only what was measured on a GPU whose name has this in it")
    parser.add_argument(
        "--layers", action="store_true", help="which layer answers: the user's, the site's, a bundle or what ships"
    )
    parser.add_argument(
        "--compiler",
        metavar="VERSION",
        help="what is served where this one is at hand, e.g. 13.5.37, or all "
        "that is stored (default: the compiler here)",
    )
    _filters(parser, kernel)


def _filters(parser: argparse.ArgumentParser, kernel: KernelClass | None) -> None:
    """`--problem`, and the flags by which a kernel's problems are named elsewhere, as filters of what is known."""
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="K=V,...",
        help="only problems with these values, several with : between them; what is not named may be anything",
    )
    own = _own_filters(parser, kernel) if kernel is not None else ()
    if "--dtype" not in parser._option_string_actions:
        parser.add_argument("--dtype", type=words(DTYPES), metavar="T[,T]", help="only these element types")
    parser.set_defaults(own=own)


def _own_filters(parser: argparse.ArgumentParser, kernel: KernelClass) -> tuple[str, ...]:
    """The flags by which a kernel's problems are named elsewhere, as filters: none has a default. The fields they tell of."""
    if kernel.add_flags is None:
        return ()
    group = parser.add_argument_group(f"only problems of {kernel.name}")
    kernel.add_flags(group)
    for action in group._group_actions:
        action.default, action.help = None, str(action.help).partition(" (default")[0]
    return tuple(action.dest for action in group._group_actions if action.dest in kernel.fields)


def _listed_kernel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("listed", nargs="?", metavar="KERNEL", help="only of this kernel (default: of all)")


def _add_explain(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(subs, "explain", commands.explain, "say which schedule a problem is served with, and why")
    _arch_flag(parser)
    _problem_flags(parser, kernel)
    _way_flags(parser)
    parser.add_argument("--device", default="", metavar="NAME", help="GPU name as the driver gives it")


def _add_report(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(subs, "report", commands.report, "write the tiling-sensitivity report")
    _kernel_flag(parser)
    _arch_flag(
        parser,
        f"e.g. sm_90, or sm_90,sm_121 to see them side by side (default: that of the GPU here, or else {USUAL_ARCH})",
        several=True,
    )
    parser.add_argument("-o", "--out", default="report", metavar="DIR", help="folder to write to (default: report)")
    parser.add_argument("--regime", choices=REGIMES, help="default: burst")
    parser.add_argument("--device", metavar="NAME", help="only measurements of this GPU (default: the arch's newest)")


def _add_compare(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "compare",
        commands.compare,
        "say what became faster or slower from A to B, and which winners "
        "changed; exit code 1 where something is slower",
    )
    parser.add_argument(
        "a",
        metavar="A",
        help="before: a database, a table, a landscape, a folder of them, a report's folder, "
        "`shipped`; or of your database a compiler (13.5), a date (2026-11-22) or a device (H100); or "
        "SOURCE@COMPILER",
    )
    parser.add_argument("b", metavar="B", help="after: the same")
    parser.add_argument(
        "--kernel", dest="only", default="", metavar="NAME", help="only of this kernel (default: of all)"
    )
    _arch_flag(parser, "only this arch", usual=False)
    parser.add_argument("--regime", choices=REGIMES, help="only this regime (default: both)")
    parser.add_argument(
        "--threshold",
        type=_percent,
        default=2.0,
        metavar="PERCENT",
        help="differences up to this are none (default: 2)",
    )
    parser.add_argument("--all", action="store_true", help="also list what stayed the same")


def _percent(text: str) -> float:
    value = float(text.rstrip("%"))
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError("give percent, more than 0 and less than 100")
    return value


def _add_bench(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "bench",
        bench_commands.bench,
        "time a kernel beside its rivals, interleaved on this GPU: "
        "attention beside torch's backends, the untuned kernel, Triton and others",
    )
    _problem_flags(parser, kernel)
    parser.add_argument(
        "--methods", type=names, metavar="M[,M]", help="what takes part (default: all that is installed)"
    )
    parser.add_argument("--ceiling", action="store_true", help="also an 8192^3 matmul, and every rate over it")
    parser.add_argument(
        "--regime",
        choices=("burst", "sustained", "both"),
        default="burst",
        help="cool and at full clocks, at the power cap, or one after the other (default: burst)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=30,
        metavar="N",
        help="samples of a quick method (default: 30); slow ones get fewer",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all problems together (default: no limit)")
    parser.add_argument("--csv", metavar="FILE", help="also write one row per method and problem, as they are known")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --csv: leave out what is in it")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also check that what is launched is the machine code that was measured (needs the compiler)",
    )
    parser.add_argument(
        "--summary", nargs="+", metavar="FILE", help="measure nothing: sum up the rows of these files, as Markdown"
    )


def _add_dashboard(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "dashboard",
        search_commands.dashboard,
        "write what is measured as Optuna studies, and open optuna-dashboard on them where it is installed",
    )
    _listed_kernel(parser)
    _arch_flag(parser, "only this arch", usual=False)
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="where the studies go: a file, or the URL of a database (default: "
        "studies.log in the user's cache directory)",
    )
    parser.add_argument("--port", type=positive, default=8080, metavar="N", help="of the dashboard (default: 8080)")
    parser.add_argument("--write-only", action="store_true", help="write the studies and stop")


def _add_ablate(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "ablate",
        bench_commands.ablate,
        "say what each knob of the tuned schedule is worth: a ladder "
        "from the plain kernel, and the tuned one without each knob",
    )
    _arch_flag(parser)
    _problem_flags(parser, kernel)
    parser.add_argument(
        "--replay",
        nargs="+",
        metavar="FILE",
        help="measure nothing: climb over these recorded landscapes, whose problems count instead of the flags",
    )
    parser.add_argument(
        "--start",
        choices=("untuned", "default"),
        help="where the ladder begins: 64x64 tiles without "
        "hints, or the space's default (default: untuned; with --replay, default)",
    )
    parser.add_argument(
        "--regime",
        choices=("burst", "sustained"),
        help="cool and at full clocks, or at the power cap (default: burst; with --replay, the record's)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=30, metavar="N", help="samples of each in the final run (default: 30)"
    )
    parser.add_argument("--csv", metavar="FILE", help="also write the rows, after each problem")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")


def _add_study(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "study",
        bench_commands.study,
        "run the whole evaluation of the TiledAttention paper on this GPU: "
        "its benchmark, tiling sensitivity, tables and figures",
    )
    _kernel_flag(parser)
    parser.add_argument(
        "-o",
        "--out",
        default="study",
        metavar="DIR",
        help="folder to write to; run again, it goes on where it stopped (default: study)",
    )
    parser.add_argument(
        "--methods",
        type=names,
        metavar="M[,M]",
        help="what takes part (default: all of the paper that are installed, and Triton)",
    )
    parser.add_argument("--regime", choices=REGIMES, default="burst", help="default: burst")
    parser.add_argument(
        "--rounds", type=positive, default=30, metavar="N", help="samples of a quick method (default: 30)"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument("--no-tiles", action="store_true", help="leave out the tiling sensitivity")
    parser.add_argument(
        "--summary", action="store_true", help="measure nothing: write tables and figures of what the folder holds"
    )


def _add_ladder(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "ladder",
        bench_commands.ladder,
        "climb from the naive attention kernel to the served one, an edit "
        "at a time, over sequence lengths; also hints for every arch",
    )
    _problem_flags(parser, kernel, own=False)
    parser.add_argument(
        "-o",
        "--out",
        default="ladder",
        metavar="DIR",
        help="folder to write to; run again, it goes on where it stopped (default: ladder)",
    )
    parser.add_argument("--regime", choices=REGIMES, default="burst", help="default: burst")
    parser.add_argument(
        "--rounds", type=positive, default=30, metavar="N", help="samples of a quick rung (default: 30)"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument(
        "--targets",
        action="store_true",
        help="measure nothing: print the hints of what is served on each "
        "arch as `ct.ByTarget`, to paste above a kernel",
    )
    parser.add_argument(
        "--summary", action="store_true", help="measure nothing: write the table and chart of what the folder holds"
    )


def _add_profile(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs, "profile", bench_commands.profile, "say what methods do with the GPU, side by side, under Nsight Compute"
    )
    _problem_flags(parser, kernel)
    parser.add_argument(
        "--methods",
        type=names,
        metavar="M[,M]",
        help="what is profiled, by the names of bench (default: the kernel and its first rival)",
    )
    parser.add_argument(
        "-o", "--out", metavar="DIR", help="also write a Markdown and a CSV file for each problem to this folder"
    )
    parser.add_argument("--ncu", metavar="FILE", help="Nsight Compute (default: on PATH, or where it installs itself)")


def _add_landscapes(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs, "landscapes", store_commands.landscapes, "list what is measured: problem, device, programs, measurements"
    )
    _listed_kernel(parser)
    parser.add_argument("--export", metavar="DIR", help="also write each landscape to a file of its own")
    parser.add_argument(
        "--format",
        choices=("tiledsched", "csv", "t4", "kernel-tuner-cache"),
        default="tiledsched",
        help="of those files: this package's, a row for each measurement, T4 results, or what Kernel Tuner's "
        "simulation mode reads (default: tiledsched)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="every measurement, not only the newest of each program that decides something",
    )


def _add_refresh(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "refresh",
        commands.refresh,
        "after another compiler or a change of a kernel: keep the evidence of "
        "machine code that is the same, and race the rest again",
    )
    _kernel_flag(parser)
    _arch_flag(parser)
    _filters(parser, kernel)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument("--effort", default="quick", choices=tuple(EFFORTS), help="of the races (default: quick)")
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="also race what differs from the fastest so far in one or two knobs, beyond what the space explores",
    )
    parser.add_argument(
        "--runner",
        choices=("auto", "none"),
        default="auto",
        help="race on the GPU, or only say what would be "
        "raced; auto races where a GPU of the arch is present (default: auto)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument(
        "--compile-timeout", type=float, default=120.0, metavar="SECONDS", help="per schedule (default: 120)"
    )


def _add_warmup(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "warmup",
        store_commands.warmup,
        "build what the tuned table serves ahead, so that the first call of a process starts no compiler",
    )
    _arch_flag(parser, "e.g. sm_90 (default: those of the GPUs here)", usual=False)
    _prepare_flags(parser, kernel)


def _add_bundle(subs: Any, kernel: KernelClass | None) -> None:
    parser = _command(
        subs,
        "bundle",
        store_commands.bundle,
        "write what the tuned table serves, built, to a file for machines without a compiler",
    )
    _arch_flag(parser, "e.g. sm_90; no GPU of it is needed", required=True)
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FILE",
        help="file to write; what it holds is used again. In a folder, it is named by its contents",
    )
    parser.add_argument("--campaign", metavar="CAMPAIGN", help="only what this campaign of a fleet did")
    _prepare_flags(parser, kernel)


def _prepare_flags(parser: argparse.ArgumentParser, kernel: KernelClass | None) -> None:
    _kernel_flag(parser)
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    if kernel is not None and kernel.add_likely_flags is not None:
        kernel.add_likely_flags(parser.add_argument_group(f"beside what is tuned of {kernel.name}"))


def _add_fleet(subs: Any, kernel: KernelClass | None) -> None:
    text = "tune, record, refresh or bench on many GPUs and hosts, from leases in the database"
    parser = subs.add_parser(FLEET, help=text, description=text[0].upper() + text[1:] + ".")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add, run in (
        (_add_tune, fleet_commands.tune),
        (_add_record, fleet_commands.record),
        (_add_refresh, fleet_commands.refresh),
        (_add_bench, fleet_commands.bench),
    ):
        add(actions, kernel)
        single = list(actions.choices.values())[-1]
        if "--arch" not in single._option_string_actions:
            _arch_flag(single)
        fleet_flags.of_a_fleet(single, _archs_named, run)
    fleet_flags.add_others(actions, _command)


def _add_doctor(subs: Any) -> None:
    _command(
        subs, "doctor", store_commands.doctor, "say what works on this machine and what to install for what does not"
    )


def _add_completion(subs: Any) -> None:
    parser = _command(
        subs, "completion", commands.completion, "print what makes a shell complete commands and flags", db=False
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")


def _add_db(subs: Any) -> None:
    parser = subs.add_parser(
        "db",
        help="export, import, merge, query, back up, check or upgrade the database",
        description="Export, import, merge, query, back up, check or upgrade the database.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    export = _command(
        actions, "export", store_commands.db_export, "write entries and their evidence to a reviewable table"
    )
    _listed_kernel(export)
    _arch_flag(export, "only this arch", usual=False)
    export.add_argument("-o", "--out", metavar="FILE", default="-", help="file to write (default: stdout)")
    bring = _command(actions, "import", store_commands.db_import, "take in tables and landscapes")
    bring.add_argument(
        "files", metavar="FILE", nargs="+", help="what db export or landscapes --export wrote: JSON, CSV or T4"
    )
    merge = _command(
        actions, "merge", store_commands.db_merge, "take in the measurements and entries of other databases"
    )
    merge.add_argument("others", metavar="URL", nargs="+", help="databases to read")
    forget = _command(
        actions,
        "forget-failures",
        store_commands.db_forget_failures,
        "delete stored failures, so that they are tried again",
    )
    _listed_kernel(forget)
    _arch_flag(forget, "only this arch", usual=False)
    forget.add_argument(
        "--kind",
        choices=[str(kind) for kind in FailureKind],
        metavar="KIND",
        help="only this kind, e.g. compile_error or out_of_memory",
    )
    query = _command(actions, "query", store_commands.db_query, "ask a question in SQL; it can change nothing")
    query.add_argument(
        "sql", metavar="SQL", nargs="?", help="one SELECT, or - for standard input (default: list the tables and views)"
    )
    query.add_argument("--csv", action="store_true", help="print CSV")
    query.add_argument(
        "--limit",
        type=positive,
        default=1000,
        metavar="N",
        help="rows of a table or of JSON, at most (default: 1000; CSV has all)",
    )
    query.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="give up after this long (default: 60)"
    )
    backup = _command(
        actions, "backup", store_commands.db_backup, "write a copy that is whole, whoever is writing meanwhile"
    )
    backup.add_argument("file", metavar="FILE", help="where to; to go back, put it in the place of the database")
    backup.add_argument("--force", action="store_true", help="in place of a file that is there")
    _command(actions, "check", store_commands.db_check, "look for damage")
    _command(actions, "upgrade", store_commands.db_upgrade, "bring the schema up to date")
