"""What works on this machine, and what to install for what does not.

Every check stands alone: one that crashes becomes a finding of its own and hides no other. Neither torch nor CuPy is
imported here; CuPy is asked in a process of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiledsched import __version__
from tiledsched.build import toolchain
from tiledsched.build.artifacts import default_cache_folder
from tiledsched.build.compiler import MISLEADING_VARIABLES
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, TiledschedError
from tiledsched.core.extras import installing, package_version
from tiledsched.measure import nvml

if TYPE_CHECKING:
    from tiledsched.serve.entries import Layer
    from tiledsched.store.records import Entry, Place

SCHEMA_VERSION = 1
OLDEST_PYTHON = (3, 10)
OLDEST_DRIVER = 580
"""First driver branch that runs programs of CUDA 13."""
OLDEST_TORCH = (2, 9)
PROBE_TIMEOUT_S = 20
LITTLE_SPACE = 1 << 30
TOO_LITTLE_SPACE = 100 << 20
DRIVER_FILE = Path("/proc/driver/nvidia/version")
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
CUDA_TORCH = "install a CUDA 13 build of torch: https://pytorch.org/get-started"
COLOURS = {"ok": "32", "warn": "33", "missing": "36", "broken": "31"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    """What was looked at, e.g. compiler."""
    status: str
    """ok, warn (works, but read on), missing (not installed or not there) or broken."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to install or do; empty where there is nothing to do."""

    @property
    def usable(self) -> bool:
        """Whether what was looked at can be used."""
        return self.status in ("ok", "warn")


class Verdict(NamedTuple):
    """What a check returns: a finding without its name."""

    status: str
    """As in Finding."""
    detail: str
    """As in Finding."""
    remedy: str = ""
    """As in Finding."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Whether one part of the program works here."""

    name: str
    """building, measuring, serving or reports."""
    works: bool
    """Whether it does."""
    detail: str
    """For what, or what it lacks."""


NEEDS = {
    "building": ("python", "cuda-tile", "compiler", "cache"),
    "measuring": ("python", "cuda-tile", "compiler", "cache", "driver", "gpu", "arch", "cupy", "database"),
    "serving": ("python", "cuda-tile", "compiler", "driver", "gpu", "arch", "torch"),
    "reports": ("python", "database"),
}
"""The checks each part depends on."""


def examine() -> list[Finding]:
    """Every check's finding, in a fixed order. Takes a few seconds and changes nothing."""
    _found_layers.cache_clear()
    findings = []
    for name, check in CHECKS.items():
        try:
            verdict = check()
        except TiledschedError as error:
            verdict = _of_error(error)
        except Exception as error:
            verdict = Verdict(
                "broken",
                f"the check itself failed: {type(error).__name__}: {error}",
                "report this, with the output of `tiledsched doctor --json`",
            )
        findings.append(Finding(name=name, status=verdict.status, detail=verdict.detail, remedy=verdict.remedy))
    return findings


def overall(findings: Sequence[Finding]) -> list[Capability]:
    """What works here: building, measuring, serving and reports."""
    found = {finding.name: finding for finding in findings}
    capabilities = []
    for name, needs in NEEDS.items():
        lacking = [need for need in needs if need in found and not found[need].usable]
        detail = f"needs {', '.join(lacking)}" if lacking else _what_works(name, found)
        capabilities.append(Capability(name=name, works=not lacking, detail=detail))
    return capabilities


