"""What each sentence, table, file and chart says: what reads it gives (name, what was said, how it is found anew).

`self` is the :class:`statements.Reader`, and `case` a :class:`recomputed.Case`.
"""

import re
import statistics
from collections import Counter

from recomputed import chosen_few

from tiledsched.core.problem import rate_of, unit_of
from tiledsched.core.schedule import HINT_KNOBS, Schedule

N = r"([\d,]+)"
SHARE = r"(as long|[\d.,]+% (?:longer|less time)|[\d.,]+ times as long)"
LONGER = rf"{SHARE}(?: as the best schedule| than the best schedule)?"
TILE = r"(\d+x\d+)"
CODE = r"`([^`]*)`"
COST = rf"{LONGER} \((?:median of )?([\d,]+) problems?(?:, at most {LONGER})?\)"
MEDIAN = r"\((?:median of )?([\d,]+) problems?\)"
TIME = r"([\d.,]+) µs(?: \(([\d.,]+) ([A-Z]+/s)\))?"
EXPLAINS = (
    "Each (square|line|dot|figure|tile|point|size)|Where a point is|None is known|No rule|Each share|Orange|Outlined|Next: |As the map|At the foot|What is served has|The best schedule reaches|"
    "Times of two races|Faster only|Fewer than|Which value is good depends|[0-9,]+ of [0-9,]+ programs are drawn|Grey lines|Bars count|Point at|In schedules|To learn|To measure|Fewer may|All |"
    "A (schedule|question|problem) |Changes of one knob|Differences below|Too few|Short is|A value|`saves`"
)
"""How sentences begin that explain a chart or name a command."""


def value_text(value):
    """A value as people read it."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def tile_text(tile):
    return "x".join(map(str, tile))


def _known(values):
    return [value for value in values if value is not None]


def _drop(tile):
    return tile and tile["drop"]


def _relative(tile):
    return tile and tile["relative"] - 1


def best_of(case):
    """The short names of the schedules that are as fast as the leader, which is what is served where nothing is surely faster."""
    return {each.short() for each in case.times if case.times[each] in (case.us, case.times[case.leader])}


def tiles_of(reader, case, place):
    """The tiles as good as the one at a place of the list."""
    tiles = case.tiles(reader.tile)
    return {tile_text(each["tile"]) for each in tiles if each["relative"] == tiles[place]["relative"]}


# Sentences.


def source(self, case, device, arch, months, programs, kernel, problems, others):
    """The first sentence of a page with measurements."""
    known, explored = self.evidence, self.evidence.explored
    yield "device", device, lambda: {one.device for one in known.measured}
    yield "arch", arch, lambda: known.arch
    yield (
        "months",
        months,
        lambda: " to ".join(dict.fromkeys(f"{pick(one.created for one in known.listed):%Y-%m}" for pick in (min, max))),
    )
    yield "programs", programs, lambda: sum(one.count for one in explored)
    yield "problems", problems, lambda: len(explored)
    yield "other problems", others, lambda: len(known.measured) - len(explored)


def winners_alone(self, case, device, arch, months, problems, kernel):
    """The first sentence where little but winners is known."""
    yield "device", device, lambda: {one.device for one in self.evidence.measured}
    yield "problems", problems or "1", lambda: len(self.evidence.measured)


def modelled_alone(self, case, arch, problems, kernel):
    """The first sentence where nothing was measured."""
    yield "measured", 0, lambda: len(self.evidence.measured)
    yield "problems", problems, lambda: len(self.evidence.modelled)


def tile_costs(self, case, second, of, ties, worst):
    """How much the second best and the worst tile cost, over problems."""
    cases = [one for one in self.evidence.explored if one.second_tile(self.tile)]
    yield "second", second, lambda: statistics.median(_drop(one.second_tile(self.tile)) for one in cases)
    yield "problems", of, lambda: len(cases)
    yield "ties", ties, lambda: sum(one.second_tile(self.tile)["ties"] for one in cases)
    worsts = (one.worst_tile(self.tile) for one in self.evidence.explored)
    yield "worst", worst, lambda: statistics.median(_known(map(_relative, worsts)))


def tiles_tie(self, case, of, worst):
    """The second best tile is as good for all problems."""
    cases = [one for one in self.evidence.explored if one.second_tile(self.tile)]
    yield "ties", of, lambda: sum(one.second_tile(self.tile)["ties"] for one in cases)
    worsts = (one.worst_tile(self.tile) for one in self.evidence.explored)
    yield "worst", worst, lambda: statistics.median(_known(map(_relative, worsts)))


def two_best(self, case, cost, of, apart, worst):
    """By how much the estimates of the two best tiles differ, and for how many problems by more than the model's error."""
    cases = [one for one in self.evidence.explored if one.second_tile(self.tile)]
    yield "problems", of, lambda: len(cases)
    pairs = [sorted(tile["us"] for tile in one.tiles(self.tile))[:2] for one in cases]
    yield "cost", cost, lambda: statistics.median(slower / faster - 1 for faster, slower in pairs)
    yield "apart", apart, lambda: sum(not one.second_tile(self.tile)["ties"] for one in cases if one.error)
    worsts = (one.worst_tile(self.tile) for one in self.evidence.explored)
    yield "worst", worst, lambda: statistics.median(_known(map(_relative, worsts)))


def default_cost(self, case, cost, of, most, rest):
    """What the compiler defaults cost, over problems."""
    cases = self.evidence.explored
    costs = [one.cost(one.default) for one in cases if one.default and one.count > 1]
    yield "cost", cost, lambda: statistics.median(costs)
    yield "problems", of, lambda: len(costs)
    yield "most", most, lambda: max(costs)
    yield "no time", rest, lambda: len(cases) - len(costs)


def untuned_cost(self, case, cost, of, most, rest):
    """What is served without tuning costs, over problems; each of them is hidden in turn."""
    if len(self.evidence.explored) > self.most_hidden:
        return
    yield "cost", cost, lambda: statistics.median(_known(self.untuned_costs))
    yield "problems", of, lambda: len(_known(self.untuned_costs))
    yield "most", most, lambda: max(_known(self.untuned_costs))
    yield "not timed", rest, lambda: self.untuned_costs.count(None)


def hidden_losses(self, case, archs, least, most, worst):
    """What choices without tuning lost on problems that were hidden: of the bands of the file that ships."""
    bands = self.evidence.bands
    for text in filter(None, (least, most)):
        yield "mean", text, lambda: {shown(band["mean"]) for band in bands}
    yield "worst", worst, lambda: {shown(band["worst"]) for band in bands}


