"""Spaces that cannot be listed, and functions of declarations that take long: everything ends, and a budget holds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
from fake_builds import FakeBuilds
from store_samples import TOOLCHAIN
from test_search_tuner import LANDSCAPES, Recorded, tune

from tiledsched.checking.schedules import check_problems
from tiledsched.core import space as space_module
from tiledsched.core.cost import Cost
from tiledsched.core.errors import SpaceError
from tiledsched.core.fields import Knob
from tiledsched.core.space import Constraint, SearchSpace, Walk, WalkEndedError
from tiledsched.core.space_files import load_space, space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.softmax import Softmax
from tiledsched.store.db import TuningDB
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.record import plan
from tiledsched.tuning.tuner import Tuner

PROBLEM = Softmax.problem(rows=64, columns=512)
MOST_CPU_S = 20.0
"""Of what took minutes, or did not end. It is the process's own time, so that other load does not count."""


def space_of(choices: dict[str, list], *constraints: str) -> SearchSpace:
    """A space with these knobs and constraints, which reads no problem."""
    return SearchSpace(
        kernel="softmax",
        arch="sm_90",
        knobs={name: Knob(choices=tuple(each), default=each[0]) for name, each in choices.items()},
        constraints=tuple(
            Constraint(require=each, because="", exploring=False, names=frozenset(choices) & frozenset(each.split()))
            for each in constraints
        ),
        limits={},
    )


FLAGS = [f"f{number}" for number in range(36)]
NUMBERS = [f"n{number}" for number in range(4)]
SPACES = {
    "one knob of many choices": space_of({"n": list(range(200_000))}, "n % 3 == 0"),
    "10^12 schedules": space_of({name: list(range(1000)) for name in NUMBERS}),
    "a constraint on all of 10^12": space_of({name: list(range(1, 1001)) for name in NUMBERS}, " + ".join(NUMBERS) + " > 9"),
    "many constraints on 10^6 each": space_of(
        {name: list(range(1000)) for name in NUMBERS}, *(f"n0 + n1 + {number} > 5" for number in range(64))
    ),
    "the default far from all that is valid": space_of(
        {name: [0, 1] for name in FLAGS}, " + ".join(FLAGS) + " == 18"
    ),
    "a valid schedule is hard to find": space_of(
        {name: [0, 1] for name in FLAGS}, " + ".join(f"{1 << place} * {name}" for place, name in enumerate(FLAGS)) + f" == {0xFEDCBA987}"
    ),
    "nothing valid": space_of({name: [0, 1] for name in FLAGS}, " + ".join(FLAGS) + " == 99"),
}  # fmt: skip
HOPELESS = {"a valid schedule is hard to find", "nothing valid"}


