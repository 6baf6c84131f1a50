"""What works on this machine, and what to install for what does not.

Every check stands alone: a check that crashes becomes a finding and hides no other. Neither torch nor CuPy is imported
here; CuPy is tried in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.filesize import decimal

from tiledsched import __version__
from tiledsched.build import compiler, host_code, store, toolchain
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, TiledschedError
from tiledsched.core.extras import installing, package_version
from tiledsched.core.processes import SAFE_PATH
from tiledsched.core.text import plural
from tiledsched.measure import nvml

if TYPE_CHECKING:
    from tiledsched.measure.runner import Device
    from tiledsched.serve.entries import Layer

OLDEST_DRIVER = 580
"""First driver branch that runs programs of CUDA 13."""
OLDEST_TORCH = (2, 9)
PROBE_TIMEOUT_S = 20
LITTLE_SPACE = 1 << 30
TOO_LITTLE_SPACE = 100 << 20
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
CUDA_TILE = "pip install 'cuda-tile>=1.7,<2'"
CUDA_TORCH = "install a CUDA 13 build of torch: https://pytorch.org/get-started"
NVIDIA_SMI = "run nvidia-smi and see what it says"
NEEDS = {
    "building": ("cuda-tile", "compiler", "cache"),
    "measuring": ("cuda-tile", "compiler", "cache", "driver", "gpu", "arch", "cupy", "database"),
    "serving": ("cuda-tile", "compiler", "driver", "gpu", "arch", "torch"),
    "reports": ("database",),
}
"""The checks that each part of the program depends on."""


class Finding(NamedTuple):
    """What one check found."""

    status: str
    """ok, warn, missing or broken."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to install or do; empty where there is nothing to do."""
    name: str = ""
    """What was looked at, e.g. compiler."""

    @property
    def usable(self) -> bool:
        """Whether what was looked at can be used."""
        return self.status in ("ok", "warn")


@dataclass
class Machine:
    """What the checks look at. Tests put fakes in its fields."""

    database: str | None = None
    """The database that was named; None for that of the settings."""
    list_devices: Callable[[], Sequence[Device]] = nvml.devices
    """Lists the GPUs."""
    version: Callable[[str], str] = package_version
    """The version of an installed package; empty where it is not installed."""
    find_module: Callable[[str], Any] = importlib.util.find_spec
    """The spec of a module; None where it cannot be imported."""
    find_driver: Callable[[], str | None] = nvml.driver_version
    """The version of the driver; empty where it is not told, None where there is no driver."""
    cupy_devices: Callable[[], tuple[int, str]] = lambda: cupy_devices()
    """How many GPUs CuPy sees, and its last words where it fails."""
    torch_cuda: Callable[[Path], str | None] = lambda folder: torch_cuda(folder)
    """The CUDA version that torch was built for."""
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    """Free space where a folder is."""

    @cached_property
    def devices(self) -> Sequence[Device]:
        """The GPUs."""
        return self.list_devices()

    @cached_property
    def settings(self) -> Settings:
        """The settings, or the defaults where they are wrong, which is a finding of its own."""
        try:
            return load_settings({"db": self.database})
        except ConfigError:
            return Settings()

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers from which entries are served, the lowest first."""
        from tiledsched.serve.entries import layers

        return layers(self.settings)

    @cached_property
    def driver(self) -> str | None:
        """The driver's version: empty where there is a driver that does not tell it, None where there is no driver."""
        return next((device.driver for device in self.devices if device.driver), None) or self.find_driver()


def examine(machine: Machine | None = None) -> list[Finding]:
    """Every check's finding, in a fixed order. It takes a few seconds and changes nothing."""
    machine, findings = machine or Machine(), []
    for name, check in CHECKS.items():
        try:
            found = check(machine)
        except TiledschedError as error:
            found = Finding("broken", *_split(error))
        except Exception as error:
            found = Finding(
                "broken",
                f"the check itself failed: {type(error).__name__}: {error}",
                "report this, with the output of `tiledsched doctor --json`",
            )
        findings.append(found._replace(name=name))
    return findings