def served_tiles(self, case, first, number, problems, text):
    """For how many problems each tile is served."""
    cases = self.evidence.explored or self.evidence.cases
    yield "problems", problems, lambda: len(cases)
    for tile, count in [(first, number), *re.findall(rf"{TILE} for (\d+)", text)]:
        yield (
            "served for",
            count,
            lambda tile=tile: sum(name_of(self, one.served) == tile for one in cases if one.served),
        )


SERVES = {
    "is the (?:fastest|one with the shortest)": lambda one: one.serves and one.times[one.serves] <= one.us,
    "(?:ties with it|differs from that one)": lambda one: (
        one.serves and one.times[one.serves] > one.us and one.leader == one.serves
    ),
    "is surely slower": lambda one: one.faster,
    "has a longer estimate": lambda one: one.serves and one.leader != one.serves and not one.faster,
    "(?:was not timed|has no estimate)": lambda one: not one.serves,
}


def serves(self, case, problems, text):
    """How what is served compares with the fastest."""
    yield "problems", problems, lambda: len(self.evidence.explored)
    for words, holds in SERVES.items():
        if found := re.search(rf"{words}[^,]*? for ([\d,]+)", text):
            yield (
                words.split()[1],
                found[1],
                lambda holds=holds: sum(bool(holds(one)) for one in self.evidence.explored),
            )


def surely_faster(self, case, problem, schedule, us, day, served, other_us, other_day):
    """Another schedule is surely faster than what is served."""
    (one,) = self.by_text[problem]
    days = {f"{each.created:%Y-%m-%d}" for each in self.evidence.listed if each.problem == one.problem}
    yield "faster", schedule, lambda: one.faster.short()
    yield "us", us, lambda: one.us
    yield "day", day, lambda: days
    yield "served", served, lambda: one.serves.short()
    yield "served us", other_us, lambda: one.times[one.serves]
    yield "served day", other_day, lambda: days


def less_time(self, case, cost):
    """How much less time it takes."""
    yield "cost", cost, lambda: min(one.us / one.times[one.serves] - 1 for one in self.evidence.explored if one.faster)


def model_error(self, case, least, most, source):
    """How far the model is off."""
    errors = _known(one.error for one in self.evidence.explored)
    yield "least", least, lambda: min(error["mean"] for error in errors)
    yield "most", most, lambda: max(error["mean"] for error in errors)
    yield "sources", set(source.split(" and ")), lambda: {error["source"] for error in errors}


def error_unknown(self, case, rest, problems):
    """For how many problems the model was never compared."""
    yield "unknown", rest, lambda: sum(not one.error for one in self.evidence.explored)
    yield "problems", problems, lambda: len(self.evidence.explored)


def holds(problem, condition):
    """Whether a condition such as `not `causal` and `seq_q` ≥ 180` holds for a problem; so does an empty one."""
    return all(_part_holds(problem, part) for part in condition.split(" and ") if part)


def _part_holds(problem, part):
    least, no, name, how, value = re.fullmatch(r"(?:(\d+) ≤ )?(not )?`(\w+)`(?: (is not|is|≤|≥) (\S+))?", part).groups()
    called = problem.declaration.written.get(name) or problem.declaration.label.get(name, name)
    own = problem.values[name if name in problem.values else called if isinstance(called, str) else called[0]]
    if how in ("≤", "≥"):
        return int(least or own) <= own <= int(value) if how == "≤" else own >= int(value)
    return (own is True if value is None else value_text(own) == value) != bool(no or how == "is not")


def rules_table(self, group, head, cells):
    """For which problems a value of a knob is good."""
    knobs, _, parts = cells[0].partition(": ")
    right, problems, constant = re.fullmatch(r"(\S+) of (\S+), one value for all (\S+)", cells[1]).groups()
    yield from rule(self, None, knobs if "`" in knobs else f"`{knobs}`", parts, right, problems, constant)


def rule(self, case, knobs, parts, right, problems, constant):
    """For which problems a value of a knob is good: what one value for all is right for, and the rule at least on these."""
    found = self.rule(tuple(re.findall(r"`(\w+)`", knobs)), parts)
    yield "problems", problems, lambda: found()["problems"]
    yield "one value for all", constant, lambda: found()["constant"]
    yield "right", True, lambda: int(right.replace(",", "")) <= found()["right"]


def choose(self, case, text):
    """Which knobs to tune for each problem, and which problems prefer what."""
    known = self.evidence
    for knob, words in re.findall(r"`(\w+)` \(([^)]*)\)", text):
        yield "advice", "choose", lambda knob=knob: known.verdict(knob)["advice"]
        rest = re.search(r"(?:none surely|the model cannot tell) for (\d+)", words)
        if rest:
            yield (
                "no preference",
                rest[1],
                lambda knob=knob: len(known.explored) - known.verdict(knob)["preferred"].total(),
            )
        for value, count in re.findall(r"(\w+)(?: is faster)? for (\d+)", words[: rest and rest.start()]):
            yield "preferred by", count, counted(self, knob, "preferred", value)


def counted(self, knob, what, value):
    """How often a value, as it is printed, is preferred by a problem, or that of a search's winner."""
    return lambda: next(
        (count for (_, each), count in self.evidence.verdict(knob)[what].items() if value_text(each) == value), 0
    )


def advice_beyond_error(self, case, text):
    """Of which knobs the model can tell the values apart, and which problems prefer what."""
    for _, said, recompute in choose(self, case, text.replace("the model cannot tell", "none surely")):
        if said == "choose":
            yield "advice", True, lambda recompute=recompute: recompute() in ("choose", "leave")
        else:
            yield "preferred by", said, recompute


def leave(advice):
    """Reads which knobs to leave at which value, over how many problems, and how many winners have another value."""

    def read(self, case, text):
        for knob, value, problems, rest, winners in re.findall(
            r"`(\w+)` at (\w+) \((?:over )?(\d+) problems?(?:; (\d+) of (\d+) winners?[^)]*)?\)", text
        ):
            yield "advice", advice, lambda knob=knob: self.evidence.verdict(knob)["advice"]
            yield (
                "value",
                value,
                lambda knob=knob: {value_text(each) for _, each in self.evidence.verdict(knob)["fine"]},
            )
            yield "problems", problems, lambda knob=knob: self.evidence.verdict(knob)["problems"]
            yield "winners", winners, lambda knob=knob: self.evidence.verdict(knob)["won"].total()
            yield (
                "other winners",
                rest,
                lambda knob=knob, value=value: (
                    self.evidence.verdict(knob)["won"].total() - counted(self, knob, "won", value)()
                ),
            )

    return read


