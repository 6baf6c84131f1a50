"""Every command and flag. Importing this imports neither a compiler nor a GPU library."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tiledsched import __version__
from tiledsched.cli import bench_commands, commands, search_commands
from tiledsched.kernels.attention.problem import ALIGNMENTS, DTYPES
from tiledsched.kernels.attention.suites import SUITES
from tiledsched.search.effort import EFFORTS
from tiledsched.studies.repeatability.rows import METHODS

EPILOG = """exit codes: 0 done, 1 no valid schedule or a regression found, 2 usage or configuration, 130 interrupted.
Data goes to stdout, progress and logs to stderr. Settings: flags, then TILEDSCHED_* variables, then tiledsched.toml,
then the user's config.toml."""


def integers(text: str) -> list[int]:
    """`1024,4096` -> [1024, 4096]."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers such as 1024,4096")
    return values


def dtypes(text: str) -> list[str]:
    """`float16,bfloat16` -> both, checked."""
    values = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [value for value in values if value not in DTYPES]
    if wrong or not values:
        raise argparse.ArgumentTypeError(f"{text!r} must be of {', '.join(DTYPES)}, separated by commas")
    return values


def study_methods(text: str) -> list[str]:
    """`race,in-turn` -> both, checked."""
    values = [part.strip() for part in text.split(",") if part.strip()]
    if not values or not set(values) <= set(METHODS):
        raise argparse.ArgumentTypeError(f"{text!r} must be of {', '.join(METHODS)}, separated by commas")
    return values


def names(text: str) -> list[str]:
    """`a,b` -> both; the command checks them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def positive(text: str) -> int:
    """One positive integer."""
    return integers(text)[0] if "," not in text else integers("")[0]


def count(text: str) -> int:
    """One integer, 0 or more."""
    return 0 if text.strip() == "0" else positive(text)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="tiledsched", description="Find, prove, keep and serve the best schedule of "
                                     "cuTile kernels.", epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tiledsched {__version__}")
    parser.set_defaults(verbose=False)
    subs = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_tune(subs)
    _add_record(subs)
    _add_show(subs)
    _add_explain(subs)
    _add_report(subs)
    _add_bench(subs)
    _add_ablate(subs)
    _add_bench_search(subs)
    _add_study(subs)
    _add_landscapes(subs)
    _add_warmup(subs)
    _add_bundle(subs)
    _add_doctor(subs)
    _add_db(subs)
    return parser


def _command(subs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, *, json: bool = True,
             db: bool = True) -> argparse.ArgumentParser:  # fmt: skip
    parser: argparse.ArgumentParser = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done to stderr")
    if db:
        parser.add_argument("--db", metavar="URL", help="database path or URL (default: TILEDSCHED_DB, or the user's "
                            "data directory)")  # fmt: skip
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON with a schema_version")
    parser.set_defaults(run=run)
    return parser