@pytest.fixture(autouse=True)
def short_time():
    """The test fails where it takes much longer than it should, instead of never ending."""

    def late(*_):
        raise AssertionError(f"more than {MOST_CPU_S:g} s of this process's time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_every_look_at_a_space_ends(name) -> None:
    space = SPACES[name]
    looks = (
        lambda: space.default(PROBLEM),
        lambda: space.sample(PROBLEM, random.Random(0)),
        lambda: next(plan(space, PROBLEM, deadline_s=time.monotonic() + 1)),
    )
    for look in looks:
        if name in HOPELESS:
            with pytest.raises((SpaceError, StopIteration), match=r"fewer choices|no valid schedule|^$"):
                look()
        else:
            assert space.violations(look(), PROBLEM) == []
    late = time.monotonic() + 0.5
    listed, whole = space.listed(PROBLEM, deadline_s=late)
    assert len(set(listed)) == len(listed) <= space.most_listed
    assert not whole
    assert (listed == []) == (name in HOPELESS)
    assert all(space.violations(each, PROBLEM) == [] for each in listed[:50])


@pytest.mark.slow
def test_of_a_large_space_schedules_are_drawn_from_all_of_it() -> None:
    space = SPACES["10^12 schedules"]
    listed, whole = space.listed(PROBLEM)
    assert (len(listed), whole) == (space_module.DRAWN, False)
    assert listed == space.listed(PROBLEM)[0]
    for name in NUMBERS:
        assert len({each[name] for each in listed}) > 800


def test_a_space_that_can_be_listed_is() -> None:
    space = space_of({"a": [1, 2, 3], "b": [True, False]}, "a > 1")
    assert space.listed(PROBLEM) == (list(space.schedules(PROBLEM)), True)
    with patch.object(space_module, "MOST_LISTED", 3):
        listed, whole = space.listed(PROBLEM)
    assert (len(listed), whole) == (3, False)


def test_a_walk_ends_at_its_deadline() -> None:
    with pytest.raises(WalkEndedError, match="fewer choices"):
        list(SPACES["nothing valid"].schedules(PROBLEM, walk=Walk(time.monotonic() - 1)))


def test_a_file_with_many_choices_is_read_and_its_errors_are_short(tmp_path) -> None:
    path = tmp_path / "space.toml"
    values = ", ".join(map(str, range(1, 50_001)))
    head = 'kernel = "softmax"\narch = "sm_90"\n[knobs.TILE_COLUMNS]\n'
    path.write_text(f"{head}choices = [{values}]\ndefault = 4096\n")
    space = load_space(path, Softmax)
    assert len(space.knobs["TILE_COLUMNS"].choices) == 50_000
    schedule = space.default(PROBLEM).replace(TILE_COLUMNS=0)
    assert "32] and 49,968 more" in space.violations(schedule, PROBLEM)[0]
    for wrong, message in (
        (f"[{values}, 7]", "7 twice"),
        (f"[{values}, 'x']", "one kind"),
        (f"[{values}]", "default = 0"),
    ):
        path.write_text(f"{head}choices = {wrong}\ndefault = 0\n")
        with pytest.raises(SpaceError, match=message) as raised:
            load_space(path, Softmax)
        assert len(str(raised.value)) < 600


def test_a_check_of_a_large_space_ends() -> None:
    wide = space_for("sm_90", Softmax)
    wide = SearchSpace(
        kernel="softmax",
        arch="sm_90",
        knobs={**wide.knobs, "TILE_COLUMNS": Knob(choices=(4096, *range(1, 4096)), default=4096)},
        constraints=wide.constraints,
        limits=wide.limits,
    )
    rows = list(
        check_problems(Softmax, wide, [Softmax.problem(rows=3, columns=100)], arch="sm_90", schedules=2, seed=0)
    )
    assert rows


class SlowCost(Cost):
    """The model of a stranger, which takes its time."""

    calls = 0

    def model(self, p, s, facts, spec):
        type(self).calls += 1
        time.sleep(0.05)
        return 10.0

    def expected(self, p, s, spec):
        return None


class SlowSoftmax(Softmax):
    """A kernel whose author's model is slow."""

    name = "slow_softmax"
    cost = SlowCost()


def test_a_slow_model_does_not_outlast_the_budget(tmp_path) -> None:
    space, problem = space_for("sm_90", SlowSoftmax), SlowSoftmax.problem(rows=4096, columns=2048)
    SlowCost.calls = 0
    with TuningDB.open(tmp_path / "x.db") as db:
        builder = Builder(db, FakeBuilds(), SlowSoftmax, "sm_90", TOOLCHAIN, FakeBuilds())
        began = time.monotonic()
        (result,) = Tuner(builder, space, TuneOptions(budget_s=0.0), run_id=db.start_run({}, "sm_90")).tune([problem])
        took_s = time.monotonic() - began
    assert SlowCost.calls < 40  # of 92 schedules, each several times
    assert result.more
    assert result.seconds == pytest.approx(took_s, abs=0.5)
    assert space.default(problem) in (result.entry.schedule, result.entry.runner_up)


def test_a_slow_model_does_not_keep_a_search_from_measuring(tmp_path) -> None:
    recorded, calls, quick = Recorded(LANDSCAPES[0]), [], type(Attention.cost).model

    def slow(cost, *given):
        calls.append(given)
        time.sleep(0.02)
        return quick(cost, *given)

    with TuningDB.open(tmp_path / "x.db") as db, patch.object(type(Attention.cost), "model", slow):
        result = tune(recorded, db, space=space_for("sm_90", Attention), budget_s=2.0, effort="quick")
    assert result.measured > 0
    assert 10 < len(calls) < 400  # of thousands of schedules


NEVER = """
import itertools, sys
from tiledsched import cli
from tiledsched.core.cost import Cost
from tiledsched.kernels.softmax import Softmax
def never(*given, **more):
    print("begun", flush=True)
    return [None for _ in itertools.count() if False]
class Never(Cost):
    model = expected = never
if sys.argv[1] == "reference":
    Softmax.reference = lambda xp, X: never()
else:
    Softmax.cost = Never()
sys.exit(cli.main([*sys.argv[2:], "--arch", "sm_90"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words",
    [
        "cost tune softmax -p rows=64,columns=512 --runner none --budget 1",
        "cost explain softmax -p rows=64,columns=514",
        "reference check softmax -p rows=4,columns=64",
    ],
)
def test_a_declaration_that_never_returns_is_ended_by_a_signal(words, number, tmp_path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NEVER, *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None
    while (line := child.stdout.readline()) != "begun\n":
        assert line, child.communicate()[1]
    sent = time.monotonic()
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert time.monotonic() - sent < 5.0  # a second, on a machine with nothing else to do
    assert child.returncode == 128 + number, said
    assert "Traceback" not in said