def advised(advice):
    """Reads which knobs there is some advice for, and how often winners of searches have which value."""

    def read(self, case, text, *more):
        for knob, words in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", text):
            yield "advice", advice, lambda knob=knob: self.evidence.verdict(knob)["advice"]
            for value, count in re.findall(r"(\w+) for (\d+)", words):
                yield "winners", count, counted(self, knob, "won", value)

    return read


def highest(self, case, problem, schedule, us, rate, unit):
    """The problem with the highest rate."""
    units = Counter(unit_of(one.problem) for one in self.evidence.explored)
    alike = [one for one in self.evidence.explored if unit_of(one.problem) == max(units, key=units.get)]
    top = max(alike, key=lambda one: one.rate)
    yield "problem", problem, lambda: str(top.problem)
    yield from best(self, top, schedule, us, rate, unit)


def best(self, case, schedule, us, rate, unit):
    """The best schedule of one problem, its time and its rate."""
    case = only(self, case)
    yield "schedule", schedule, lambda: best_of(case)
    yield "us", us, lambda: case.times[case.leader]
    yield "rate", rate, lambda: rate_of(case.problem, case.times[case.leader])
    yield "unit", unit, lambda: unit_of(case.problem)


def measured_on(self, case, device, arch, day, programs):
    """How many programs of a problem were measured, where and when."""
    yield "device", device, lambda: case.device
    yield (
        "day",
        day,
        lambda: f"{max(one.created for one in self.evidence.listed if one.problem == case.problem):%Y-%m-%d}",
    )
    yield "programs", programs, lambda: case.count


def estimated(self, case, programs, day, mean, figures, source, worst, least):
    """How many programs of a problem were estimated, and how far such estimates are off."""
    yield "programs", programs, lambda: case.count
    yield "error", mean, lambda: case.error["mean"]
    yield "day", day, lambda: str(case.entry["updated_at"])[:10]
    yield "decides", least, lambda: case.tolerance
    yield "figures", figures, lambda: case.error["figures"]
    yield "source", source, lambda: case.error["source"]
    yield (
        "worst",
        worst,
        lambda: f"{abs(case.error['worst']) * 100:.0f}% too {'long' if case.error['worst'] > 0 else 'short'}",
    )


def rule_here(self, case, knobs, parts, right, constant):
    """A rule with its score as shares of the problems, and a mark at the value of this problem."""
    found = self.rule(tuple(re.findall(r"`(\w+)`", knobs)), parts)
    clauses = [part.partition(" where ")[::2] for part in parts.removesuffix(" elsewhere").split("; ")]
    marked = next(value for value, _ in clauses if value.endswith(" (here)"))
    own = next(value for value, condition in clauses if holds(case.problem, condition))
    yield "here", marked, lambda: own
    yield "one value for all", f"{constant}%", lambda: f"{found()['constant'] / found()['problems']:.0%}"
    yield "right", True, lambda: int(right) <= round(100 * found()["right"] / found()["problems"])


def matters(self, case, text):
    """What knobs cost at their worst value in one problem, beside the value that the best schedule has."""
    for knob, value, cost, against in re.findall(rf"`(\w+)` = (\S+) takes {SHARE} (?:than|as) (\w+)", text):
        yield "against", against, lambda knob=knob: value_text(case.leader[knob])
        yield "worst value", cost, lambda knob=knob: max(worst_effects(case, knob))[0] - 1
        yield "which", value, lambda knob=knob: max(worst_effects(case, knob))[1]


def worst_effects(case, knob):
    """What the other values of a knob cost, those that are surely slower than the leader's by more than noise."""
    own = value_text(case.leader[knob])
    for _, value in case.values[knob]:
        found = case.effect_of(knob, value_text(value), own)
        if (
            found["ratio"]
            and min(found["low"], found["ratio"] - (0.01 if case.provenance == "measured" else case.tolerance)) > 1
        ):
            yield found["ratio"], value_text(value)


def fact(self, case, title, value, more):
    """A fact of the first screen."""
    us = re.search(r"([\d.,]+) µs", more)
    code = re.search(CODE, more)
    tie = re.match(rf"It cannot be told apart from what is served \({LONGER}\)", more)
    said = tie[1] if tie else value
    untold = value == "cannot be told"
    if title in ("Served to calls", "Best"):
        yield "name", value, lambda: name_of(self, case.served or case.leader)
        if code:
            yield "schedule", code[1], lambda: (case.served or case.leader).short()
        if us and "not timed with" not in more:
            yield "us", us[1], lambda: case.times[case.serves or case.leader]
        elif us:
            yield "fastest us", us[1], lambda: case.us
        if ties := re.search(rf"{N} other schedules? cannot", more):
            yield "ties", ties[1], lambda: len(case.ties)
        if faster := re.search(rf"Timed faster, but not raced: .*, ([\d.,]+) µs, {LONGER}\.", more):
            yield "faster us", faster[1], lambda: case.us
            yield "faster by", faster[2], lambda: case.us / case.times[case.serves] - 1
    elif title == "Compiler defaults" and case.default is None:
        yield "not known", value, lambda: "not known"
    elif untold:
        other = case.default if title == "Compiler defaults" else case.second_tile(self.tile)
        yield "beyond the model's error", False, lambda: case.cost(other) > case.tolerance
    elif title == "Compiler defaults":
        yield "cost", said, lambda: case.cost(case.default)
        yield "us", us and us[1], lambda: case.times[case.default]
        if case.provenance == "measured":
            yield "tie", bool(tie), lambda: case.tied(case.default, case.serves or case.best)
    elif title.startswith("Second best") and value != "not known":
        yield "cost", said, lambda: _drop(case.second_tile(self.tile))
        yield "schedule", code and code[1], lambda: {each.short() for each in case.second_tile(self.tile)["schedules"]}
    elif title == "Runner-up":
        yield "cost", said, lambda: case.runner_up
    elif title == "Served without tuning" and value.startswith("about"):
        yield "expected", value[6:], lambda: {f"{shown(band['mean'])} longer" for band in self.evidence.bands}
        cases, worst = re.search(r"On (\d+) other tuned problems .*, (\S+%) at worst", more).groups()
        yield "of", (int(cases), worst), lambda: {(band["cases"], shown(band["worst"])) for band in self.evidence.bands}
    elif title == "Served without tuning" and value == "the same":
        if "never tuned" in more:
            yield "tuned", False, lambda: bool(case.entry) and case.entry["provenance"] == "measured"
        else:
            yield "the same", case.served.id, lambda: self.untuned_choice(case).id
    elif title == "Served without tuning" and (tie or "%" in value or value == "as long"):
        yield "cost", said, lambda: case.cost(self.untuned(case))
        yield (
            "name",
            re.search(r"(?:^|[.:] )([^.]+), (?:chosen by|the compiler)", more)[1],
            lambda: name_of(self, self.untuned(case)),
        )