def _problem_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=integers, default=[1024, 4096], metavar="S[,S]", help="sequence lengths "
                        "(default: 1024,4096)")  # fmt: skip
    parser.add_argument("--head-dim", type=integers, default=[64, 128], metavar="D[,D]", help="head dimensions, up to "
                        "256 (default: 64,128)")  # fmt: skip
    parser.add_argument("--dtype", type=dtypes, default=["float16"], metavar="T[,T]", help=f"{', '.join(DTYPES)} "
                        "(default: float16)")  # fmt: skip
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both", help="causal mask (default: both)")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences (default: 16k tokens in all)")
    parser.add_argument("--heads", type=positive, metavar="N", help="query heads (default: 2048 / head dimension)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="key/value heads (default: as many as heads)")
    _other_problem_flags(parser)
    parser.add_argument("--suite", choices=tuple(SUITES), help="a named set of problems instead of the flags above")


def _other_problem_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-q", type=positive, metavar="N", help="query rows (default: as many as keys)")
    parser.add_argument("--alignment", choices=ALIGNMENTS, default="top_left", help="where the causal diagonal starts, or "
                        "ends: matters where --seq-q does (default: top_left)")  # fmt: skip
    parser.add_argument("--value-dim", type=positive, default=0, metavar="D", help="columns of v and the output (default: "
                        "as the head dimension)")  # fmt: skip
    parser.add_argument("--lse", action="store_true", help="return the log-sum-exp of each row, too")


def _add_tune(subs: Any) -> None:
    parser = _command(subs, "tune", commands.tune, "find the best schedules for an arch: measured where its GPU is "
                      "present, else built and ranked by the model")  # fmt: skip
    parser.add_argument("--arch", required=True, metavar="ARCH", help="target, e.g. sm_121")
    _problem_flags(parser)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument("--effort", default="default", choices=tuple(EFFORTS), help="how many programs are measured and "
                        "race for the decision (default: default)")  # fmt: skip
    parser.add_argument("--trials", type=positive, metavar="N", help="distinct programs to measure per problem, at most "
                        "(default: as the effort says)")  # fmt: skip
    parser.add_argument("--sampler", default="surrogate", choices=("surrogate", "tpe", "random", "exhaustive"),
                        help="what proposes schedules (default: surrogate)")  # fmt: skip
    parser.add_argument("--accum-mode", choices=("fp32", "fp16"), help="accuracy class (default: fp32)")
    parser.add_argument("--regime", choices=("burst", "sustained"), help="cool and at full clocks, or at the power cap "
                        "(default: burst)")  # fmt: skip
    parser.add_argument("--runner", choices=("auto", "gpu", "none"), default="auto", help="measure on the GPU, or only "
                        "build and rank; auto measures where a GPU of the arch is present (default: auto)")  # fmt: skip
    parser.add_argument("--space", metavar="FILE", help="your own search space (TOML)")
    parser.add_argument("--candidates", metavar="FILE",
                        help="search only these schedules, the default and what is served: a JSON list")  # fmt: skip
    parser.add_argument("--neighbours", action="store_true", help="also try what differs from the fastest so far in one or "
                        "two knobs, beyond what the space or the list explores")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampler (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument("--compile-timeout", type=float, default=120.0, metavar="SECONDS", help="per schedule "
                        "(default: 120)")  # fmt: skip


def _add_record(subs: Any) -> None:
    parser = _command(subs, "record", commands.record, "record landscapes: measure a broad choice of programs of each "
                      "problem, for replay anywhere")  # fmt: skip
    parser.add_argument("--arch", required=True, metavar="ARCH", help="the GPU's, e.g. sm_90")
    _problem_flags(parser)
    parser.add_argument("--programs", type=positive, default=300, metavar="N", help="distinct programs per problem "
                        "(default: 300)")  # fmt: skip
    parser.add_argument("--sustained-leaders", type=count, default=24, metavar="N", help="how many of the fastest are "
                        "measured in the sustained regime, too (default: 24)")  # fmt: skip
    parser.add_argument("--build-only", action="store_true", help="build the programs and stop; needs no GPU")
    parser.add_argument("--out", metavar="DIR", help="folder for the landscape files")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after this long (default: no limit)")
    parser.add_argument("--accum-mode", choices=("fp32", "fp16"), help="accuracy class (default: fp32)")
    parser.add_argument("--space", metavar="FILE", help="your own search space (TOML)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of schedules (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument("--compile-timeout", type=float, default=120.0, metavar="SECONDS", help="per schedule "
                        "(default: 120)")  # fmt: skip


def _add_show(subs: Any) -> None:
    parser = _command(subs, "show", commands.show, "list what is tuned, with provenance")
    parser.add_argument("--arch", metavar="ARCH", help="only this arch")


def _add_explain(subs: Any) -> None:
    parser = _command(subs, "explain", commands.explain, "say which schedule a problem is served with, and why")
    parser.add_argument("--arch", required=True, metavar="ARCH", help="e.g. sm_90")
    parser.add_argument("--seq-len", type=positive, required=True, metavar="N", help="sequence length")
    parser.add_argument("--head-dim", type=positive, required=True, metavar="D", help="head dimension")
    parser.add_argument("--dtype", default="float16", choices=DTYPES, help="default: float16")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences (default: 16k tokens in all)")
    parser.add_argument("--heads", type=positive, metavar="N", help="query heads (default: 2048 / head dimension)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="key/value heads (default: as many as heads)")
    _other_problem_flags(parser)
    parser.add_argument("--device", default="", metavar="NAME", help="GPU name as the driver gives it")


def _add_report(subs: Any) -> None:
    parser = _command(subs, "report", commands.report, "write the tiling-sensitivity report")
    parser.add_argument("--arch", required=True, metavar="ARCH", help="e.g. sm_90")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--regime", choices=("burst", "sustained"), default="burst", help="default: burst")
    parser.add_argument("--device", metavar="NAME", help="only measurements of this GPU (default: the arch's newest)")


def _add_bench(subs: Any) -> None:
    parser = _command(subs, "bench", bench_commands.bench, "time sdpa beside torch's backends, the untuned kernel, Triton "
                      "and others, interleaved on this GPU")  # fmt: skip
    _problem_flags(parser)
    parser.add_argument("--methods", type=names, metavar="M[,M]", help="what takes part (default: all that is "
                        "installed)")  # fmt: skip
    parser.add_argument("--ceiling", action="store_true", help="also an 8192^3 matmul, and every rate over it")
    parser.add_argument("--regime", choices=("burst", "sustained", "both"), default="burst", help="cool and at full "
                        "clocks, at the power cap, or one after the other (default: burst)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="samples of a quick method (default: 30); "
                        "slow ones get fewer")  # fmt: skip
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all problems together (default: no limit)")
    parser.add_argument("--csv", metavar="FILE", help="also write one row per method and problem, as they are known")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --csv: leave out what is in it")
    parser.add_argument("--verify", action="store_true", help="also check that what is launched is the machine code "
                        "that was measured (needs the compiler)")  # fmt: skip
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="measure nothing: sum up the rows of these files, "
                        "as Markdown")  # fmt: skip


def _add_bench_search(subs: Any) -> None:
    parser = _command(subs, "bench-search", search_commands.bench_search, "replay ways to search on recorded landscapes: how "
                      "many measurements each takes; needs no GPU", db=False)  # fmt: skip
    parser.add_argument("--samplers", type=names, metavar="NAME[,NAME]", help="which methods (default: all)")
    parser.add_argument("--seeds", type=positive, default=50, metavar="N", help="runs of each method on each landscape, at "
                        "most (default: 50)")  # fmt: skip
    parser.add_argument("--landscapes", nargs="+", metavar="FILE", help="what to search (default: the burst landscapes that "
                        "ship with the package)")  # fmt: skip
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one per CPU)")
    parser.add_argument("--csv", metavar="FILE", help="also write one row per run; rows of other methods that are there "
                        "stay and are summed up, too; a name that ends in .xz is compressed")  # fmt: skip
    parser.add_argument("--figure", metavar="FILE", help="also draw it (PNG or SVG; needs matplotlib)")


def _add_ablate(subs: Any) -> None:
    parser = _command(subs, "ablate", bench_commands.ablate, "say what each knob of the tuned schedule is worth: a ladder "
                      "from the plain kernel, and the tuned one without each knob")  # fmt: skip
    parser.add_argument("--arch", required=True, metavar="ARCH", help="of this GPU or of the record, e.g. sm_90")
    _problem_flags(parser)
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="measure nothing: climb over these recorded "
                        "landscapes, whose problems count instead of the flags")  # fmt: skip
    parser.add_argument("--start", choices=("untuned", "default"), help="where the ladder begins: 64x64 tiles without "
                        "hints, or the space's default (default: untuned; with --replay, default)")  # fmt: skip
    parser.add_argument("--regime", choices=("burst", "sustained"), help="cool and at full clocks, or at the power cap "
                        "(default: burst; with --replay, the record's)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=30, metavar="N", help="samples of each in the final run "
                        "(default: 30)")  # fmt: skip
    parser.add_argument("--csv", metavar="FILE", help="also write the rows, after each problem")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")