def _what_works(name: str, found: dict[str, Finding]) -> str:
    if name == "building" and "targets" in found:
        return found["targets"].detail
    if name in ("measuring", "serving") and "gpu" in found:
        return f"on {found['gpu'].detail}"
    if name == "reports" and "vl-convert" in found:
        return "with charts" if found["vl-convert"].usable else "without charts: vl-convert-python is not installed"
    return ""


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """A plain dict: `schema_version`, `tiledsched`, `findings` and `overall`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tiledsched": __version__,
        "findings": [asdict(finding) for finding in findings],
        "overall": {
            capability.name: {"works": capability.works, "detail": capability.detail}
            for capability in overall(findings)
        },
    }


def to_text(findings: Sequence[Finding], *, colour: bool | None = None) -> str:
    """Aligned lines for people. Coloured on a terminal unless NO_COLOR is set; `colour` overrules both."""
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        status = f"{finding.status:<7}"
        shown = f"\033[{COLOURS[finding.status]}m{status}\033[0m" if colour else status
        lines.append(f"{shown}  {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':7}  {'':{width}}  -> {finding.remedy}")
    lines.append("")
    for capability in overall(findings):
        detail = f" ({capability.detail})" if capability.detail else ""
        lines.append(f"{capability.name + ':':<11} {'yes' if capability.works else 'no'}{detail}")
    return "\n".join(lines)


# The checks


def _python() -> Verdict:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Verdict("ok", version)
    return Verdict("broken", f"{version} is too old", "use Python 3.10 or newer")


def _settings_check() -> Verdict:
    try:
        settings = load_settings()
    except ConfigError as error:
        return _of_error(error)
    changed = [f"{name} from {where}" for name, where in sorted(settings.sources.items())]
    return Verdict("ok", ", ".join(changed) or "all at their defaults")


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:
        return Settings()


def _cuda_tile() -> Verdict:
    version = package_version("cuda-tile")
    install = "pip install 'cuda-tile>=1.7,<2'"
    if not version:
        return Verdict("missing", "not installed", install)
    if not (1, 7) <= _numbers(version) < (2,):
        return Verdict("broken", f"{version}; 1.7 or newer, below 2, is needed", install)
    return Verdict("ok", version)


def _compiler() -> Verdict:
    folder = toolchain.compiler_folder()
    if folder is None:
        return Verdict("missing", "tileiras is neither in a wheel nor on PATH", toolchain.INSTALL)
    parts = f"tileiras {toolchain.tool_version(folder / 'tileiras') or 'that does not run'}, ptxas "
    parts += f"{toolchain.tool_version(folder / 'ptxas') or 'not found'}, nvvm "
    parts += package_version("nvidia-nvvm") or "of unknown version"
    try:
        toolchain.installed_toolchain()
    except CompilerError as error:
        what, remedy = _split(error)
        return Verdict("broken", f"{parts} in {folder}: {what}", remedy)
    if "not found" in parts:
        return Verdict("broken", f"{parts} in {folder}: tileiras needs the ptxas beside it", toolchain.INSTALL)
    return Verdict("ok", f"{parts} in {folder}")


def _targets() -> Verdict:
    try:
        installed = toolchain.installed_toolchain()
    except CompilerError:
        return Verdict("missing", "none without a working compiler")
    archs = list(ARCHS)
    good = [arch for arch in archs if _can_build(installed, arch)]
    old = [arch for arch in archs if arch not in good]
    detail = f"for {', '.join(good) or 'no arch'}"
    if not old:
        return Verdict("ok", detail)
    return Verdict(
        "warn" if good else "broken",
        f"{detail}; tileiras {installed.tileiras} is too old for {', '.join(old)}",
        toolchain.INSTALL,
    )


def _environment() -> Verdict:
    found = [f"{name}={os.environ[name]}" for name in MISLEADING_VARIABLES if os.environ.get(name)]
    if not found:
        return Verdict("ok", f"neither {' nor '.join(MISLEADING_VARIABLES)} is set")
    detail = f"{', '.join(found)}: cleared for the compiler when tuning, but not in a program that calls sdpa"
    names = " ".join(entry.partition("=")[0] for entry in found)
    return Verdict("warn", detail, f"where sdpa's kernels fail to compile: unset {names}")


def _driver_version() -> str | None:
    """The driver's version; empty where there is a driver that does not tell; None where there is none."""
    for device in nvml.devices():
        if device.driver:
            return device.driver
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", DRIVER_FILE.read_text())
        return found.group(1) if found else ""
    except OSError:
        return "" if shutil.which("nvidia-smi") else None