def overall(findings: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """For building, measuring, serving and reports: whether it `works` here, and as `detail` for what, or what it lacks."""
    found, parts = {finding.name: finding for finding in findings}, {}
    details = {"building": found["targets"].detail, "reports": "with charts"}
    if not found["vl-convert"].usable:
        details["reports"] = "without charts: vl-convert-python is not installed"
    for name, needs in NEEDS.items():
        lacking = [need for need in needs if not found[need].usable]
        detail = f"needs {', '.join(lacking)}" if lacking else details.get(name, f"on {found['gpu'].detail}")
        parts[name] = {"works": not lacking, "detail": detail}
    return parts


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """A plain dict: `tiledsched`, `findings` and `overall`."""
    return {
        "tiledsched": __version__,
        "findings": [finding._asdict() for finding in findings],
        "overall": overall(findings),
    }


# The checks


def _python(machine: Machine) -> Finding:
    return Finding("ok", ".".join(map(str, sys.version_info[:3])))


def _settings(machine: Machine) -> Finding:
    sources = sorted(load_settings({"db": machine.database}).sources.items())
    return Finding("ok", ", ".join(f"{name} from {where}" for name, where in sources) or "all at their defaults")


def _cuda_tile(machine: Machine) -> Finding:
    version = machine.version("cuda-tile")
    if not version:
        return Finding("missing", "not installed", CUDA_TILE)
    if not (1, 7) <= _numbers(version) < (2,):
        return Finding("broken", f"{version} is installed; 1.7 or newer, below 2, is needed", CUDA_TILE)
    return Finding("ok", version)


def _compiler(machine: Machine) -> Finding:
    folder = toolchain.compiler_folder()
    if folder is None:
        return Finding("missing", "tileiras is neither in a wheel nor on PATH", toolchain.INSTALL)
    tileiras = toolchain.tool_version(folder / "tileiras") or "that does not run"
    ptxas = toolchain.tool_version(folder / "ptxas")
    nvvm = machine.version("nvidia-nvvm") or "of unknown version"
    parts = f"tileiras {tileiras}, ptxas {ptxas or 'not found'}, nvvm {nvvm} in {folder}"
    try:
        toolchain.installed_toolchain()
    except CompilerError as error:
        what, remedy = _split(error)
        return Finding("broken", f"{parts}: {what}", remedy)
    if not ptxas:
        return Finding("broken", f"{parts}: tileiras needs ptxas in the same folder", toolchain.INSTALL)
    return Finding("ok", parts)


def _targets(machine: Machine) -> Finding:
    try:
        installed = toolchain.installed_toolchain()
    except CompilerError:
        return Finding("missing", "none without a working compiler")
    oldest = {arch: toolchain.OLDEST.get(arch, toolchain.OLDEST_ANY) for arch in ARCHS}
    old = [arch for arch in ARCHS if toolchain.release(installed.tileiras) < oldest[arch]]
    good = [arch for arch in ARCHS if arch not in old]
    detail = f"for {', '.join(good) or 'no arch'} on {host_code.host_arch()} hosts"
    if not old:
        return Finding("ok", detail)
    detail += f"; tileiras {installed.tileiras} is too old for {', '.join(old)}"
    return Finding("warn" if good else "broken", detail, toolchain.INSTALL)


def _environment(machine: Machine) -> Finding:
    known = compiler.MISLEADING_VARIABLES
    values = {name: os.environ[name] for name in known if os.environ.get(name)}
    if not values:
        return Finding("ok", f"neither {' nor '.join(known)} is set")
    detail = ", ".join(f"{name}={value}" for name, value in values.items())
    detail += ": tuning clears this for the compiler, but a program that calls sdpa does not"
    return Finding("warn", detail, f"where sdpa's kernels fail to compile: unset {' '.join(values)}")


def _driver(machine: Machine) -> Finding:
    version, update = machine.driver, f"install NVIDIA driver {OLDEST_DRIVER} or newer"
    if version is None:
        remedy = f"{update} to measure and serve; building and reports need none"
        return Finding("missing", "no NVIDIA driver here", remedy)
    if not version:
        return Finding("warn", "there is a driver, but its version cannot be read", NVIDIA_SMI)
    if _numbers(version)[0] < OLDEST_DRIVER:
        return Finding("broken", f"{version} is too old for CUDA 13", update)
    return Finding("ok", version)


def _gpu(machine: Machine) -> Finding:
    if machine.devices:
        # A GPU that shares the host's memory has none of its own.
        memory = {one: f", {one.memory_bytes / 2**30:.0f} GiB" * bool(one.memory_bytes) for one in machine.devices}
        kinds = Counter(f"{one.name} ({one.arch}{memory[one]})" for one in machine.devices)
        return Finding("ok", ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()))
    if machine.driver is None:
        return Finding("missing", "none: there is no NVIDIA driver")
    if machine.find_module("pynvml") is None:
        return Finding(
            "missing", "there is a driver, but the package that asks it is not installed", "pip install nvidia-ml-py"
        )
    remedy = f"{NVIDIA_SMI}; a container must be started with its GPUs"
    return Finding("broken", "there is a driver, but NVML lists no GPU that can compute", remedy)


