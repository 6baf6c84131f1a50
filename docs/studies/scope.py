r"""What one tuned problem says about the others of its kind, compared with the performance model: table of
docs/results/serving.md.

    python -m docs.studies.scope tuning_db/landscapes/attention/*_burst_*.json.xz \
        tuning_db/landscapes/attention/held_out/*.json.xz --table tuning_db/tables/attention/sm_90.json

Every landscape in turn is the one problem that somebody tuned, where otherwise only the model chose, as on the archs whose
tables are modelled. The schedule transferred from it to each other landscape of its kind, and the model's choice among the
programs of that landscape, are looked up there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from docs.studies.flags import flag, parser_with
from docs.studies.landscapes import Landscape, read_landscape
from docs.studies.policy import ANY, Judged, Study, summary
from tiledsched.report.document import Table, to_markdown
from tiledsched.serve.chain import NEIGHBOURHOOD
from tiledsched.store.exchange import read_table
from tiledsched.store.records import Entry
from tiledsched.tuning.race import Rules

BANDS = (0.0, 1.0, 2.5, 3.0, 4.0, 5.0, ANY)
"""Distances at which the table begins a new line."""
HEAD = ("distance", "pairs", "transferred: mean", "worst", "modelled: mean", "worst", "transferred is slower")
MOST_SPILLED = 48
"""Bytes that a program may spill, as in serving."""
SLOWER = 0.005
"""Differences of losses up to this are noise."""


def tuned(one: Landscape, study: Study) -> Entry:
    """The entry of a tune that finds the best program of a landscape."""
    first, *rest = sorted((each for each in one.programs if each.checked), key=lambda each: each.median_us)
    ties = [each for each in rest if each.median_us <= (1 + Rules.same) * first.median_us]
    behind = rest[len(ties)]
    complete = study.space.complete
    return Entry(
        kernel=study.kernel.name,
        arch=one.arch,
        problem=one.problem,
        regime=one.regime,
        provenance="measured",
        schedule=complete(first.schedule),
        fingerprint=first.fingerprint,
        ties=tuple(complete(each.schedule) for each in ties),
        runner_up=complete(behind.schedule),
        margin=behind.median_us / first.median_us - 1,
    )


def modelled(one: Landscape, study: Study) -> Judged:
    """The model's choice among the programs of a landscape that a run without a GPU would rank."""
    pins = study.space.modelled_pins()
    usable = [
        each.facts.spill_bytes <= MOST_SPILLED and all(each.schedule[name] == pins[name] for name in pins)
        for each in one.programs
    ]
    chosen = one.programs[int(np.where(usable, one.modelled_us, np.inf).argmin())]
    loss = chosen.median_us / one.best_us - 1
    return Judged(problem=one.problem, schedule=chosen.schedule, loss=loss, measured=True, distance=0.0)


def pairs(study: Study) -> list[tuple[Judged, Judged]]:
    """For each pair of landscapes of one kind: what is transferred from the first to the second, and the model's choice there."""
    own = {one: modelled(one, study) for one in study.landscapes}
    policy, similarity = study.policy(), study.kernel.similarity
    found = []
    for one, other in itertools.permutations(study.landscapes, 2):
        schedule = policy(other.problem, [tuned(one, study)])
        if schedule is not None:
            apart = similarity.distance(one.problem, other.problem)
            found.append((study.judge(other, schedule, apart), own[other]))
    return found


def _row(name: str, found: Sequence[tuple[Judged, Judged]]) -> tuple[str, ...]:
    sides = [summary(side) for side in zip(*found, strict=True)]
    slower = sum(far.loss > near.loss + SLOWER for far, near in found)
    losses = (f"{loss:.1%}" for side in sides for loss in (side.mean, side.worst))
    return name, str(len(found)), *losses, str(slower)


def document(study: Study) -> str:
    """The table, as Markdown."""
    found = pairs(study)
    rows = [
        _row(f"{low:g} to {high:g}" if high < ANY else f"above {low:g}", inside)
        for low, high in itertools.pairwise(BANDS)
        if (inside := [pair for pair in found if low < pair[0].distance <= high])
    ]
    served = [(pair[0] if pair[0].distance <= NEIGHBOURHOOD else pair[1], pair[1]) for pair in found]
    rows += [_row("all", found), _row("all, as served", served)]
    return to_markdown([Table(head=HEAD, rows=tuple(rows))])


def main() -> None:
    """Print the table."""
    parser = parser_with(
        flag("landscapes", nargs="+", type=Path, help="recorded landscapes of one arch"),
        flag("--table", type=Path, required=True, help="the table of the arch, for its machine code"),
        prog="python -m docs.studies.scope",
        description=__doc__,
    )
    asked = parser.parse_args()
    recorded = [read_landscape(path) for path in asked.landscapes]
    print(document(Study(recorded, read_table(asked.table).entries)), end="")


if __name__ == "__main__":
    main()