def _driver() -> Verdict:
    version = _driver_version()
    update = f"install NVIDIA driver {OLDEST_DRIVER} or newer"
    if version is None:
        return Verdict(
            "missing", "no NVIDIA driver here", f"{update} to measure and serve; building and reports need none"
        )
    if not version:
        return Verdict("warn", "there is one, but its version cannot be read", "run nvidia-smi and see what it says")
    if _numbers(version)[0] < OLDEST_DRIVER:
        return Verdict("broken", f"{version} is too old for CUDA 13", update)
    return Verdict("ok", version)


def _gpu() -> Verdict:
    devices = nvml.devices()
    if devices:
        kinds = Counter(f"{one.name} ({one.arch}, {one.memory_bytes / 2**30:.0f} GiB)" for one in devices)
        detail = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())
        return Verdict("ok", detail)
    if _driver_version() is None:
        return Verdict("missing", "none: there is no NVIDIA driver")
    if importlib.util.find_spec("pynvml") is None:
        return Verdict(
            "missing", "there is a driver, but nothing here can ask it (NVML binding)", "pip install nvidia-ml-py"
        )
    return Verdict(
        "broken",
        "there is a driver, but NVML lists no GPU",
        "run nvidia-smi and see what it says; a container must be started with its GPUs",
    )


def _arch() -> Verdict:
    archs = sorted({device.arch for device in nvml.devices()})
    if not archs:
        return Verdict("missing", "no GPU to know it from")
    notes, status, remedy = [], "ok", ""
    for arch in archs:
        try:
            arch_spec(arch)
            toolchain.check_arch(toolchain.installed_toolchain(), arch)
            notes.append(f"{arch}: known, and the compiler builds for it")
        except TiledschedError as error:
            what, remedy = _split(error)
            notes.append(what)
            status = "broken"
    return Verdict(status, "; ".join(notes), remedy)


def _cupy() -> Verdict:
    installed = {name: package_version(name) for name in CUPY_PACKAGES}
    found = [f"{name} {version}" for name, version in installed.items() if version]
    if not found or importlib.util.find_spec("cupy") is None:
        return Verdict("missing", "not installed; measuring needs it", installing("gpu"))
    detail = ", ".join(found)
    if len(found) > 1:
        return Verdict(
            "broken",
            f"{detail}: they overwrite each other",
            f"pip uninstall {' '.join(name for name in installed if installed[name])}, then {installing('gpu')}",
        )
    if _driver_version() is None:
        return Verdict("ok", f"{detail}; no GPU to try it on")
    try:
        count, said = _cupy_devices()
    except subprocess.TimeoutExpired:
        return Verdict(
            "broken",
            f"{detail} gave no answer within {PROBE_TIMEOUT_S} s",
            "run nvidia-smi: the GPU or its driver may hang",
        )
    if not count:
        return Verdict(
            "broken",
            f"{detail} sees no GPU: {said or 'it counts none'}",
            f"check CUDA_VISIBLE_DEVICES and the driver, or reinstall: {installing('gpu')}",
        )
    detail += f" sees {count} GPU{'s' if count > 1 else ''}"
    if not installed["cupy-cuda13x"] and not installed["cupy"]:
        return Verdict(
            "warn",
            f"{detail}, but is not built for CUDA 13",
            f"if measuring fails: pip uninstall {found[0].split()[0]}, then {installing('gpu')}",
        )
    return Verdict("ok", detail)


def _cupy_devices() -> tuple[int, str]:
    """GPUs that CuPy sees, asked in another process, and its last words where it fails."""
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    if done.returncode == 0 and done.stdout.strip().isdigit():
        return int(done.stdout), ""
    return 0, (done.stderr.strip().splitlines() or [""])[-1]