def shown(share):
    """A share as it stands in a sentence."""
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}%"


def name_of(self, schedule):
    """A schedule in a word: its tile where it has one."""
    known = () if {*(self.tile or ())} & {*HINT_KNOBS} else self.tile
    return tile_text(schedule[knob] for knob in known) if known and {*known} <= {*schedule} else schedule.short()


def few(self, case, five, problems, two, one):
    """How many schedules are enough."""
    cases = self.evidence.explored
    yield "problems", problems, lambda: len(cases)
    for name, count, limit in (("5%", five, 0.05), ("2%", two, 0.02), ("1%", one, 0.01)):
        yield name, count, lambda limit=limit: len(chosen_few(cases, limit))


def few_timed(self, case, number, average, problems):
    """On how many problems the schedules that are enough were timed."""
    cases = self.evidence.explored
    yield (
        "average",
        average,
        lambda: statistics.fmean(sum(each in one.times for one in cases) for each in chosen_few(cases, 0.05)),
    )
    yield "problems", problems, lambda: len(cases)


def regimes_said(self, case, problems, other):
    """How many problems have another winner at the power cap."""
    yield "problems", problems, lambda: len(self.evidence.regimes)
    yield (
        "other winner",
        other,
        lambda: sum(each["burst"] != each["sustained"] for each in self.evidence.regimes.values()),
    )


def left_out(self, case, count):
    """Measurements that are not in the report."""
    yield "measurements", count, lambda: len(self.evidence.taken) - len(self.evidence.listed)


def runners_up(self, case, cost, of):
    """What the runner-up costs, where little else is known."""
    costs = _known(one.runner_up for one in self.evidence.measured or self.evidence.modelled)
    yield "cost", cost, lambda: statistics.median(costs)
    yield "problems", of, lambda: len(costs)


def least_sure(self, case, close, of):
    """How many modelled problems have two best tiles that the model cannot tell apart."""
    cases = [(one, one.tiles(self.tile)) for one in self.evidence.modelled]
    yield (
        "close",
        close,
        lambda: sum(
            bool(one.error) and len(tiles) > 1 and _relative(tiles[1]) <= one.tolerance for one, tiles in cases
        ),
    )
    yield "problems", of, lambda: len(cases)


def least_sure_problem(self, case, problem, tiles, first, second):
    """The problem with the most tiles that the model cannot tell apart."""
    (one,) = self.by_text[problem]
    yield "first tile", first, lambda: tiles_of(self, one, 0)
    yield "second tile", second, lambda: tiles_of(self, one, 1)


def served_alone(self, case, schedule, us, rate, unit):
    """What is served for the only problem of a report."""
    one = only(self, case)
    yield "schedule", schedule, lambda: one.served.short()
    yield "us", us, lambda: one.times[one.serves]
    yield "rate", rate, lambda: rate_of(one.problem, one.times[one.serves])


def served_untimed(self, case, schedule, us, day):
    """What is served for the only problem of a report, which was not timed beside the others."""
    one = only(self, case)
    yield "schedule", schedule, lambda: one.served.short()
    yield "timed", None, lambda: one.serves
    yield "us", us, lambda: self.evidence.served_entry(one.problem)["measurement"].us
    yield "day", day, lambda: f"{self.evidence.served_entry(one.problem)['measurement'].created:%Y-%m-%d}"


def fastest(self, case, schedule, us, rate, unit):
    """The fastest schedule of the only problem of a report."""
    one = only(self, case)
    yield "schedule", schedule, lambda: {each.short() for each in one.times if one.times[each] == one.us}
    yield "us", us, lambda: one.us
    yield "rate", rate, lambda: one.rate


def only(self, case):
    """The problem that a sentence is about."""
    return case or (self.evidence.explored or self.evidence.cases)[0]