def _arch(machine: Machine) -> Finding:
    archs = sorted({device.arch for device in machine.devices})
    if not archs:
        return Finding("missing", "there is no GPU")
    for arch in archs:
        arch_spec(arch)  # both raise where something is wrong, which becomes the finding
        toolchain.check_arch(toolchain.installed_toolchain(), arch)
    return Finding("ok", "; ".join(f"{arch}: known, and the compiler builds for it" for arch in archs))


def _cupy(machine: Machine) -> Finding:
    found = [name for name in CUPY_PACKAGES if machine.version(name)]
    if not found or machine.find_module("cupy") is None:
        return Finding("missing", "not installed; measuring needs it", installing("gpu"))
    detail = ", ".join(f"{name} {machine.version(name)}" for name in found)
    again = f"pip uninstall {' '.join(found)}, then {installing('gpu')}"
    if len(found) > 1:
        return Finding("broken", f"{detail}: they overwrite each other", again)
    if machine.driver is None:
        return Finding("ok", f"{detail}; no GPU to try it on")
    try:
        count, error = machine.cupy_devices()
    except subprocess.TimeoutExpired:
        why = f"{detail} gave no answer within {PROBE_TIMEOUT_S} s"
        return Finding("broken", why, "run nvidia-smi: the GPU or its driver may hang")
    if not count:
        remedy = f"check CUDA_VISIBLE_DEVICES and the driver, or reinstall: {installing('gpu')}"
        return Finding("broken", f"{detail} sees no GPU: {error or 'it counts none'}", remedy)
    detail += f" sees {plural(count, 'GPU', 'GPUs')}"
    if found[0] not in ("cupy-cuda13x", "cupy"):
        return Finding("warn", f"{detail}, but is not built for CUDA 13", f"if measuring fails: {again}")
    return Finding("ok", detail)