def _torch() -> Verdict:
    version = package_version("torch")
    spec = importlib.util.find_spec("torch") if version else None
    if spec is None:
        return Verdict("missing", "not installed; serving (sdpa) needs it", installing("gpu"))
    if _numbers(version) < OLDEST_TORCH:
        return Verdict("broken", f"{version}; 2.9 or newer is needed", installing("gpu"))
    cuda = _torch_cuda([Path(folder) for folder in spec.submodule_search_locations or []])
    if cuda is None:
        return Verdict("warn", f"{version}, but whether it is a CUDA build is not known")
    if not cuda:
        return Verdict("broken", f"{version} is a build without CUDA", CUDA_TORCH)
    if _numbers(cuda)[0] < 13:
        return Verdict("warn", f"{version} is built for CUDA {cuda}, not 13", CUDA_TORCH)
    return Verdict("ok", f"{version}, built for CUDA {cuda}")


def _torch_cuda(folders: Sequence[Path]) -> str | None:
    """CUDA version torch was built for, from its own version file: empty for none, None where it cannot be read."""
    for folder in folders:
        try:
            text = (folder / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"^cuda\b[^=]*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", text, re.MULTILINE)
        if found:
            return found.group(1) or found.group(2) or ""
    return None


def _interpreter() -> Verdict:
    try:
        from tiledsched.interpreter.private import load_dispatch_mode

        load_dispatch_mode()
    except ImportError as error:
        return Verdict("missing", f"cannot be imported: {error}", "pip install 'cuda-tile>=1.7,<2'")
    except CompilerError as error:
        return Verdict("broken", str(error), "pip install 'cuda-tile>=1.7,<2', or a newer tiledsched")
    version = package_version("cuda-tile")
    return Verdict("ok", f"runs kernels on the CPU with cuda-tile {version}")


def _vl_convert() -> Verdict:
    version = package_version("vl-convert-python")
    if not version or importlib.util.find_spec("vl_convert") is None:
        return Verdict("missing", "not installed; reports then hold tables, no charts", installing("report"))
    return Verdict("ok", version)


def _database() -> Verdict:
    from tiledsched.store.db import TuningDB
    from tiledsched.store.engine import resolve_url
    from tiledsched.store.location import database_exists

    try:
        url = resolve_url(_settings().db)
        if url.database and not database_exists(_settings().db):
            return Verdict("ok", f"{url.database}: will be created")
        with TuningDB.open(_settings().db, read_only=True) as db:
            counts = Counter(entry.provenance for entry in db.entries())
            revision, where = db.schema_revision, url.database if url.get_backend_name() == "sqlite" else db.url
    except TiledschedError as error:
        return _of_error(error)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    detail = f"{where}: schema {revision}, {_plural(counts.total(), 'entry', 'entries')}" + (
        f" ({kinds})" if kinds else ""
    )
    return Verdict("ok", detail)


@functools.cache
def _found_layers() -> list[Layer]:
    """What is served from where, read once for an examination."""
    from tiledsched.serve.entries import layers

    return layers(_settings())


def _layers() -> Verdict:
    """Where entries are served from, the uppermost first."""
    try:
        found = _found_layers()
    except TiledschedError as error:
        return _of_error(error)
    detail = "; ".join(
        f"{layer.name} ({layer.where}): {_plural(len(layer.entries), 'entry', 'entries')}" for layer in reversed(found)
    )
    wrong = "; ".join(layer.error for layer in found if layer.error)
    if not wrong:
        return Verdict("ok", detail)
    what, _, remedy = wrong.rpartition("; ")
    return Verdict("warn", f"{detail}; left out: {what}", remedy)


