"""Figures of reports and explanations, computed anew from the files that ship and from a database, with NumPy.

Nothing here comes from the rooms that report or serve: JSON and SQL are read as they are, and rules are those that the
documentation states. Only what a kernel's author declares (names, grids, FLOPs, the default schedule) is taken from the package.
"""

import itertools
import json
import lzma
import math
import re
import sqlite3
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from scipy import stats

from tiledsched.core.data_files import tuning_db
from tiledsched.core.device import ARCHS, MAX_SPILL_BYTES, ResourceFacts
from tiledsched.core.launches import problem_class
from tiledsched.core.problem import Problem, rate_of
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.measure.runner import Device

FACTS = ("registers", "threads", "shared_bytes", "spill_bytes", "num_ctas", "code_bytes", "ctas_per_sm")


@dataclass(frozen=True)
class Taken:
    """One measurement."""

    problem: Problem
    schedule: Schedule
    fingerprint: str
    us: float
    low: float
    high: float
    samples: int
    device: dict
    regime: str
    tileiras: str
    conditions: dict
    created: datetime
    uid: str
    run: int | None = None

    @property
    def mode(self):
        return self.schedule.get("accum_mode", "fp32")


@dataclass
class Case:
    """The programs of one problem on one device: each with its time, its interval and all schedules that build it."""

    provenance: str
    problem: Problem
    device: str
    mode: str
    times: dict[Schedule, float]
    intervals: dict[Schedule, tuple[float, float, int]]
    program_of: dict[Schedule, Schedule]
    """The schedule that was timed, for each schedule with a time."""
    fingerprints: dict[Schedule, str]
    entry: dict | None
    """The problem's own entry, of the compiler whose times are shown."""
    evidence: "Evidence"
    whole: bool = False
    spilling: int = 0
    """Programs that were left out because they spill registers."""
    trace: list[float] = field(default_factory=list)
    tiles_of: dict = field(default_factory=dict)
    """What `tiles` found, by the knobs."""

    @cached_property
    def by_id(self):
        """The schedules with a time, by their numbers."""
        return {each.id: each for each in self.times}

    def add(self, schedule, first, fingerprint):
        """Give a schedule the time of another one, which has the same machine code."""
        self.program_of[schedule], self.times[schedule] = first, self.times[first]
        self.fingerprints[schedule] = fingerprint
        self.by_id[schedule.id] = schedule
        self.tiles_of.clear()

    @cached_property
    def programs(self):
        """The schedules that were timed themselves, fastest first; of equal times what is served stands first."""
        own = [each for each, timed in self.program_of.items() if each == timed]
        return sorted(own, key=lambda each: (self.times[each], each != self.served, each.id))

    @property
    def best(self):
        return self.programs[0]

    @property
    def count(self):
        """Programs that were compared: those that were left out because they spill took part, too."""
        return len(self.programs) + self.spilling

    @property
    def us(self):
        return self.times[self.best]

    def cost(self, schedule):
        """How much longer a schedule takes than the best; None where it has no time."""
        return self.times[schedule] / self.us - 1 if schedule in self.times else None

    @property
    def rate(self):
        return rate_of(self.problem, self.us)

    @property
    def served(self):
        """What `explain` serves, where that was asked for; else the schedule of the problem's own entry."""
        known = self.evidence.answers.get(self.problem)
        return known or (self.entry and self.entry["schedule"])

    @cached_property
    def default(self):
        """The default schedule as it stands among those with a time; None where it does not."""
        return self.timed_as(self.space.default(self.problem))

    @cached_property
    def space(self):
        return space_for(self.evidence.arch, self.problem.declaration)

    def timed_as(self, wanted):
        """The schedule with a time that is the one wanted once younger knobs are at their defaults; None where there is none."""
        if wanted is None or wanted in self.times:
            return wanted
        near = (each for each in self.order if all(wanted.get(knob, value) == value for knob, value in each.items()))
        return next((each for each in near if self.filled(each) == self.filled(wanted)), None)

    def filled(self, schedule):
        """A schedule with younger knobs at their defaults."""
        return Schedule({**self.space.default(self.problem), **schedule})

    @property
    def order(self):
        """All schedules with a time, fastest first, of equal times those that were timed themselves and what is served."""
        own = self.program_of
        return sorted(self.times, key=lambda each: (self.times[each], own[each] != each, each != self.served, each.id))

    @cached_property
    def serves(self):
        """The schedule with a time that is served; None where what is served has none."""
        return self.timed_as(self.served) or (self.served and self.evidence.timed_as(self, self.served.id))

    @property
    def ties(self):
        """The schedules with a time that cannot be told apart from what is served, or else from the fastest."""
        return [each for each in self.times if self.tied(each, self.serves or self.best)]

    @cached_property
    def leader(self):
        """What is served, where the fastest is tied with it or lost the race against it; else the fastest."""
        served, entry = self.serves, self.entry
        if served is None or self.times[served] <= self.us or self.tied(self.best, served):
            return served or self.best
        lost = entry and (entry["schedule"], entry["runner_up"]) == (served, self.best)
        return served if lost else self.best

    @property
    def faster(self):
        """The fastest schedule, where it is surely faster than what is served."""
        return self.best if self.provenance == "measured" and self.serves and self.leader != self.serves else None

    def tied(self, one, other):
        """Whether a schedule cannot be told apart from another: as the other's race found, or else by intervals and times."""
        first, second = self.program_of[one], self.program_of[other]
        shorter, longer = sorted((self.times[first], self.times[second]))
        if self.provenance != "measured" or first == second:
            return first != second and longer <= shorter * (1 + self.tolerance if self.error else 1.0)
        entry = self.entry
        if entry and entry["provenance"] == "measured" and entry["schedule"] == other:
            raced = dict.fromkeys(entry["ties"], True) | ({entry["runner_up"]: False} if entry["runner_up"] else {})
            decided = {self.program_of[each]: raced[each] for each in self.order if each in raced}
            if first in decided:
                return decided[first]
        (low, high, _), (least, most, _) = self.intervals[first], self.intervals[second]
        return (low <= most and least <= high) or longer <= 1.01 * shorter

    @cached_property
    def runner_up(self):
        """What the fastest program costs that is not tied with the leader; where a race timed both, what the race found."""
        own = self.program_of[self.leader]
        other = next((each for each in self.programs if each != own and not self.tied(each, self.leader)), None)
        raced = self.entry if self.entry and self.entry["schedule"] == self.leader and self.entry["runner_up"] else None
        if raced and other in (None, raced["runner_up"]):
            return raced["margin"]
        return other and self.times[other] / self.times[self.leader] - 1

    @cached_property
    def error(self):
        """The model's error on problems like this one, from the file that ships; None where it was never compared."""
        if self.provenance == "measured":
            return None
        tile = "x".join(str(self.best[knob]) for knob in self.evidence.tile_knobs or () if knob in self.best)
        values = {name: value for name, value in self.problem.to_json().items() if name != "kernel"}

        def covers(where):
            return all(
                name in where
                and (
                    where[name] is None
                    or any(
                        each[0] <= value <= each[1] if isinstance(each, list) else each == value for each in where[name]
                    )
                )
                for name, value in values.items()
            )

        rows = [row for row in self.evidence.errors if row["arch"] == self.evidence.arch and row["tile"] in ("", tile)]
        return max(
            filter(lambda row: covers(row["where"]), rows),
            key=lambda row: (row["tile"] != "", row["figures"]),
            default=None,
        )

    @property
    def tolerance(self):
        """What takes at most this much longer is as good."""
        return 0.01 if self.provenance == "measured" else max(0.01, self.error["mean"]) if self.error else math.inf

    def tiles(self, knobs):
        """Each tile with its best schedule, its programs, and whether they are enough to judge it; the best tile first."""
        if knobs not in self.tiles_of:
            self.tiles_of[knobs] = self._tiles(knobs)
        return self.tiles_of[knobs]

    def _tiles(self, knobs):
        members = defaultdict(list)
        for each in self.times:
            if knobs and {*knobs} <= {*each}:
                members[each[knobs[0]], each[knobs[1]]].append(each)
        counts = {tile: len({self.program_of[each] for each in found}) for tile, found in members.items()}
        values = defaultdict(set)
        for each in self.times:
            for knob in {*each} - {*(knobs or ())}:
                values[knob].add(each[knob])
        possible = math.prod(map(len, values.values()))
        enough = min(12, max(max(counts.values(), default=0) / 2, min(4, possible)))
        best = {tile: min(self.times[each] for each in found) for tile, found in members.items()}
        mine = {tile: self.leader in found for tile, found in members.items()}
        ranked = sorted(best, key=lambda tile: (not mine[tile], best[tile]))
        return [
            {
                "tile": tile,
                "us": best[tile],
                "relative": best[tile] / self.us,
                "drop": max(0.0, best[tile] / best[ranked[0]] - 1),
                "ties": place > 0 and any(self.tied(each, self.leader) for each in members[tile]),
                "programs": counts[tile],
                "searched": self.whole or place == 0 or counts[tile] >= enough,
                "schedules": [each for each in members[tile] if self.times[each] == best[tile]],
            }
            for place, tile in enumerate(ranked)
        ]

    def second_tile(self, knobs):
        second = (self.tiles(knobs) or [None])[1:2]
        return second[0] if second and (second[0]["searched"] or second[0]["relative"] <= 1.01) else None

    def worst_tile(self, knobs):
        return next((tile for tile in reversed(self.tiles(knobs)[1:]) if tile["searched"]), None)

    @cached_property
    def pairs(self):
        """The log ratios of the times of programs that differ in one knob alone: (knob, value, other value) -> array."""
        found, seen = defaultdict(list), set()
        groups = defaultdict(list)
        for each in self.times:
            whole = frozenset((name, typed(value)) for name, value in each.items())
            for knob, value in each.items():
                groups[knob, whole - {(knob, typed(value))}].append(each)
        for (knob, _), members in groups.items():
            for one, other in itertools.combinations(members, 2):
                if min(self.times[one], self.times[other]) > 1.3 * self.us:
                    continue
                key = frozenset((typed(each[knob]), self.program_of[each]) for each in (one, other))
                if (knob, key) not in seen:
                    seen.add((knob, key))
                    ratio = math.log(self.times[one] / self.times[other])
                    found[knob, typed(one[knob]), typed(other[knob])].append(ratio)
                    found[knob, typed(other[knob]), typed(one[knob])].append(-ratio)
        return {key: np.array(ratios) for key, ratios in found.items()}

    @cached_property
    def values(self):
        """The values of each knob that has several."""
        found = defaultdict(set)
        for each in self.times:
            for knob, value in each.items():
                found[knob].add(typed(value))
        return {knob: values for knob, values in found.items() if len(values) > 1}

    def effect_of(self, knob, value, against):
        """What a value of a knob costs, compared with another; both as they are printed."""
        return effect([self.pairs_of(knob, value, against)], self.provenance == "modelled")

    def pairs_of(self, knob, value, against):
        """The log ratios of a value's pairs with another, both as they are printed."""
        found = (part for (name, *both), part in self.pairs.items() if name == knob and printed(both, value, against))
        return next(found, None)