def cupy_devices() -> tuple[int, str]:
    """How many GPUs CuPy sees, and its last words where it fails. It is asked in another process."""
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run(
        [sys.executable, "-c", f"{SAFE_PATH}; {code}"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
    )
    if done.returncode == 0 and done.stdout.strip().isdigit():
        return int(done.stdout), ""
    return 0, (done.stderr.strip().splitlines() or [""])[-1]


def _torch(machine: Machine) -> Finding:
    version = machine.version("torch")
    spec = machine.find_module("torch") if version else None
    if spec is None:
        return Finding("missing", "not installed; serving (sdpa) needs it", installing("gpu"))
    if _numbers(version) < OLDEST_TORCH:
        return Finding("broken", f"{version} is installed; 2.9 or newer is needed", installing("gpu"))
    cuda = machine.torch_cuda(Path(spec.origin or "").parent)
    if cuda is None:
        return Finding("warn", f"{version}; whether it is a CUDA build cannot be read")
    if not cuda:
        status = "missing" if machine.driver is None else "broken"
        return Finding(status, f"{version} is a build without CUDA; serving (sdpa) needs it", CUDA_TORCH)
    if _numbers(cuda)[0] < 13:
        return Finding("warn", f"{version} is built for CUDA {cuda}, not 13", CUDA_TORCH)
    return Finding("ok", f"{version}, built for CUDA {cuda}")


def torch_cuda(folder: Path) -> str | None:
    """The CUDA version that torch was built for, from its own file: empty for none, None where it cannot be read."""
    try:
        return runpy.run_path(str(folder / "version.py"))["cuda"] or ""
    except (OSError, KeyError):
        return None


def _interpreter(machine: Machine) -> Finding:
    try:
        from tiledsched.interpreter.private import load_dispatch_mode

        load_dispatch_mode()
    except ImportError as error:
        return Finding("missing", f"cannot be imported: {error}", CUDA_TILE)
    except CompilerError as error:
        return Finding("broken", str(error), f"{CUDA_TILE}, or a newer tiledsched")
    return Finding("ok", f"runs kernels on the CPU with cuda-tile {machine.version('cuda-tile')}")


def _vl_convert(machine: Machine) -> Finding:
    version = machine.version("vl-convert-python")
    if not version or machine.find_module("vl_convert") is None:
        return Finding("missing", "not installed; without it reports have tables and no charts", installing("report"))
    return Finding("ok", version)


def _database(machine: Machine) -> Finding:
    from tiledsched.store.db import TuningDB
    from tiledsched.store.engine import resolve_url
    from tiledsched.store.location import database_exists

    url = resolve_url(machine.settings.db)
    if url.database and not database_exists(machine.settings.db):
        return Finding("ok", f"{url.database}: will be created")
    with TuningDB.open(machine.settings.db, read_only=True) as db:
        counts = Counter(entry.provenance for entry in db.entries())
        where = url.database if url.get_backend_name() == "sqlite" else db.url
        detail = f"{where}: schema {db.schema_revision}, {plural(counts.total(), 'entry', 'entries')}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return Finding("ok", f"{detail} ({kinds})" if kinds else detail)


def _layers(machine: Machine) -> Finding:
    """Where entries are served from, the uppermost layer first."""
    detail = "; ".join(
        f"{layer.name} ({layer.where}): {plural(len(layer.entries), 'entry', 'entries')}"
        for layer in reversed(machine.layers)
    )
    wrong = "; ".join(layer.error for layer in machine.layers if layer.error)
    if not wrong:
        return Finding("ok", detail)
    what, _, remedy = wrong.rpartition("; ")
    return Finding("warn", f"{detail}; left out: {what}", remedy)


def _evidence(machine: Machine) -> Finding:
    """With which compilers the entries of the GPUs here, or where there is none of all GPUs, were measured."""
    from tiledsched.serve.entries import combined
    from tiledsched.store.evidence import for_compiler, stale_by_cause

    names, here = {device.name for device in machine.devices}, toolchain.compiler_at_hand()
    measured = [
        entry
        for entry in combined(machine.layers)
        if entry.provenance == "measured" and (not names or entry.device_name in names)
    ]
    where = f" on {', '.join(sorted(names))}" if names else ""
    if not measured:
        return Finding("ok", f"nothing was measured{where}")
    counts = Counter(entry.compiler or "unknown" for entry in measured)
    by_compiler = ", ".join(f"{count} with tileiras {version}" for version, count in sorted(counts.items()))
    detail = f"{plural(counts.total(), 'entry', 'entries')} measured{where}: {by_compiler}"
    changed, old = stale_by_cause(for_compiler(measured, here), here)
    remedies = []
    if changed:
        kernels = ", ".join(sorted({entry.kernel for entry in changed}))
        detail += f"; {len(changed)} are stale: the source of {kernels} has changed since"
        remedies.append("tune them again, or run: tiledsched refresh KERNEL")
    if old:
        detail += f"; {len(old)} are stale: the compiler here is tileiras {here}"
        release = max(".".join(entry.compiler.split(".")[:2]) for entry in old)
        install = " ".join(["pip install", *(f"'{part}=={release}.*'" for part in toolchain.PARTS)])
        remedies.append(
            f"tiledsched refresh {min(entry.kernel for entry in old)}, or install the compiler they were measured with: {install}"
        )
    return Finding("warn" if remedies else "ok", detail, "; ".join(remedies))


def _cache(machine: Machine) -> Finding:
    cache = machine.settings.cache
    folder = Path(os.path.abspath(os.path.expanduser(cache) if cache else store.default_cache_folder()))
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("broken", f"{folder} cannot be written", "name another folder with TILEDSCHED_CACHE")
    free = machine.free_bytes(existing)
    sizes = [path.stat().st_size for path in folder.rglob("*") if os.path.isfile(path)]
    what = f"{plural(len(sizes), 'file', 'files')}, {decimal(sum(sizes))}" if existing == folder else "will be created"
    detail = f"{folder}: {what}; {decimal(free)} free"
    if free >= LITTLE_SPACE:
        return Finding("ok", detail)
    remedy = "free some space, or name another folder with TILEDSCHED_CACHE"
    return Finding("warn" if free >= TOO_LITTLE_SPACE else "broken", detail, remedy)


CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": _python,
    "settings": _settings,
    "cuda-tile": _cuda_tile,
    "compiler": _compiler,
    "targets": _targets,
    "environment": _environment,
    "driver": _driver,
    "gpu": _gpu,
    "arch": _arch,
    "cupy": _cupy,
    "torch": _torch,
    "interpreter": _interpreter,
    "vl-convert": _vl_convert,
    "database": _database,
    "layers": _layers,
    "evidence": _evidence,
    "cache": _cache,
}
"""The checks by the names of their findings, in the order in which findings are printed."""


def _split(error: TiledschedError) -> tuple[str, str]:
    """What is wrong, and what to do: our messages end with the latter, after a semicolon."""
    what, _, remedy = str(error).rpartition("; ")
    return (what, remedy.removeprefix("run: ")) if what else (remedy, "")


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 11, 0) for 2.11.0+cu130."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