SENTENCES = {
    "served alone": (rf"`explain` serves {CODE}: {TIME}\.", served_alone),
    "served untimed": (
        rf"`explain` serves {CODE}, which (?:took ([\d.,]+) µs on ([\d-]+) in a run of its own, and )?(?:was not timed beside the "
        r"others|has no estimate)\.",
        served_untimed,
    ),
    "fastest": (rf"The (?:fastest|shortest)(?: of these| estimate)? is {CODE}, {TIME}(?:; [^`]*)?\.", fastest),
    "measured": (
        rf"Measured on ([^(]*) \((sm_\w+), ([^)]*)\)(?:, at its power cap)?: {N} programs of (\S+) for {N} problems?"
        rf"(?:[;] of {N} other problems? little but the winner of a search is known)?(?:; .*)?\.",
        source,
    ),
    "winners": (
        rf"Measured on ([^(]*) \((sm_\w+), ([^)]*)\).*: the best schedules? of {N} problems? of (\S+)\.",
        winners_alone,
    ),
    "modelled": (
        rf"Nothing was measured on (sm_\w+).*: every figure is the performance model's estimate, for {N} problems? of (\S+)\.",
        modelled_alone,
    ),
    "tiles": (
        rf"(?:On [^,]*|By the estimate), (?:\S+ (?:is|has) [^:]*: )?the second best(?: [^:]*?)? takes {LONGER} {MEDIAN}"
        rf"(?:; it ties with the best for {N} of them)?(?:, and the worst {LONGER}(?: \([^)]*\))?)?\.",
        tile_costs,
    ),
    "tiles tie": (
        rf"(?:On [^,]*|By the estimate), (?:\S+ (?:is|has) .*: )?the second best.* ties with the best {MEDIAN}"
        rf"(?:, and the worst takes {LONGER}(?: \([^)]*\))?)?\.",
        tiles_tie,
    ),
    "two best": (
        rf"By the estimate, the two best .*s differ by ([\d.]+%) {MEDIAN}(?:, for {N} of them by more than the model's error|"
        rf", by no more than the model's error)?; the worst takes {LONGER}\.",
        two_best,
    ),
    "default": (rf"The compiler defaults take {COST}(?:; for {N} they have no time)?\.", default_cost),
    "untuned": (
        rf"What is served without tuning takes {COST}(?:; for the other {N} that schedule (?:was not timed|has no estimate))?\.",
        untuned_cost,
    ),
    "hidden": (
        r"On problems of (.*) that were hidden from it, such choices lost ([\d.]+%)(?: to ([\d.]+%))? on average, and at worst "
        r"([\d.]+%)\.",
        hidden_losses,
    ),
    "served tiles": (rf"Tile {TILE} is served for {N} of {N} problems(.*)\.", served_tiles),
    "serves": (rf"Of {N} problems, the schedule that `explain` serves (.*)\.", serves),
    "faster": (
        rf"For (.*), {CODE} is the faster: it took ([\d.,]+) µs(?: on ([\d-]+))?, and {CODE}, which is served, ([\d.,]+) µs"
        r"(?: on ([\d-]+))?\.",
        surely_faster,
    ),
    "less time": (rf"That is {LONGER}, but the two were not raced against each other\.", less_time),
    "builds": (
        rf"Over {N} builds?: pairs of schedules that differ in one knob only, and how many of them are the same machine code\.",
        lambda self, case, count: [("builds", count, lambda: len(self.evidence.builds))],
    ),
    "error": (
        r"Estimates like these were ([\d.]+%)(?: to ([\d.]+%))? off on average(?:, depending on size and tile)? \((.*)\)\.",
        model_error,
    ),
    "never compared": (
        r"Estimates like these were never compared with .*: they do not tell which schedule is faster\.",
        lambda self, case: [("known", 0, lambda: sum(bool(one.error) for one in self.evidence.explored))],
    ),
    "error unknown": (rf"For {N} of {N} problems? they were never compared with .*\.", error_unknown),
    "rule": (rf"(`\w+`(?: x `\w+`)*): (.*) \(right for {N} of {N} problems left out; one value for all: {N}\)\.", rule),
    "beyond error": (r"By more than the model's error differ the values of (.*)\.", advice_beyond_error),
    "within error": (
        r"The model cannot tell the values of (.*) apart: it is further off than they differ\.",
        advised("unclear"),
    ),
    "choose": (r"Tune (.*) for each problem\.", choose),
    "leave": (r"Leave (.*): no other value compared is more than 1% faster\.", leave("leave")),
    "few problems": (
        r"Too few problems to advise: no other value compared is more than 1% faster than (.*)\.",
        leave("few"),
    ),
    "same": (r"Differences below 1% are all that is known between values of (.*)\.", advised("same")),
    "unclear": (r"Tune (.*?)(?:, too)?: no value is known to be good for every \w+\.", advised("unclear")),
    "won": (
        r"Pairs of programs settle nothing about (.*), of which nearly all winners have one value\.",
        advised("unclear"),
    ),
    "untried": (r"Too few programs that differ in one knob alone were timed to judge (.*)\.", advised("untried")),
    "highest rate": (rf"Among these problems, the highest rate is that of ([^:]*): {CODE}, {TIME}\.", highest),
    "best": (rf"(?:On [^`]* |By [^`]* )?[Tt]he best schedule is {CODE}: {TIME}(?:, measured)?\.", best),
    "measured on": (
        rf"Measured on ([^(]*) \((sm_\w+), ([\d-]+)\)(?: at its power cap)?: {N} programs? of this problem\.",
        measured_on,
    ),
    "estimated": (
        rf"Nothing was measured: the performance model estimated {N} programs? for [^;]*?(?: on ([\d-]+))?; such estimates were ([\d.]+%) off on "
        rf"average \({N} ([^;]*); at worst ([\d.]+% too \w+)\), so that differences below ([\d.]+%) decide nothing\.",
        estimated,
    ),
    "estimated, no error": (
        rf"Nothing was measured: the performance model estimated {N} programs? for [^;]*?(?: on [\d-]+)?; no estimate .*\.",
        lambda self, case, programs: [("programs", programs, lambda: case.count)],
    ),
    "rule here": (r"(`\w+`(?: x `\w+`)*): (.*) \(right for (\d+)%, one value for all for (\d+)%\)\.", rule_here),
    "matters": (r"(?:By the estimates, )?(`\w+` = \S+ takes .*)\.", matters),
    "few": (
        rf"{N} schedules? (?:is|are) enough to keep all {N} problems within 5% of their best, {N} within 2%, {N} within 1%\.",
        few,
    ),
    "few timed": (rf"A schedule counts only for .*; each of the {N} was on {N} of the {N} on average\.", few_timed),
    "regimes": (
        rf"Of {N} problems? with programs measured in both regimes, {N} have another winner at the power cap\.",
        regimes_said,
    ),
    "left out": (rf"Left out: {N} measurements? of .*\.", left_out),
    "runners-up": (rf"Of other schedules only the \w+'s runner-up is known: it takes {LONGER} {MEDIAN}\.", runners_up),
    "least sure": (
        rf"For {N} of {N} modelled problems the estimates of the two best tiles differ by less than the model's error, .*\.",
        least_sure,
    ),
    "least sure problem": (
        rf"The least sure is (.*), with {N} tiles that close, the best of them {TILE} and {TILE}: run .*\.",
        least_sure_problem,
    ),
}
"""Kind -> the pattern of a whole sentence, and what reads its groups."""

# Tables of report.md: what reads the heading group, the titles and the cells of a row.


def best_table(self, group, head, cells):
    """What is served for each problem, what ties with it, and what other choices cost."""
    case = self.case_of(f"{cells[0]} {group}")
    row = dict(zip(head, cells, strict=True))
    yield "served", cells[1], lambda: (case.served or case.best).short()
    yield "us", cells[2], lambda: case.times[case.serves]
    yield "rate", cells[3].split()[0], lambda: rate_of(case.problem, case.times[case.serves])
    yield "ties", cells[4], lambda: len(case.ties)
    if match := re.match(rf"{CODE} ([\d.,]+) µs", cells[5]):
        yield "best", match[1], lambda: {each.short() for each in case.times if case.times[each] == case.us}
        yield "best us", match[2], lambda: case.us
    yield "second tile", row["second best tile takes longer by"], lambda: _drop(case.second_tile(self.tile))
    yield "compiler defaults", row["compiler defaults take longer by"], lambda: case.cost(case.default)
    yield "without tuning", row["served without tuning takes longer by"], lambda: case.cost(self.untuned(case))


def both_regimes(self, group, head, cells):
    """Burst against sustained."""
    case = self.by_text[cells[0].partition(", fp16")[0]][0]
    found = self.evidence.regimes[case.problem, case.mode]
    yield "programs", cells[1], lambda: found["programs"]
    yield "burst winner", cells[2], lambda: found["burst"].short()
    yield (
        "sustained winner",
        cells[3],
        lambda: "the same" if found["burst"] == found["sustained"] else found["sustained"].short(),
    )
    for name, text in (("burst_loss", cells[4]), ("sustained_loss", cells[5])):
        yield name, text.rstrip("*"), lambda name=name: found[name]
        yield f"{name} star", text.endswith("*"), lambda name=name: found[f"{name}_distinct"]