def printed(both, *texts):
    """Whether typed values are printed as the texts."""
    words = {"true": "yes", "false": "no"}
    said = [words.get(str(value).lower(), str(value)) for _, value in both]
    return said == [words.get(text.lower(), text) for text in texts]


def chosen_few(cases, limit):
    """Schedules that keep every case within a limit of its best: next the one that serves most of what is left, then the cheaper."""
    left, found = list(cases), []
    while left:
        serves = defaultdict(list)
        for one in left:
            for each in one.times:
                if one.cost(each) <= limit:
                    serves[each].append(one.cost(each))
        found.append(min(serves, key=lambda each: (-len(serves[each]), np.mean(serves[each]), each.id)))
        left = [one for one in left if found[-1] not in one.times or one.cost(found[-1]) > limit]
    return found


def typed(value):
    """A value that is told from another of another type: True is not 1."""
    return type(value).__name__, value


def test(parts):
    """The mean over problems of the mean log ratio of each, its standard error and degrees of freedom: from four problems on the
    error is over problems, below it is over their pairs. None where there are too few.
    """
    known = [part for part in parts if part is not None and len(part)]
    freedom = len(known) - 1 if len(known) >= 4 else sum(map(len, known)) - len(known)
    if freedom < 3:
        return None
    means = np.array([part.mean() for part in known])
    if len(known) >= 4:
        return means.mean(), means.std(ddof=1) / math.sqrt(len(known)), freedom
    pooled = sum(((part - part.mean()) ** 2).sum() for part in known) / freedom
    return means.mean(), math.sqrt(pooled * sum(1 / len(part) for part in known)) / len(known), freedom