def _evidence() -> Verdict:
    """What was measured on the GPUs here, or on any where there is none, against the compiler here."""
    from tiledsched.serve.entries import combined
    from tiledsched.store.evidence import for_compiler, stale

    names = {device.name for device in nvml.devices()}
    here = toolchain.compiler_at_hand()
    try:
        entries = combined(_found_layers())
    except TiledschedError as error:
        return _of_error(error)
    measured = [
        entry for entry in entries if entry.provenance == "measured" and (not names or entry.device_name in names)
    ]
    where = f" on {', '.join(sorted(names))}" if names else ""
    if not measured:
        return Verdict("ok", f"nothing was measured{where}")
    counts = Counter(entry.compiler for entry in measured)
    detail = f"{_plural(counts.total(), 'entry', 'entries')} measured{where}: " + ", ".join(
        f"{count} with tileiras {version or 'unknown'}" for version, count in sorted(counts.items())
    )
    detail += "".join(f"; {line}" for line in _faster(measured))
    old = [entry for entry in for_compiler(measured, here) if stale(entry, here)]
    if not old:
        return Verdict("ok", detail)
    releases = sorted({".".join(entry.compiler.split(".")[:2]) for entry in old})
    kernels = sorted({entry.kernel for entry in old})
    return Verdict(
        "warn",
        f"{detail}; {len(old)} are stale, tileiras here is {here}",
        f"tiledsched refresh {kernels[0]}, or install the compiler they were measured with: "
        + " ".join(["pip install", *(f"'{part}=={releases[-1]}.*'" for part in toolchain.PARTS)]),
    )


def _faster(measured: Sequence[Entry]) -> Iterator[str]:
    """For each two compilers that the same problems were measured with, which is faster and by how much."""
    times: dict[str, dict[Place, float]] = defaultdict(dict)
    for entry in measured:
        if entry.median_us:
            times[entry.compiler][entry.place] = entry.median_us
    for one, other in itertools.combinations(sorted(times), 2):
        both = times[one].keys() & times[other].keys()
        if both:
            logs = [math.log(times[other][place] / times[one][place]) for place in both]
            ratio = math.exp(math.fsum(logs) / len(logs))
            quick, by = (one, ratio) if ratio >= 1 else (other, 1 / ratio)
            yield (
                f"{quick} is {by - 1:.1%} faster than {other if quick == one else one} by geometric mean over "
                f"{_plural(len(both), 'problem', 'problems')}"
            )


def _cache_folder() -> Path:
    cache = _settings().cache
    return Path(cache).expanduser() if cache else default_cache_folder()


def _cache() -> Verdict:
    folder = _cache_folder()
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Verdict("broken", f"{folder} cannot be written", "name another folder with TILEDSCHED_CACHE")
    if existing != folder:
        return Verdict("ok", f"{folder}: will be created")
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Verdict("ok", f"{folder}: {_plural(len(sizes), 'file', 'files')}, {_size(sum(sizes))}")


def _disk() -> Verdict:
    folder = _existing(_cache_folder())
    free = shutil.disk_usage(folder).free
    detail = f"{_size(free)} free for the cache"
    if free >= LITTLE_SPACE:
        return Verdict("ok", detail)
    return Verdict(
        "warn" if free >= TOO_LITTLE_SPACE else "broken",
        detail,
        "free some space, or name another folder with TILEDSCHED_CACHE",
    )


CHECKS: dict[str, Callable[[], Verdict]] = {
    "python": _python,
    "settings": _settings_check,
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
    "disk": _disk,
}
"""By the name of the finding."""


def _can_build(installed: toolchain.Toolchain, arch: str) -> bool:
    try:
        toolchain.check_arch(installed, arch)
    except CompilerError:
        return False
    return True


def _of_error(error: TiledschedError) -> Verdict:
    what, remedy = _split(error)
    return Verdict("broken", what, remedy)


def _split(error: TiledschedError) -> tuple[str, str]:
    """What is wrong and what to do: our messages end with the latter, after a semicolon."""
    what, _, remedy = str(error).rpartition("; ")
    return (what, remedy.removeprefix("run: ")) if what else (remedy, "")


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 11, 0) from 2.11.0+cu130."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
