"""What would be served, why, and whether it is the program that was measured."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tiledsched.build.cubin import read_artifact
from tiledsched.problem import Problem
from tiledsched.serve.lookup import Served, Table

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `sdpa` would launch for one problem."""

    problem: Problem
    """What is computed."""
    arch: str
    """For which arch."""
    device_name: str
    """On which device; empty when only the arch is known."""
    served: Served
    """The schedule, its provenance and evidence."""
    launched_fingerprint: str = ""
    """Machine code a launch with these very tensors runs; empty unless asked for."""

    controls: Mapping[str, str] = field(default_factory=dict)
    """Setting or knob -> where its value was read; those that are not here have their defaults."""

    @property
    def is_measured_program(self) -> bool | None:
        """Whether what is launched is the machine code that was measured; None where either is not known."""
        entry = self.served.entry
        if not self.launched_fingerprint or entry is None or not entry.fingerprint:
            return None
        return self.launched_fingerprint == entry.fingerprint

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        entry = self.served.entry
        evidence = entry.measurement if entry else None
        return {
            "schema_version": 1, "problem": self.problem.to_json(), "arch": self.arch, "device": self.device_name,
            "provenance": self.served.provenance, "reason": self.served.reason,
            "schedule": self.served.schedule.to_json(), "forced": dict(self.served.forced),
            "expected_loss": asdict(self.served.expected_loss) if self.served.expected_loss else None,
            "median_us": evidence.median_us if evidence else None,
            "tflops": entry.tflops if entry else None,
            "entry": entry.to_json() if entry else None,
            "controls": dict(self.controls),
            "launched_fingerprint": self.launched_fingerprint or None, "is_measured_program": self.is_measured_program,
        }  # fmt: skip

    def __str__(self) -> str:
        served, entry = self.served, self.served.entry
        lines = [f"{self.problem} on {self.device_name or self.arch}",
                 f"  schedule    {served.schedule.short()}",
                 f"  provenance  {served.provenance}: {served.reason}"]  # fmt: skip
        if served.expected_loss is not None:
            loss = served.expected_loss
            lines.append(f"  expected    loss {loss.mean:.1%} (worst {loss.worst:.1%}) against the best, from {loss.cases} such "
                         "choices on held-out problems")  # fmt: skip
        if entry is not None:
            if entry.problem != self.problem:
                lines.append(f"  evidence is for {entry.problem}, schedule {entry.schedule.short()}:")
            if entry.measurement is not None:
                m = entry.measurement
                lines.append(f"  measured    {m.median_us:.1f} us [{m.ci_low_us:.1f}, {m.ci_high_us:.1f}], "
                             f"{entry.tflops:.0f} TFLOP/s, {m.samples} samples on {m.device.name}, "
                             f"{entry.regime}, {m.created_at:%Y-%m-%d}")  # fmt: skip
            elif entry.model_us is not None:
                lines.append(f"  modelled    {entry.model_us:.1f} us (an estimate; nothing was measured)")
            if entry.runner_up is not None:
                margin = f"{entry.margin:.1%} slower" if entry.margin is not None else "not measured"
                lines.append(f"  runner-up   {entry.runner_up.short()} ({margin})")
            if entry.ties:
                lines.append(f"  tied with   {'; '.join(tie.short() for tie in entry.ties)}")
            lines.append(f"  evidence    {entry.source}, {entry.candidates} distinct programs compared")
        if self.controls:
            lines.append(f"  settings    {', '.join(f'{name} from {where}' for name, where in self.controls.items())}")
        if self.launched_fingerprint:
            verdict = {True: "the program that was measured", False: "NOT the program that was measured",
                       None: "no measured program to compare with"}[self.is_measured_program]  # fmt: skip
            lines.append(f"  launched    {self.launched_fingerprint}: {verdict}")
        return "\n".join(lines)


def explain_problem(table: Table, problem: Problem, arch: str, device_name: str = "",
                    controls: Mapping[str, str] | None = None) -> Explanation:  # fmt: skip
    """What `table` serves for `problem`; needs no GPU."""
    return Explanation(problem=problem, arch=arch, device_name=device_name,
                       served=table.resolve(problem, arch, device_name), controls=controls or {})  # fmt: skip


def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
            verify: bool = False) -> Explanation:  # fmt: skip
    """What `sdpa` would do with these tensors, and why.

    Args:
        q, k, v, causal: as for :func:`tiledsched.sdpa`.
        verify: also compile, for these very tensors, what would be launched, and
            compare its machine code with the measured one. Takes about a second and needs the compiler.

    Raises:
        UnsupportedError: the kernel cannot serve them.
    """
    import torch

    from tiledsched.attention.sdpa import plan_for, settings

    plan = plan_for(q, k, v, causal=causal)
    properties = torch.cuda.get_device_properties(q.device)
    arch = f"sm_{properties.major}{properties.minor}"
    fingerprint = _launched_fingerprint(plan, q, k, v, arch) if verify else ""
    return Explanation(problem=plan.problem, arch=arch, device_name=properties.name, served=plan.served,
                       launched_fingerprint=fingerprint, controls=settings().sources)  # fmt: skip


def _launched_fingerprint(plan: Any, q: Any, k: Any, v: Any, arch: str) -> str:
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    from tiledsched.attention.launching import launch_arguments

    convention = CallingConvention.cutile_python_v2()
    signature = KernelSignature.from_kernel_args(plan.kernel, launch_arguments(plan, q, k, v), convention)
    output = io.BytesIO()
    export_kernel(plan.kernel, [plan.kernel.template.assumed(signature)], output, gpu_code=arch, output_format="cubin")
    return read_artifact(output.getvalue(), arch).fingerprint