def surely_above(least, tests):
    """The comparisons whose mean is above a number: what Benjamini and Hochberg's procedure picks at 2.5%."""
    known = {key: found for key, found in tests.items() if found}
    chance = {}
    for key, (mean, error, freedom) in known.items():
        chance[key] = stats.t.sf((mean - least) / error, freedom) if error else float(mean <= least)
    ranked = sorted(chance, key=chance.get)
    last = max((place for place, key in enumerate(ranked, 1) if chance[key] <= 0.025 * place / len(ranked)), default=0)
    return set(ranked[:last])


def effect(parts, estimated=False):
    """The ratio from the log ratios of each problem, with its 95% interval; of estimates with their range."""
    known = [part for part in parts if part is not None and len(part)]
    found = {"ratio": None, "low": None, "high": None, "pairs": sum(map(len, known)), "problems": len(known)}
    if tested := test(known):
        mean, error, freedom = tested
        half = stats.t.ppf(0.975, freedom) * error
        low, high = math.exp(mean - half), math.exp(mean + half)
        if estimated:
            low, high = (math.exp(pick(pick(part) for part in known)) for pick in (min, max))
        found |= {"ratio": math.exp(mean), "low": low, "high": high}
    return found


@cache
def builds_that_ship(path):
    """A file of builds, as it was written: hundreds of problems look into the same one."""
    return json.loads(lzma.decompress(path.read_bytes()))


@cache
def schedules_that_ship(path, kernel, arch):
    """The schedule of each build of a file, with knobs that it lacks, which are younger, at their defaults."""
    data, space = builds_that_ship(path), space_for(arch, kernel)
    return [space.complete(Schedule(dict(zip(data["knobs"], values, strict=True)))) for *values, _, _ in data["builds"]]