def conditions(self, group, head, cells):
    """The conditions of all measurements."""
    name, text = cells
    known = self.evidence.listed
    mhz = {"SM clock": "sm_clock_mhz", "memory clock": "memory_clock_mhz"}
    if name in mhz:
        values = [one.conditions[mhz[name]] for one in known if one.conditions[mhz[name]]]
        yield name, text, lambda: f"{' to '.join(map(str, dict.fromkeys((min(values), max(values)))))} MHz"
    elif name == "highest power":
        yield name, text, lambda: max(one.conditions["power_w"] for one in known)
    elif name == "highest temperature":
        yield name, text, lambda: max(one.conditions["temperature_c"] for one in known)
    elif name == "driver":
        yield name, text, lambda: ", ".join(sorted({one.device["driver"] for one in known}))
    elif name == "runner":
        yield name, text, lambda: ", ".join(sorted({one.conditions["runner"] for one in known}))
    elif name == "regime":
        yield name, text, lambda: self.evidence.regime
    elif name == "taken":
        both = min(one.created for one in known), max(one.created for one in known)
        yield name, text, lambda: f"{both[0]:%Y-%m-%d %H:%M} to {both[1]:%Y-%m-%d %H:%M} UTC"
    elif name == "measurements":
        yield name, text.split()[0], lambda: len(known)
        yield "samples", text.split()[2], lambda: sum(one.samples for one in known)
    elif name == "throttle reasons":
        counts = Counter(reason for one in known for reason in one.conditions["throttle_reasons"])
        for reason, count in re.findall(r"([^,(]+) \(in ([\d,]+)", text):
            yield name, count, lambda reason=reason: counts[reason.strip()]
    elif name == "device":
        device = max(known, key=lambda one: one.created).device
        yield (
            name,
            text,
            lambda: (
                f"{device['arch']}, {device['sm_count']} SMs, {device['memory_bytes'] / 2**30:.0f} GiB, "
                f"{device['l2_bytes'] / 2**20:.0f} MiB of L2"
            ),
        )
    elif name == "compiler":
        for version in re.findall(r"tileiras (\S+?)[,;]?(?: |$)", text):
            yield name, version, lambda: {one.tileiras for one in known}


def enough(self, group, head, cells):
    """The schedules that are enough."""
    found = chosen_few(self.evidence.explored, float(cells[0].rstrip("%")) / 100)
    yield "count", cells[1], lambda: len(found)
    yield (
        "schedules",
        tuple(re.findall(CODE, f"`{cells[2].strip('`')}`")),
        lambda: tuple(each.short() for each in found),
    )


def failures(self, group, head, cells):
    """Candidates that failed."""
    yield "candidates", cells[2], lambda: self.evidence.failures(cells[0], cells[1])


def inert(self, group, head, cells):
    """How often a knob leaves the machine code as it is."""
    known = self.evidence.inert
    yield "pairs", cells[1], lambda: known[cells[0]]["pairs"]
    yield "same machine code", cells[2], lambda: known[cells[0]]["same"]
    yield "share", cells[3], lambda: known[cells[0]]["same"] / known[cells[0]]["pairs"]


TABLES = {
    "Knobs that do not change the machine code": inert,
    "Schedules of": best_table,
    "Burst against sustained": both_regimes,
    "For which problems a value is good": rules_table,
    "Conditions": conditions,
    "How few schedules are enough": enough,
    "Candidates that failed": failures,
}
"""How a heading begins -> what reads the rows below it."""

# Files.


def _case_of_row(self, row):
    return self.by_id[row["problem_id"], row.get("accum_mode") or row.get("knob_accum_mode") or "fp32"]


def schedules_csv(self, row):
    """Every schedule with a time."""
    case = self.by_id[row["problem_id"], row.get("accum_mode", "fp32")]
    prefix = "modelled_" if case.provenance == "modelled" else ""

    def schedule():
        return self.evidence.timed_as(case, row["schedule_id"])

    yield "us", float(row[f"{prefix}us" if prefix else "median_us"]), lambda: case.times[schedule()]
    yield "relative", float(row[f"{prefix}relative"]), lambda: case.cost(schedule()) + 1
    rate = row.get(f"{prefix}{ {'TFLOP/s': 'tflops', 'GB/s': 'gbps'}[unit_of(case.problem)] }")
    yield "rate", float(rate), lambda: rate_of(case.problem, case.times[schedule()])
    yield "program", row["same_program_as"], lambda: case.program_of[schedule()].id
    yield "fingerprint", row["fingerprint"], lambda: case.fingerprints[schedule()]
    for place, name in enumerate(("ci_low_us", "ci_high_us", "samples")):
        if row[name]:
            yield name, float(row[name]), lambda place=place: case.intervals[case.program_of[schedule()]][place]
    for name in ("registers", "spill_bytes"):
        if row[name] and not prefix:
            yield name, float(row[name]), lambda name=name: self.evidence.facts[row["fingerprint"]][name]


def knobs_csv(self, row):
    """What each value of a knob costs in one problem."""
    case = _case_of_row(self, row)
    prefix = "modelled_" if case.provenance == "modelled" else ""
    yield "pairs", row["pairs"], lambda: case.effect_of(row["knob"], row["value"], row["against"])["pairs"]
    low, high = ("least", "most") if prefix else ("ci_low", "ci_high")
    for name, key in (("ratio", "ratio"), (low, "low"), (high, "high")):
        if row[f"{prefix}{name}"]:
            yield (
                name,
                float(row[f"{prefix}{name}"]),
                lambda key=key: case.effect_of(row["knob"], row["value"], row["against"])[key],
            )
    yield "against", row["against"].lower(), lambda: str(case.leader[row["knob"]]).lower()


def sensitivity_csv(self, row):
    """The best and second best tile of each problem."""
    if row["best_tile"]:
        case = _case_of_row(self, row)
        prefix = "modelled_" if case.provenance == "modelled" else ""
        yield "best tile", row["best_tile"], lambda: tiles_of(self, case, 0)
        yield "runner-up tile", row["runner_up_tile"], lambda: tiles_of(self, case, 1)
        yield "drop", row[f"{prefix}drop_percent"], lambda: 100 * _drop(case.second_tile(self.tile))
        yield "worst", row[f"{prefix}worst_drop_percent"], lambda: 100 * _relative(case.worst_tile(self.tile))


def regimes_csv(self, row):
    """Burst against sustained."""
    case = _case_of_row(self, row)
    found = self.evidence.regimes[case.problem, case.mode]
    yield "programs", row["programs"], lambda: found["programs"]
    yield "burst winner", row["burst_winner"], lambda: found["burst"].id
    yield "sustained winner", row["sustained_winner"], lambda: found["sustained"].id
    for name in ("burst_loss", "sustained_loss"):
        yield name, row[f"{name}_percent"], lambda name=name: 100 * found[name]