def _add_study(subs: Any) -> None:
    parser = _command(subs, "study", commands.study, "let the race and other methods choose among the same measured "
                      "programs, once each; run it again and again, then sum it up")  # fmt: skip
    parser.add_argument("--arch", metavar="ARCH", help="of this GPU, e.g. sm_90 (required, except with --summary)")
    _problem_flags(parser)
    parser.add_argument("--programs", type=positive, default=100, metavar="N", help="programs to choose among, per problem "
                        "(default: 100)")  # fmt: skip
    parser.add_argument("--methods", type=study_methods, default=list(METHODS[:3]), metavar="M[,M]",
                        help=f"{', '.join(METHODS)} (default: the first three)")  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="of the order of problems and methods (default: time)")
    parser.add_argument("--csv", metavar="FILE", help="where to append the rows (required, except with --summary)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    parser.add_argument("--summary", metavar="FILE", help="measure nothing: sum up the rows of this file")


def _add_landscapes(subs: Any) -> None:
    parser = _command(subs, "landscapes", commands.landscapes, "list what is measured: problem, device, programs, "
                      "measurements")  # fmt: skip
    parser.add_argument("--export", metavar="DIR", help="also write each landscape to a file of its own")
    parser.add_argument("--format", choices=("tiledsched", "t4", "kernel-tuner-cache"), default="tiledsched",
                        help="of those files: this package's, T4 results, or what Kernel Tuner's simulation mode reads "
                        "(default: tiledsched)")  # fmt: skip


def _add_warmup(subs: Any) -> None:
    parser = _command(subs, "warmup", commands.warmup, "build what the tuned table serves ahead, so that the first call "
                      "of a process starts no compiler")  # fmt: skip
    parser.add_argument("--arch", metavar="ARCH", help="e.g. sm_90 (default: those of the GPUs here)")
    _prepare_flags(parser)


def _add_bundle(subs: Any) -> None:
    parser = _command(subs, "bundle", commands.bundle, "write what the tuned table serves, built, to a file for machines "
                      "without a compiler")  # fmt: skip
    parser.add_argument("--arch", required=True, metavar="ARCH", help="e.g. sm_90; no GPU of it is needed")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write; what it holds is used again")
    _prepare_flags(parser)


def _prepare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", type=dtypes, default=[], metavar="T[,T]", help=f"also {' or '.join(DTYPES)} "
                        "(default: what the entries have)")  # fmt: skip
    parser.add_argument("--group", type=integers, default=[], metavar="G[,G]", help="also so many query heads per key/value "
                        "head (default: what the entries have)")  # fmt: skip
    parser.add_argument("--any-length", action="store_true", help="also key lengths that no tile divides")
    parser.add_argument("--decode", action="store_true", help="also one query row, as generation with a cache asks for")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")


def _add_doctor(subs: Any) -> None:
    _command(subs, "doctor", commands.doctor, "say what works on this machine and what to install for what does not")


def _add_db(subs: Any) -> None:
    parser = subs.add_parser("db", help="export, import, merge, check or upgrade the database",
                             description="Export, import, merge, check or upgrade the database.")  # fmt: skip
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    export = _command(actions, "export", commands.db_export, "write entries and their evidence to a reviewable table")
    export.add_argument("--arch", metavar="ARCH", help="only this arch")
    export.add_argument("--out", metavar="FILE", default="-", help="file to write (default: stdout)")
    bring = _command(actions, "import", commands.db_import, "take in a table written by export")
    bring.add_argument("file", metavar="FILE", help="table to read")
    merge = _command(actions, "merge", commands.db_merge, "take in everything another database holds")
    merge.add_argument("other", metavar="URL", help="database to read")
    _command(actions, "check", commands.db_check, "look for damage")
    _command(actions, "upgrade", commands.db_upgrade, "bring the schema up to date")
