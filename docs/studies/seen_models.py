"""From a model's first run to a tuned one: `python -m docs.studies.seen_models --budget 180 --csv FILE`, on a machine with a
GPU.

In a home that is empty at first, each model runs untuned while its problems are captured; `tiledsched tune --seen` tunes them,
and `tiledsched warmup --seen` compiles what they are served with; then each model runs again, in another process. Models and
timing are those of `docs.studies.whole_models`: transformers with random weights, prefill and decode at several lengths, torch's
attention and ours in turn in one process. So each rate has torch's of the same process beside it. The first prefill of a process
is timed in processes that begin with it: one for torch's, and those before and after the tune for ours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from docs.studies import whole_models
from docs.studies.flags import flag, integers, parser_with, positive, words
from docs.studies.whole_models import METHODS, MODELS, PHASES, Row
from tiledsched.core.errors import TiledschedError
from tiledsched.core.files import csv_text, write_whole
from tiledsched.report.document import Paragraph, Table, to_markdown

TORCH, BEFORE, AFTER = "torch first", "before", "after"
"""The processes of a model: one that begins with torch's attention, then ours untuned, then ours tuned."""
CLI = (sys.executable, "-m", "tiledsched")
OURS_FIRST, TORCH_FIRST = 1, 2
"""Numbers of the runs of `whole_models` that begin with ours and with torch's."""


def steps(options: argparse.Namespace, environment: Mapping[str, str], folder: str) -> Iterator[dict[str, Any]]:
    """Run everything, in turn; a row for each model, method, phase, length and state.

    Raises:
        TiledschedError: a process failed; it has said why.
    """

    def rows(
        state: str, run: int, model: str, more: Sequence[str], variables: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        given = ["--model", model, "--layers", str(options.layers), "--device", options.device]
        given += ["--dtype", options.dtype, "--new-tokens", str(options.new_tokens), *more, "--no-compare"]
        for found in whole_models.in_a_process(run, given, {**environment, **variables}, folder):
            assert isinstance(found, Row)
            yield {"state": state, **asdict(found)}

    batches, prompts = (",".join(map(str, each)) for each in (options.batch, options.prompt))
    whole = ["--batch", batches, "--prompt", prompts, "--rounds", str(options.rounds)]
    first = ["--batch", str(options.batch[0]), "--prompt", str(options.prompt[0]), "--rounds", "1"]
    for model in options.model:
        yield from rows(TORCH, TORCH_FIRST, model, first, {})
        yield from rows(BEFORE, OURS_FIRST, model, whole, {"TILEDSCHED_CAPTURE": "1"})
    for command in (["show"], ["tune", "--budget", str(options.budget)], ["warmup"]):
        started = time.monotonic()
        code = subprocess.run([*CLI, *command, "--seen"], env=environment, cwd=folder, stdout=2, check=False).returncode
        _note(f"tiledsched {command[0]} --seen: {time.monotonic() - started:.0f} s")
        if code:
            raise TiledschedError(f"tiledsched {command[0]} --seen ended with {code}; its message says what to do")
    for model in options.model:
        yield from rows(AFTER, OURS_FIRST, model, whole, {})


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary as Markdown: tokens per second before and after, torch's, and the first prefill of a process."""
    lines = []
    ours = METHODS[1]
    keys = dict.fromkeys(
        (row["model"], row["batch"], row["prompt"], row["phase"]) for row in rows if row["state"] == AFTER
    )
    for key in keys:
        cells = {
            (row["state"], row["method"]): row
            for row in rows
            if (row["model"], row["batch"], row["prompt"], row["phase"]) == key
        }
        now = cells[AFTER, ours]
        before = cells.get((BEFORE, ours), {})
        lines.append(
            (
                *map(str, key),
                *(
                    f"{cells[each]['tokens_per_s']:,.0f}" if each in cells else "-"
                    for each in ((BEFORE, ours), (AFTER, ours))
                ),
                f"{cells[AFTER, METHODS[0]]['tokens_per_s']:,.0f}",
                *(f"{row['ratio']:.3f}x" if row else "-" for row in (before, now)),
            )
        )
    head = (
        "model",
        "batch",
        "prompt",
        "phase",
        "before, tokens/s",
        "after",
        "torch",
        "before over torch",
        "after over torch",
    )
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        firsts = []
        for state, method in ((TORCH, METHODS[0]), (BEFORE, ours), (AFTER, ours)):
            found = [
                row
                for row in rows
                if (row["model"], row["state"], row["method"], row["phase"]) == (model, state, method, PHASES[0])
            ]
            firsts.append(f"{found[0]['first_ms']:.0f} ms {'with torch' if state == TORCH else state}" if found else "")
        told.append(f"First prefill of a process, {model}: {', '.join(filter(None, firsts))}.")
    told += [f"Calls left to torch: {why}" for why in dict.fromkeys(row["fallbacks"] for row in rows) if why]
    if rows:
        told.append(f"{rows[0]['device']}, {rows[0]['dtype']}, {rows[0]['versions']}; {rows[0]['date']}")
    return to_markdown([Table(head=head, rows=lines), *(Paragraph(text=text) for text in told)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and print."""
    parser = parser_with(
        flag(
            "--model",
            type=words(tuple(MODELS)),
            default=["llama", "qwen2"],
            metavar="NAMES",
            help="default: llama,qwen2",
        ),
        flag("--batch", type=integers, default=[1, 4], metavar="NUMBERS", help="sequences; default: 1,4"),
        flag("--prompt", type=integers, default=[700, 1900], metavar="NUMBERS", help="tokens; default: 700,1900"),
        *(
            flag(name, type=positive, default=default, metavar="N", help=f"{text}; default: {default}")
            for name, default, text in (
                ("--new-tokens", 16, "tokens generated"),
                ("--rounds", 3, "samples of each phase"),
                ("--layers", 4, "transformer blocks"),
                ("--budget", 180, "seconds of the tune"),
            )
        ),
        flag("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16"),
        flag("--device", default="cuda"),
        flag("--csv", metavar="FILE", help="where to write the rows, as they come"),
        prog="python -m docs.studies.seen_models",
        description="models untuned, tuned by what they call, and torch",
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    code = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        try:
            for row in steps(options, whole_models.make_home(home), home):
                rows.append(row)
                _note(
                    f"{row['state']}: {row['model']} {row['batch']}x{row['prompt']} {row['method']} {row['phase']}: "
                    f"{row['tokens_per_s']:,.0f} tokens/s (first {row['first_ms']:.0f} ms)"
                )
                if options.csv:
                    write_whole(options.csv, csv_text(rows))
        except TiledschedError as error:
            _note(str(error))
            code = error.exit_code
    print(to_text(rows))
    return code


def _note(text: str) -> None:
    print(f"seen_models: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