def winners_csv(self, row):
    """The best schedules."""
    words = {"true": "yes", "false": "no"}
    values = {knob: words.get(value, value) for knob, value in row.items() if value != ""}
    best = (each for one in self.evidence.explored for each in one.times if one.times[each] == one.us)
    winners = ({knob: value_text(value) for knob, value in each.items()} for each in best)
    yield "is a winner", True, lambda: values in winners


CSV_FILES = {
    "schedules.csv": schedules_csv,
    "knobs.csv": knobs_csv,
    "sensitivity.csv": sensitivity_csv,
    "regimes.csv": regimes_csv,
    "winners.csv": winners_csv,
}

# The page's views of one problem, and its charts of all.


def tiles_view(self, case, row):
    """Each tile by its best schedule."""

    def found():
        return next(each for each in case.tiles(self.tile) if each["tile"] == (row["rows"], row["columns"]))

    yield "relative", row["relative"], lambda: round(found()["relative"], 4)
    yield "us", row["us"], lambda: round(found()["us"], 2)
    yield "programs", row["programs"], lambda: found()["programs"]
    yield "searched", "?" not in row["said"], lambda: found()["searched"]
    if case.serves:
        own = tuple(case.serves[each] for each in self.tile)
        yield "served", row["mark"] == "served", lambda: own == found()["tile"]


def knobs_view(self, case, row):
    """What each value of a knob costs."""
    knob, value, against = re.fullmatch(r"(\w+): (\S+), not (\S+)", row["change"]).groups()

    def found():
        return case.effect_of(knob, value, against)

    yield "relative", row["relative"], lambda: round(found()["ratio"], 4)
    yield "low", row["low"], lambda: round(found()["low"], 4)
    yield "high", row["high"], lambda: round(found()["high"], 4)
    yield "pairs", row["pairs"], lambda: found()["pairs"]


def programs_view(self, case, row):
    """How many programs take how long."""
    end = row["end"] if row["end"] <= 3 else float("inf")
    costs = [case.cost(each) + 1 for each in case.programs]
    yield (
        "programs",
        row["programs"],
        lambda: sum(row["start"] < cost <= end or (row["start"] == 1 and cost <= 1) for cost in costs),
    )
    yield "so far", row["so_far"], lambda: f"{sum(cost <= end for cost in costs)} of {len(costs)}"


def marks_view(self, case, row):
    """What is served, the compiler defaults and what would be served without tuning, over the best time."""
    what, _, ratio = row["what"].removesuffix(" →").rpartition(" ")
    marks = {"compiler defaults": lambda: case.default, "served without tuning": lambda: self.untuned(case)}
    schedule = marks.get(what, lambda: case.serves or case.leader)
    yield what, ratio, lambda: case.cost(schedule()) + 1
    yield f"{what}, us", row["us"], lambda: round(case.times[schedule()], 2)


def races_view(self, case, row):
    """Another implementation and ours, in one race."""
    race = next(each for each in case.entry["rivals"] if each["name"] == row["rival"])
    yield "us", row["us"], lambda: round(race["median_us"], 2)
    yield "ours", row["ours_us"], lambda: round(race["ours_us"], 2)
    yield "ratio", row["said"], lambda: race["ratio"]
    yield "interval", row["interval"], lambda: f"{race['ratio_low']:.3f} to {race['ratio_high']:.3f}"
    yield "schedule", row["schedule"], lambda: case.entry["schedule"].short()
    yield "day", row["day"], lambda: case.entry["updated_at"][:10]
    yield "version", row["version"], lambda: race["version"]


def drawn_view(self, case, row):
    """One of the programs that are drawn."""
    yield "best us", row["best_us"], lambda: round(case.us, 2)
    yield "us", row["us"], lambda: {round(case.times[each], 2) for each in case.programs}


def roofline_view(self, case, row):
    """The best and the default under the roofs."""
    schedule = case.default if row["kind"] == "compiler defaults" else case.serves or case.leader
    yield "rate", row["rate"], lambda: round(rate_of(case.problem, case.times[schedule]), 2)
    yield "us", row["us"], lambda: round(case.times[schedule], 2)
    yield "intensity", row["intensity"], lambda: round(case.problem.flops / case.problem.min_bytes, 3)


def trace_view(self, case, row):
    """The best so far, by programs measured."""
    yield "relative", row["relative"], lambda: round(min(min(case.trace[: row["measured"]]), 3.0), 4)


VIEWS = {
    "tiles": tiles_view,
    "effects": knobs_view,
    "bars": programs_view,
    "marks": marks_view,
    "programs": drawn_view,
    "races": races_view,
    "roofline": roofline_view,
    "trace": trace_view,
}


def costs_chart(self, row):
    """What another choice costs in each problem."""
    case = self.by_text[row["problem"]][0]
    found = {
        "second best tile": lambda: _drop(case.second_tile(self.tile)),
        "compiler defaults": lambda: case.cost(case.default),
        "served without tuning": lambda: case.cost(self.untuned(case)),
        "median program": lambda: statistics.median(case.cost(each) for each in case.programs),
    }
    yield row["choice"], row["relative"], lambda: found[row["choice"]]() + 1
    yield "best", row["best"], lambda: best_of(case)


def knobs_chart(self, row):
    """What another value of a knob costs, over problems."""
    knob, value, against = re.fullmatch(r"(\w+): (\S+), not (\S+)", row["change"]).groups()

    def found():
        return self.evidence.joined_effect(knob, value, against)

    for name, key in (("relative", "ratio"), ("low", "low"), ("high", "high")):
        yield name, row[name], lambda key=key: round(found()[key], 4)
    yield "pairs", row["pairs"], lambda: found()["pairs"]
    yield "problems", row["problems"], lambda: found()["problems"]


def rates_chart(self, row):
    """The rate of each problem."""
    modelled = "modelled" in row["source"]
    case = next(one for one in self.by_text[row["problem"]] if (one.provenance == "modelled") == modelled)
    yield "rate", row["rate"], lambda: round(case.rate, 1)
    yield "us", row["us"], lambda: round(case.us, 2)
    yield "schedule", row["schedule"], lambda: best_of(case)


def regimes_chart(self, row):
    """What the winner of one regime costs in the other."""
    case = self.by_text[row["problem"]][0]
    found = self.evidence.regimes[case.problem, case.mode]
    name = "burst_loss" if row["way"].startswith("burst") else "sustained_loss"
    yield name, row["loss"], lambda: found[name]
    yield "programs", row["programs"], lambda: found["programs"]


