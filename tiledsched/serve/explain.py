"""Explanations: what is served for a problem, why, and whether it is the program that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiledsched.build.compiler import export
from tiledsched.core.config import EXACT, INVARIANT
from tiledsched.core.device import arch_spec
from tiledsched.core.problem import Problem, rate_text
from tiledsched.core.registry import command_word
from tiledsched.core.text import format_problem
from tiledsched.measure.runner import RivalTime
from tiledsched.rivals.offers import Offer
from tiledsched.serve.chain import Served
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.model_error import error_of, error_text
from tiledsched.store.records import Entry


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would be launched for one problem."""

    problem: Problem
    """What is computed."""
    arch: str
    """The GPU's arch."""
    device_name: str
    """The GPU's name; empty where only the arch is known."""
    served: Served
    """The schedule, its provenance and evidence, and rivals that may be called instead."""
    rival: str = ""
    """The rival that eager calls run instead; empty where none is, or where that depends on what is installed."""
    in_graphs: str = ""
    """The rival that a CUDA graph captures instead; empty where none is, or where that depends on what is installed."""
    captured: Served | None = None
    """What serves calls that a CUDA graph captures, by the times of replayed graphs; None where that is `served`."""
    launched_fingerprint: str = ""
    """Fingerprint of the machine code that a launch with these very tensors runs; empty unless it was compiled to know it."""
    compiling: bool = False
    """Whether the program is being compiled by another process, so that torch, or a rival, computes meanwhile."""
    schedule_class: str = EXACT
    """What entries must be of to be served: an accuracy class, or `invariant`."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """By setting or knob, where its value was read; all others have their defaults."""

    @property
    def is_measured_program(self) -> bool | None:
        """Whether the machine code launched is the one measured; None where either is not known."""
        entry = self.served.entry
        if not self.launched_fingerprint or entry is None or not entry.fingerprint:
            return None
        return self.launched_fingerprint == entry.fingerprint

    @property
    def stale(self) -> bool:
        """Whether the machine code launched is, or may be, another than the one measured."""
        return bool(self.served.stale) and not self.is_measured_program

    @property
    def unverified(self) -> str:
        """Why nothing shows that the schedule computes right results on this problem; empty where a GPU's accuracy gate passed it
        on this one, or on one that runs the same machine code."""
        schedule, gated = self.served.schedule, self.served.gated
        if (
            self.problem in gated or self.problem.declaration.reference is None
        ):  # then there is no right result to compare with
            return ""
        from tiledsched.core.launches import problem_class  # imports cuTile

        device, kernel = arch_spec(self.arch), self.problem.declaration
        alike = problem_class(kernel, self.problem, schedule, device)
        if any(problem_class(kernel, each, schedule, device) == alike for each in gated):
            return ""
        which = f"problems like this one, only for {gated[0]}" if gated else "any size"
        asked = {EXACT: "", INVARIANT: " --numerics invariant"}.get(
            self.schedule_class, f" --accum-mode {self.schedule_class}"
        )
        command = f"tiledsched tune {command_word(kernel)} -p {format_problem(self.problem)}{asked}"
        return f"no accuracy gate has run this schedule on a GPU for {which}; run: {command}"

    def to_json(self) -> dict[str, Any]:
        """The explanation as `--json` prints it."""
        entry = self.served.entry
        evidence = entry.measurement if entry else None
        return {
            "schema_version": 1,
            "problem": self.problem.to_json(),
            "arch": self.arch,
            "device": self.device_name,
            "provenance": self.served.provenance,
            "reason": self.served.reason,
            "schedule": self.served.schedule.to_json(),
            "alternatives": [each.to_json() for each in self.served.alternatives],
            "forced": dict(self.served.forced),
            "stale": self.stale,
            "unverified": self.unverified or None,
            "expected_loss": asdict(self.served.expected_loss) if self.served.expected_loss else None,
            "median_us": evidence.median_us if evidence else None,
            "tflops": entry.problem.tflops(evidence.median_us) if entry and evidence else None,
            "gbps": entry.problem.gbps(evidence.median_us) if entry and evidence else None,
            "entry": entry.to_json() if entry else None,
            "rival": self.rival or None,
            "in_graphs": self.in_graphs or None,
            **({"captured": replace(self, served=self.captured, captured=None).to_json()} if self.captured else {}),
            "rivals": [each.to_json() for each in self.served.rivals],
            "controls": dict(self.controls),
            "launched_fingerprint": self.launched_fingerprint or None,
            "is_measured_program": self.is_measured_program,
        }

    def __str__(self) -> str:
        served = self.served
        verdict = {
            True: "the program that was measured",
            False: "NOT the program that was measured",
            None: "no measured program to compare with",
        }[self.is_measured_program]
        rows = [
            ("schedule", served.schedule.short()),
            ("provenance", f"{served.provenance}: {served.reason}"),
            ("compiling", "torch serves until the program is built" if self.compiling else ""),
            ("stale", served.stale if self.stale else ""),
            ("unverified", self.unverified),
            *self._rivals(),
            ("expected", self._expected()),
            *(self._evidence(served.entry) if served.entry is not None else ()),
            ("in graphs", self._captured_words()),
            ("settings", ", ".join(f"{name} from {where}" for name, where in self.controls.items())),
            ("launched", f"{self.launched_fingerprint}: {verdict}" if self.launched_fingerprint else ""),
        ]
        lines = (f"  {name:<11} {text}" for name, text in rows if text)
        return "\n".join([f"{self.problem} on {self.device_name or self.arch}", *lines])

    def _captured_words(self) -> str:
        """The schedule that a CUDA graph captures, and its time in replayed graphs; empty where no such times are known."""
        captured = self.captured
        if captured is None or captured.entry is None or captured.entry.median_us is None:
            return ""
        which = "the same schedule" if captured.schedule == self.served.schedule else captured.schedule.short()
        return (
            f"a CUDA graph holds {which} ({captured.provenance}, {captured.entry.median_us:.1f} us in the "
            f"{captured.entry.regime} regime: {captured.entry.source})"
        )

    def _rivals(self) -> list[tuple[str, str]]:
        """Rows about the rivals that are called instead: in eager calls and, where it is another, in captured graphs."""
        offers, rows = self.served.rivals, []
        of_graphs = offers if self.captured is None else self.captured.rivals
        eager = _first([each for each in offers if not each.only_captured], self.rival)
        captured = _first([each for each in of_graphs if each.capturable], self.in_graphs)
        if eager is not None:
            how = " is called instead" if self.rival else ", where it is installed"
            rows.append(("rival", f"{eager.name}{how}: {eager.reason}"))
        if captured is not None and (eager is None or captured.name != eager.name):
            how = "" if self.in_graphs else ", where it is installed"
            why = "; its eager calls would wait for the host" if captured.only_captured else ""
            rows.append(("rival", f"in a captured graph {captured.name} is served{how}: {captured.reason}{why}"))
        return rows

    def _expected(self) -> str:
        """What a schedule chosen from other problems is expected to lose, or that this was not measured."""
        loss, entry, kernel = self.served.expected_loss, self.served.entry, self.problem.kernel
        if loss is None:
            is_own = self.served.provenance != "transferred" or entry is None or entry.problem == self.problem
            unknown = f"not known: of {kernel} on {self.arch} no such choice was judged on problems like it"
            return "" if is_own else unknown
        if loss.arch != self.arch:
            return (
                f"not known: on {self.arch} no such choice was judged; {loss.cases} of {loss.kernel} on {loss.arch} were "
                f"{loss.mean:.1%} slower than the best schedule, at worst {loss.worst:.1%}"
            )
        return (
            f"{loss.mean:.1%} slower than the best schedule, at worst {loss.worst:.1%}, as {loss.cases} such choices were on "
            f"other measured problems of {loss.kernel} on {loss.arch}"
        )

    def _evidence(self, entry: Entry) -> list[tuple[str, str]]:
        """Rows about the entry whose schedule is served."""
        served, m = self.served, entry.measurement
        is_own = (entry.problem, entry.schedule) == (self.problem, served.schedule)
        plain = f"plain {entry.kernel}, " if entry.kernel != self.problem.kernel else ""
        measured = modelled = slowed = ""
        if m is not None:
            parts = (
                f"{m.median_us:.1f} us [{m.ci_low_us:.1f}, {m.ci_high_us:.1f}]",
                rate_text(entry.problem, m.median_us),
                f"{m.samples} samples on {m.device.name}, {entry.regime}, {m.created_at:%Y-%m-%d}",
            )
            measured = ", ".join(filter(None, parts))
            slowed = served.held_down and f"{served.held_down}; tune again when the GPU holds its clock"
        elif entry.model_us is not None:
            error = error_of(self.arch, entry.problem, entry.schedule)
            modelled = f"{entry.model_us:.1f} us (an estimate; nothing was measured; {error_text(error)})"
        margin = "not measured"
        if entry.margin is not None:  # it is below 0 where a race's rules chose between what cannot be told apart
            margin = f"{abs(entry.margin):.1%} {'faster' if round(entry.margin, 3) < 0 else 'slower'}"
        layer = f" ({entry.layer} layer)" if entry.layer else ""
        numbers = entry.same_numbers or entry.batch_invariant
        source = entry.source.removesuffix(f"; {numbers}")
        schedule, runner_up, ties = f"schedule {entry.schedule.short()}:", entry.runner_up, entry.ties
        if (
            plain and self.problem.declaration.adapts
        ):  # what was measured had other tiles, which the entry does not tell
            schedule, runner_up, ties = "whose winner's tiles are adapted to this kernel:", None, ()
        return [
            ("evidence is for", "" if is_own else f"{plain}{entry.problem}, {schedule}"),
            ("measured", measured),
            ("held down", slowed),
            ("modelled", modelled),
            ("runner-up", f"{runner_up.short()} ({margin})" if runner_up is not None else ""),
            ("tied with", "; ".join(tie.short() for tie in ties)),
            ("raced", "; ".join(map(rival_text, entry.rivals or ()))),
            ("numbers", numbers),
            ("evidence", f"{source}, {entry.candidates} distinct programs compared{layer}"),
        ]


def _first(offers: Sequence[Offer], name: str) -> Offer | None:
    """The offer of that name, else the fastest; None where there is none."""
    return next((each for each in offers if each.name == name), offers[0] if offers else None)


def rival_text(time: RivalTime) -> str:
    """A rival's time for people, such as `torch_cudnn 104.2 us (1.04x ours, host 12 us)`."""
    if time.failure or time.median_us is None or time.ratio is None:
        return f"{time.name} {time.failure or 'not timed'}"
    return f"{time.name} {time.median_us:.1f} us ({time.ratio:.2f}x ours, host {time.host_us:.0f} us)"


def explain_problem(
    table: LookupTable, problem: Problem, arch: str, device_name: str = "", controls: Mapping[str, str] | None = None
) -> Explanation:
    """What `table` serves for a problem, and why; needs no GPU."""
    return Explanation(
        problem=problem,
        arch=arch,
        device_name=device_name,
        served=table.resolve(problem, arch, device_name),
        captured=table.resolve_captured(problem, arch, device_name),
        schedule_class=table.schedule_class,
        controls=controls or {},
    )


def launched_fingerprint(objects: Sequence[Any], arguments: Sequence[Sequence[Any]], arch: str) -> str:
    """Fingerprint of the machine code that kernel objects of :func:`tiledsched.serve.prebuilt.make_kernel` have compiled for
    launches with these arguments; needs the compiler, and no GPU of `arch`.
    """
    from cuda.tile.compilation import CallingConvention, KernelSignature

    from tiledsched.core.launches import assumed

    signatures = [
        assumed(
            each.declaration,
            KernelSignature.from_kernel_args(each, tuple(given), CallingConvention.cutile_python_v2()),
            each.step,
        )
        for each, given in zip(objects, arguments, strict=True)
    ]
    return export(objects, signatures, arch).fingerprint