class Evidence:
    """What is known of one kernel on one arch, in one regime: its cases and entries, and what all measurements share."""

    def __init__(self, kernel, arch, db=None, regime="burst"):
        self.kernel, self.arch, self.regime = kernel_named(kernel), arch, regime
        self.folder, self.db = tuning_db(), db
        self.compiler = compiler()
        self.entries, self.facts, shipped = [], {}, {}
        table = self.folder / "tables" / kernel / f"{arch}.json"
        files = [table] * table.exists() + sorted((self.folder / "landscapes" / kernel).rglob("*.json.xz"))
        for path in files:
            data = json.loads(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
            uids = {one.uid: one for one in map(self._shipped, data["measurements"])}
            found = {uid: one for uid, one in uids.items() if one.device["arch"] == arch}
            sizes = Counter(map(landscape_of, found.values()))
            shipped = {uid: one for uid, one in shipped.items() if sizes[landscape_of(one)] < 20} | found
            self.entries += [self._entry(each, uids.get(each["measurement"]), "shipped") for each in data["entries"]]
            self.facts |= {
                each["fingerprint"]: each["facts"]
                for each in data["artifacts"]
                if each["arch"] == arch and each["facts"]
            }
        own, self.builds, self.own_entries = self._database() if db else ({}, [], [])
        self.all_entries = [*self.own_entries, *self.entries]
        stored = set(map(place_of, self.own_entries))
        self.entries = self.own_entries + [entry for entry in self.entries if place_of(entry) not in stored]
        self.taken = sorted((shipped | own).values(), key=lambda one: (one.created, one.uid), reverse=True)
        self.listed = self._of_regime()
        self._verdicts, self.answers = {}, {}
        """What `explain` serves, by problem, for those that were asked for."""
        errors = self.folder / "model" / kernel / "error.json"
        self.errors = json.loads(errors.read_text())["rows"] if errors.exists() else []
        bands = self.folder / "model" / kernel / "transfer.json"
        self.bands = json.loads(bands.read_text())["bands"] if bands.exists() else []
        self.measured = [self._case(key, found) for key, found in self._landscapes().items()]

    def _shipped(self, data):
        found = data["measurement"]
        return Taken(
            problem=self.problem(found["problem"]),
            schedule=Schedule(found["schedule"]),
            fingerprint=found["fingerprint"],
            us=found["median_us"],
            low=found["ci_low_us"],
            high=found["ci_high_us"],
            samples=len(found["samples_us"]),
            device=found["device"],
            regime=found["regime"],
            tileiras=data["toolchain"]["tileiras"],
            conditions=found["conditions"] | {"runner": found["runner"], "source": data["source_hash"]},
            created=datetime.fromisoformat(data["created_at"]),
            uid=data["uid"],
        )

    def problem(self, values):
        return self.kernel.problem(**{name: value for name, value in values.items() if name != "kernel"})

    def _entry(self, data, measurement, layer):
        return {
            "rivals": None,
            **data,
            "problem": self.problem(data["problem"]),
            "schedule": Schedule(data["schedule"]),
            "ties": [Schedule(each) for each in data["ties"]],
            "runner_up": data["runner_up"] and Schedule(data["runner_up"]),
            "device": data["device_name"],
            "mode": data["accum_mode"],
            "measurement": measurement,
            "layer": layer,
        }

    def _database(self):
        """Measurements, successful builds and entries of a SQLite database."""
        connection = sqlite3.connect(f"file:{self.db}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        name, arch = self.kernel.name, self.arch

        def rows(query, *values):
            return connection.execute(query, values).fetchall()

        schedules = {row["id"]: Schedule(json.loads(row["knobs"])) for row in rows("select * from schedules")}
        dims = rows("select * from problems where kernel = ?", name)
        problems = {row["id"]: self.problem(json.loads(row["dims"])) for row in dims}
        devices = {row["id"]: json.loads(row["device"]) for row in rows("select * from devices")}
        tools = {row["id"]: dict(row) for row in rows("select * from toolchains")}
        own = {}
        for row in rows("select * from measurements where kernel = ? and arch = ?", name, arch):
            more = {"runner": row["runner"], "source": row["source_hash"]}
            own[row["id"]] = Taken(
                problem=problems[row["problem_id"]],
                schedule=schedules[row["schedule_id"]],
                fingerprint=row["fingerprint"],
                us=row["median_us"],
                low=row["ci_low_us"],
                high=row["ci_high_us"],
                samples=row["sample_count"],
                device=devices[row["device_id"]],
                regime=row["regime"],
                tileiras=tools[row["toolchain_id"]]["tileiras"],
                conditions=json.loads(row["conditions"]) | more,
                created=datetime.fromisoformat(f"{row['created_at']}+00:00"),
                uid=row["uid"],
                run=row["run_id"],
            )
        for row in rows("select * from artifacts where arch = ?", arch):
            if row["facts"]:
                self.facts[row["fingerprint"]] = json.loads(row["facts"])
        builds = [
            (schedules[row["schedule_id"]], json.loads(row["problem_class"]), row["fingerprint"])
            for row in rows("select * from builds where kernel = ? and arch = ?", name, arch)
            if row["fingerprint"]
        ]
        entries = []
        for row in rows("select * from entries where kernel = ? and arch = ?", name, arch):
            ties = [each["schedule"] for each in json.loads(row["ties"])]
            found = dict(row) | {"ties": ties, "rivals": json.loads(row["rivals"] or "null")}
            found["problem"] = next(json.loads(dim["dims"]) for dim in dims if dim["id"] == row["problem_id"])
            found["toolchain"] = tools.get(row["toolchain_id"])
            found["schedule"], found["runner_up"] = schedules[row["schedule_id"]], schedules.get(row["runner_up_id"])
            entries.append(self._entry(found, own.get(row["measurement_id"]), "user"))
        connection.close()
        return {one.uid: one for one in own.values()}, builds, entries

    def _of_regime(self):
        """The measurements that are shown: timed as today, of the regime, and for each problem and GPU of one compiler."""
        mixed = {place(one) for one in self.taken if not as_now(one)}
        alike = [one for one in self.taken if as_now(one) and (place(one) not in mixed or one.samples > 1)]
        covered = {place(one) for one in alike}
        self.alike = sorted(
            [*alike, *(one for one in self.taken if place(one) not in covered)],
            key=lambda one: (one.created, one.uid),
            reverse=True,
        )
        found = [one for one in self.alike if one.regime == self.regime]
        versions = defaultdict(lambda: defaultdict(set))
        for one in found:
            versions[one.problem, one.device["name"]][one.tileiras].add(one.schedule)
        chosen = {}
        for key, each in versions.items():
            sizes = {tileiras: len(schedules) for tileiras, schedules in each.items()}
            most = max(sizes.values())
            enough = [tileiras for tileiras, size in sizes.items() if size >= min(most, max(20, most / 3))]
            chosen[key] = min(enough, key=lambda tileiras: distance(tileiras, self.compiler))
        return [one for one in found if one.tileiras == chosen[one.problem, one.device["name"]]]

    def _landscapes(self):
        groups = defaultdict(list)
        for one in self.listed:
            groups[one.problem, one.device["name"], one.mode].append(one)
        return groups

    def program(self, problem, fingerprint, schedule, device):
        """What tells programs apart: machine code and grid."""
        try:
            return fingerprint, self.kernel.grids(problem, schedule, device)
        except Exception:
            return fingerprint, None

    def _case(self, key, found):
        problem, device, mode = key
        spec = Device(**found[0].device)
        newest = {}
        for one in found:
            newest.setdefault(one.schedule, one)
        program_of, first = {}, {}
        for schedule, one in newest.items():
            own = self.program(problem, one.fingerprint, schedule, spec)
            program_of[schedule] = first.setdefault(own, schedule)
        fingerprints = {schedule: one.fingerprint for schedule, one in newest.items()}
        for schedule, built_for, fingerprint in self.builds:
            if schedule not in newest and schedule.get("accum_mode", "fp32") == mode:
                own = self.program(problem, fingerprint, schedule, spec)
                if own in first and self._serves(built_for, problem, schedule, spec):
                    program_of[schedule], fingerprints[schedule] = first[own], fingerprint
        run = max((one.run for one in found if one.run is not None), default=None)
        first_taken = {each.fingerprint: each for each in found if run is not None and each.run == run}  # newest first
        entry = self.entry_of(problem, mode, device, min(found, key=lambda one: one.created).tileiras)
        times = {schedule: newest[timed].us for schedule, timed in program_of.items()}
        case = Case(
            "measured",
            problem,
            device,
            mode,
            times,
            {each: (newest[each].low, newest[each].high, newest[each].samples) for each in first.values()},
            program_of,
            fingerprints,
            entry,
            self,
        )
        case.trace = [one.us / case.us for one in sorted(first_taken.values(), key=lambda one: one.created)]
        return case

    def _serves(self, built_for, problem, schedule, spec):
        try:
            return problem_class(self.kernel, problem, schedule, spec).to_json() == built_for
        except Exception:
            return False

    def entry_of(self, problem, mode, device="", tileiras=None):
        """The entry that is served for a problem with a compiler, which is the installed one unless another is named."""
        wanted = self.compiler if tileiras is None else tileiras
        found = [
            entry
            for entry in self.entries
            if (entry["problem"], entry["mode"]) == (problem, mode)
            and entry["device"] in ("", device or entry["device"])
            and entry["regime"] in ("", self.regime)
        ]
        order = ("measured", "transferred", "modelled", "default")
        return min(
            found,
            key=lambda entry: (
                order.index(entry["provenance"]),
                not entry["device"],
                not entry["regime"],
                distance((entry.get("toolchain") or {}).get("tileiras", ""), wanted),
            ),
            default=None,
        )

    @cached_property
    def modelled(self):
        """The cases of problems that nobody measured, from the files of builds that ship, or else from the entry alone."""
        known = {(case.problem, case.mode) for case in self.measured}
        found = {}
        for key in dict.fromkeys((entry["problem"], entry["mode"]) for entry in self.entries):
            entry = self.entry_of(*key)
            if entry and entry["provenance"] == "modelled" and key not in known:
                found[key] = self._modelled(entry)
        return [case for case in found.values() if case]

    def _modelled(self, entry):
        problem, mode, spec = entry["problem"], entry["mode"], ARCHS.get(self.arch)
        files = self.folder / "model" / self.kernel.name
        space = space_for(self.arch, self.kernel)
        default = space.default(problem)
        for path in sorted(files.glob("programs_*.json.xz")):
            data, schedules = builds_that_ship(path), schedules_that_ship(path, self.kernel, self.arch)
            own = data["classes"][0].get("dtype")
            if self.arch != data["arch"] and self.arch not in data["alike"]:
                continue
            if problem.values.get("dtype") != own and problem.values.get("dtype") not in data["alike"]:
                continue
            alike = problem.replace(dtype=own) if own and problem.values.get("dtype") != own else problem
            estimates = data.get("times", {}).get(self.arch, {}).get(alike.id)
            if not estimates:
                continue
            times, prints, facts, spilled = {}, {}, {}, set()
            every = range(len(data["builds"]))
            for place_of in data["serves"][alike.id] or every:
                fingerprint = data["programs"][data["builds"][place_of][-1]]
                schedule = schedules[place_of]
                kind = fingerprint[0] if alike == problem else f"{own}:{fingerprint[0]}"
                if len(fingerprint) > 2 and schedule.get("accum_mode", "fp32") == mode:
                    prints[schedule] = kind
                    facts[schedule] = ResourceFacts(**dict(zip(FACTS, fingerprint[2:], strict=True)))
                    if facts[schedule].spill_bytes > MAX_SPILL_BYTES:
                        spilled.add(schedule)
            for place_of, us in zip(*estimates, strict=True):
                times[schedules[place_of]] = us
            named = {Schedule({**default, **entry["schedule"]}), entry["schedule"], default}
            every = {self.program(problem, code, each, spec) for each, code in prints.items()}
            if len(spilled) < len(prints):
                prints = {each: code for each, code in prints.items() if each not in spilled or each in named}
            groups = defaultdict(list)
            for schedule, code in prints.items():
                groups[self.program(problem, code, schedule, spec)].append(schedule)
            program_of = {}
            for members in groups.values():
                for each in {*members} & {default} - {*times}:  # it spills, and no estimate of it ships
                    times[each] = self.kernel.cost.model(problem, each, facts[each], spec)
                timed = [each for each in members if each in times]
                if timed:
                    first = min(timed, key=lambda each: (each not in named, changed(each, default), each.id))
                    program_of |= {each: first for each in members if each == first or each in named}
            entry = entry | {"schedule": next((each for each in program_of if each in named), entry["schedule"])}
            return Case(
                "modelled",
                problem,
                "",
                mode,
                {each: times[first] for each, first in program_of.items()},
                {},
                program_of,
                {each: prints[each] for each in program_of},
                entry,
                self,
                whole=True,
                spilling=len(every) - len(groups),
            )
        times = {entry["schedule"]: entry["model_us"]}
        if entry["runner_up"] and entry["margin"] is not None:
            times[entry["runner_up"]] = entry["model_us"] * (1 + entry["margin"])
        same = {each: each for each in times}
        prints = {entry["schedule"]: entry["fingerprint"]} | dict.fromkeys([*times][1:], "")
        case = Case("modelled", problem, "", mode, times, {}, same, prints, entry, self)
        return case if entry["model_us"] else None

    @cached_property
    def cases(self):
        return [*self.measured, *self.modelled]

    @cached_property
    def explored(self):
        """The cases that show what the choice of schedule is worth."""
        cases = self.measured or self.modelled
        broad = [case for case in cases if len(case.programs) >= 20 or case.whole]
        found = broad or [case for case in cases if len(case.programs) > 2]
        most = sorted(found, key=lambda case: -len(case.programs))[:150]
        return [case for case in found if case in most]

    @cached_property
    def tile_knobs(self):
        """The knobs named like a tile's rows and columns; None where there are none."""
        knobs = dict.fromkeys(
            knob for case in self.cases for each in case.times for knob, value in each.items() if type(value) is int
        )
        ends = [
            (knob, knob[:-1] + ("n" if knob.endswith("m") else "N")) for knob in knobs if knob.lower().endswith("_m")
        ]
        return next((pair for pair in ends if pair[1] in knobs), None)

    def verdict(self, knob):
        """What to do about a knob over several problems: the advice, the values that are good for all, and who prefers what."""
        if knob not in self._verdicts:
            self._verdicts[knob] = self._verdict(knob)
        return self._verdicts[knob]

    @cached_property
    def winners(self):
        """The schedules that won a search, of all measured problems."""
        entries = [case.entry for case in self.measured if case.entry]
        return [each["schedule"] for each in entries if each["provenance"] == "measured" and each["candidates"] > 1]

    @cached_property
    def _sure(self):
        """Which comparisons are sure: in one problem more than 1% slower, and over all problems at most 1% faster; and the mean
        log ratio of each comparison that one problem allows."""
        values = defaultdict(set)
        for case in self.explored:
            for knob, found in case.values.items():
                values[knob] |= found
        compared = [(knob, *two) for knob, found in values.items() for two in itertools.permutations(found, 2)]
        single = {
            (place, *key): test([case.pairs.get(key)]) for place, case in enumerate(self.explored) for key in compared
        }
        joined = {key: test([case.pairs.get(key) for case in self.explored]) for key in compared}
        means = {key: found[0] for key, found in single.items() if found}
        return surely_above(math.log(1.01), single), surely_above(-math.log(1.01), joined), means

    def _verdict(self, knob):
        cases = [case for case in self.explored if knob in case.values]
        if not self.measured:
            return self._estimated_verdict(knob)
        values = set().union(*(case.values[knob] for case in cases))
        slower, no_faster, means = self._sure
        places = range(len(self.explored))

        def favourite(place):
            for value in values:
                known = [each for each in values if (place, knob, each, value) in means]
                if any((place, knob, each, value) in slower for each in known) and all(
                    means[place, knob, each, value] >= 0 for each in known
                ):
                    return value
            return None

        def compared(value):
            parts = {each: [case.pairs.get((knob, each, value)) for case in self.explored] for each in values - {value}}
            return {
                each: len([part for part in found if part is not None]) for each, found in parts.items() if test(found)
            }

        reached = [
            {typed(each[knob]) for each in case.times if knob in each and case.times[each] <= 1.01 * case.us}
            for case in cases
        ]
        fine = {
            value
            for value in values
            if compared(value)
            and all(value in each for each in reached)
            and all((knob, each, value) in no_faster for each in compared(value))
            and not any((place, knob, value, each) in slower for place in places for each in values)
        }
        favourites = [favourite(place) for place in places]
        won = Counter(typed(each[knob]) for each in self.winners if knob in each)
        contradicted = any(
            one != other and (first, knob, other, one) in slower and (second, knob, one, other) in slower
            for (first, one), (second, other) in itertools.permutations(enumerate(favourites), 2)
            if one and other
        )
        good = max(fine, key=lambda value: (len(compared(value)), won[value]), default=None)
        few = min(compared(good).values()) if fine else 0
        if fine and few < 4:
            advice = "few"
        elif fine and won.total() - won[good] <= 0.1 * won.total():
            advice = "leave"
        elif fine and all((knob, good, each) in no_faster for each in compared(good)):
            advice = "same"
        else:
            advice = "choose" if contradicted else "unclear" if any(map(compared, values)) else "untried"
        preferred = Counter(filter(None, favourites))
        return {"advice": advice, "fine": fine, "preferred": preferred, "won": won, "problems": few}

    def best_by_value(self, case, knobs):
        """The least time with each value of some knobs, over the best; what is tied with what is served counts as the best."""
        found = {}
        times = [(each, case.cost(each)) for each in case.order]
        if case.faster is None:
            ties = [each for each in case.times if case.tied(each, case.serves or case.best)]
            times += [(each, 0.0) for each in (*ties, *(case.entry["ties"] if case.entry else ()))]
        for each, cost in times:
            if {*knobs} <= {*each}:
                value = tuple(typed(each[knob]) for knob in knobs)
                found[value] = min(cost, found.get(value, math.inf))
        return found

    def _estimated_verdict(self, knob):
        """What the model says about a knob: only differences beyond its error count."""
        tables = [(case, self.best_by_value(case, (knob,))) for case in self.explored if knob in case.values]
        good = [{value for (value,), cost in table.items() if cost <= case.tolerance} for case, table in tables]
        preferred = Counter(next(iter(each)) for each in good if len(each) == 1)
        fine = {
            value
            for value, count in preferred.most_common(1)
            if 2 * count > len(good) and all(value in each for each in good)
        }
        advice = "choose" if len(preferred) > 1 else "leave" if fine else "unclear"
        return {"advice": advice, "fine": fine, "preferred": preferred, "won": Counter(), "problems": 0}

    def joined_effect(self, knob, value, against):
        """What a value costs over all explored cases."""
        return effect([case.pairs_of(knob, value, against) for case in self.explored], not self.measured)

    @cached_property
    def regimes(self):
        """For each problem measured in both regimes: programs in both, each regime's winner, and what it costs in the other."""
        first = defaultdict(dict)
        for one in self.alike:
            own = self.program(one.problem, one.fingerprint, one.schedule, Device(**one.device))
            first[one.problem, one.mode].setdefault((one.regime, own), one)
        found = {}
        for key, known in first.items():
            both = [own for regime, own in known if regime == "burst" and ("sustained", own) in known]
            if both:
                name = {own: known["burst", own].schedule.id for own in both}
                burst, held = (
                    min(both, key=lambda own: (known[regime, own].us, name[own])) for regime in ("burst", "sustained")
                )
                races = {
                    "burst_loss": (known["sustained", burst], known["sustained", held]),
                    "sustained_loss": (known["burst", held], known["burst", burst]),
                }
                winners = {"burst": known["burst", burst].schedule, "sustained": known["burst", held].schedule}
                found[key] = {"programs": len(both), **winners}
                for name, (one, two) in races.items():
                    found[key] |= {name: one.us / two.us - 1, f"{name}_distinct": one.low > two.high}
        return found

    def timed_as(self, case, number):
        """The schedule of a number in a case: timed there, or of an entry with the same machine code as one that was."""
        if number in case.by_id:
            return case.by_id[number]
        spec = next(Device(**one.device) for one in self.listed if one.device["name"] == case.device)
        programs = {self.program(case.problem, case.fingerprints[each], each, spec): each for each in case.programs}
        for entry in self.entries:
            if (schedule := entry["schedule"]).id == number and entry["fingerprint"]:
                first = programs.get(self.program(case.problem, entry["fingerprint"], schedule, spec))
                classes = (
                    problem_class(self.kernel, each, schedule, spec) for each in (case.problem, entry["problem"])
                )
                if first and len(set(classes)) == 1:
                    case.add(schedule, first, entry["fingerprint"])
                    return schedule
        return None

    def served_entry(self, problem, mode="fp32"):
        """The entry of a problem, whatever GPU it is of."""
        return self.entry_of(problem, mode)

    def completed(self, schedule):
        """A schedule with the knobs that it lacks, which are younger, at their defaults."""
        return {**space_for(self.arch, self.kernel).complete(schedule)}

    @cached_property
    def inert(self):
        """For each knob the pairs of builds for one problem that differ in it alone, and how many are one machine code; problems
        with the same builds count once."""
        devices = {one.problem: Device(**one.device) for one in self.listed}
        problems = dict.fromkeys([*devices, *(case.problem for case in self.modelled)])
        groups = {
            tuple(
                (schedule, fingerprint)
                for schedule, built_for, fingerprint in self.builds
                if self._serves(built_for, problem, schedule, devices.get(problem, ARCHS.get(self.arch)))
            )
            for problem in problems
        }
        found = defaultdict(Counter)
        for group in groups:
            alike = defaultdict(list)
            for schedule, code in group:
                for knob in schedule:
                    rest = frozenset((name, typed(value)) for name, value in schedule.items() if name != knob)
                    alike[knob, rest].append(code)
            for (knob, _), codes in alike.items():
                for one, other in itertools.combinations(codes, 2):
                    found[knob].update(pairs=1, same=int(one == other))
        return found

    def failures(self, stage, kind):
        """How many candidates failed in one way."""
        with sqlite3.connect(f"file:{self.db}?mode=ro", uri=True) as connection:
            query = "select count(distinct schedule_id || coalesce(problem_id, '')) from failures where stage = ? and kind = ?"
            return connection.execute(query, (stage, kind)).fetchone()[0]


def changed(schedule, default):
    return sum(schedule.get(knob) != value for knob, value in default.items())


def place_of(entry):
    """What the entries of two layers must agree in for one to stand in for the other."""
    tileiras = (entry.get("toolchain") or {}).get("tileiras", "")
    return entry["problem"], entry["mode"], entry["device"], entry["regime"], tileiras


def landscape_of(one):
    return one.problem, one.device["name"], one.regime, one.tileiras


def place(one):
    return one.problem, one.device["name"], one.regime


def as_now(one):
    """Whether a measurement was timed as today: in the burst regime each launch by itself."""
    return one.regime != "burst" or not one.conditions.get("graph_launches")


def compiler():
    """Version of the compiler that is installed; empty where there is none."""
    try:
        return version("nvidia-cuda-tileiras")
    except PackageNotFoundError:
        return ""


def distance(tileiras, wanted):
    """Sorts compilers by their distance to the one that is wanted; the newest comes first where none is."""
    its, other = ([int(part) for part in re.findall(r"\d+", each)] for each in (tileiras, wanted))
    return tileiras != wanted, not its, [abs(a - b) for a, b in zip(its, other, strict=False)], [-part for part in its]