CHARTS = {"costs": costs_chart, "knobs": knobs_chart, "rates": rates_chart, "regimes": regimes_chart}

# `explain` and `show`.


def explained_json(self, problem, row):
    """What `explain --json` says of a problem."""
    known = self.evidence
    entry = known.served_entry(problem)
    yield (
        "own entry",
        row["provenance"] if row["entry"] and known.problem(row["entry"]["problem"]) == problem else "",
        lambda: entry["provenance"],
    )
    evidence = row["entry"]
    if evidence is None:
        return
    of = known.problem(evidence["problem"])
    found = known.served_entry(of)
    if of == problem:
        yield "schedule", row["schedule"], lambda: known.completed(entry["schedule"])
        yield "rate", row["tflops"], lambda: problem.flops / entry["measurement"].us / 1e6
    yield "median", row["median_us"], lambda: found["measurement"].us
    yield "fingerprint", evidence["fingerprint"], lambda: found["fingerprint"]
    yield "candidates", evidence["candidates"], lambda: found["candidates"]
    yield "margin", evidence["margin"], lambda: found["margin"]
    yield "ties", len(evidence["ties"]), lambda: len(found["ties"])


def explained_line(self, problem, name, text):
    """What a line of `explain` says of a problem."""
    known = self.evidence
    entry = known.served_entry(problem)
    if name == "schedule" and entry:
        yield name, text, lambda: Schedule(known.completed(entry["schedule"])).short()
    elif name == "provenance" and entry:
        yield name, text.partition(":")[0], lambda: entry["provenance"]
    elif name == "measured" and entry:
        numbers = re.match(
            r"([\d.]+) us \[([\d.]+), ([\d.]+)\], ([\d,]+) (\S+), (\d+) samples on (.*), (\w+), ([\d-]+)$", text
        )
        us, low, high, rate, unit, samples, device, regime, day = numbers.groups()
        taken = entry["measurement"]
        yield "measured us", us, lambda: taken.us
        yield "low", low, lambda: taken.low
        yield "high", high, lambda: taken.high
        yield "rate", rate, lambda: rate_of(problem, taken.us)
        yield "unit", unit, lambda: unit_of(problem)
        yield "samples", samples, lambda: taken.samples
        yield "device", device, lambda: taken.device["name"]
        yield "regime", regime, lambda: taken.regime
        yield "day", day, lambda: f"{taken.created:%Y-%m-%d}"
    elif name == "modelled" and entry:
        yield name, text.split()[0], lambda: entry["model_us"]
    elif name == "runner-up" and entry:
        schedule, _, margin = text.rpartition(" (")
        yield name, schedule, lambda: entry["runner_up"].short()
        if "%" in margin:
            yield "margin", margin.split()[0], lambda: abs(entry["margin"])
            yield "slower", "faster" not in margin, lambda: round(entry["margin"], 3) >= 0
    elif name == "tied with" and entry:
        yield name, sorted(text.split("; ")), lambda: sorted(tie.short() for tie in entry["ties"])
    elif name == "raced" and entry:
        for rival, us, ratio, host in re.findall(r"(\w+) ([\d.]+) us \(([\d.]+)x ours, host (\d+) us\)", text):
            race = next(each for each in entry["rivals"] if each["name"] == rival)
            yield "rival us", us, lambda race=race: race["median_us"]
            yield "rival ratio", ratio, lambda race=race: race["ratio"]
            yield "host", host, lambda race=race: race["host_us"]
    elif (
        name == "rival"
        and entry
        and (
            found := re.match(
                r"(?:in a captured graph )?(\w+).*: ([\d.]+)x faster .*\(([\d.]+) against ([\d.]+) us", text
            )
        )
    ):
        rival, faster, us, ours = found.groups()
        race = next(each for each in entry["rivals"] if each["name"] == rival)
        yield "rival faster", faster, lambda: 1 / race["ratio"]
        yield "rival us", us, lambda: race["median_us"]
        yield "ours", ours, lambda: race["ours_us"]
    elif name == "evidence" and entry:
        yield "compared", re.search(r"(\d+) distinct", text)[1], lambda: entry["candidates"]


def shown_json(self, row):
    """One entry of `show --json`."""
    problem = self.evidence.problem({name: row[name] for name in self.evidence.kernel.fields if name in row})
    alike = [entry for entry in self.evidence.all_entries if entry["problem"] == problem]
    yield "schedule", Schedule(row["schedule"]), lambda: {entry["schedule"] for entry in alike}
    if row["median_us"]:
        yield "median", row["median_us"], lambda: {entry["measurement"].us for entry in alike if entry["measurement"]}
    yield "provenance", row["provenance"], lambda: {entry["provenance"] for entry in alike}


def shown_line(self, line):
    """One line of `show`: rates, times and margins stand before the schedule."""
    found = re.search(
        r" (measured|modelled)(?:, [\w ]+)? +([\d.]+|-) +([\d,]+ \S+/s|-) +([\d.]+|-) +([+-][\d.]+%|-) +(\d+) +(\d+)  (.*)$",
        line,
    )
    _, us, rate, estimate, margin, ties, programs, schedule = found.groups()

    def alike(value):
        """The entries that may stand in this line, and have that value."""
        for entry in self.evidence.all_entries:
            counts = entry["candidates"], len(entry["ties"])
            if (
                entry[value] is not None
                and counts == (int(programs), int(ties))
                and entry["schedule"].short() == schedule
            ):
                yield entry

    yield "us", us, lambda: {f"{entry['measurement'].us:.1f}" for entry in alike("measurement")}
    yield "margin", margin, lambda: {f"{entry['margin']:+.1%}" for entry in alike("margin")}
    yield "model us", estimate, lambda: {f"{entry['model_us']:.1f}" for entry in alike("model_us")}
    if rate != "-":
        yield (
            "rate",
            rate.split()[0],
            lambda: {f"{rate_of(entry['problem'], entry['measurement'].us):.0f}" for entry in alike("measurement")},
        )


def summary_line(self, line):
    """One line of the summary: kernel, archs and counts."""
    found = re.match(r"(\w+) on ([\w, ]+): (?:([\d ]+) measured, )?(?:([\d ]+(?:to \d+ )?)modelled)?", line)
    if found and found[1] == self.evidence.kernel.name and self.evidence.arch in found[2].split(", "):
        counts = Counter(
            entry["provenance"] for entry in {entry["problem"]: entry for entry in self.evidence.entries}.values()
        )
        for how, text in (("measured", found[3]), ("modelled", found[4])):
            if text and " to " not in text:
                yield how, text.strip(), lambda how=how: counts[how]
