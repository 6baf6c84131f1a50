"""What ships with the package is sound: tables, landscapes, links in the documentation, and the manifest."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import shutil
import statistics
from functools import lru_cache
from pathlib import Path

import pytest

from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.errors import DatabaseError
from tiledsched.core.launches import steps
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_entries
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import loss_bands
from tiledsched.store import exchange, manifest, shipped
from tiledsched.store.manifest import published_figures
from tiledsched.store.shipped import copy_path, read_shipped_entries, write_copy

ROOT = Path(__file__).parent.parent
read_table = lru_cache(exchange.read_table)
"""Three tests read each table."""
TABLES = sorted((data_files.tuning_db() / "tables").glob("*/*.json"))
BLACKWELL = [path for path in TABLES if int(path.stem.removeprefix("sm_")) >= 100]
LANDSCAPES = sorted((data_files.tuning_db() / "landscapes" / "attention").glob("*.json.xz"))
DOCS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_table_is_valid_and_served(path) -> None:
    table = read_table(path)
    assert table.entries
    assert read_shipped_entries(path) == [entry.replace(layer="shipped") for entry in table.entries]
    kernel = kernel_named(path.parent.name)
    assert {entry.kernel for entry in table.entries} == {kernel.name}
    assert copy_path(path).read_text() == write_copy(table.entries, layer="shipped")
    space = space_for(path.stem, kernel)
    compilers = {entry.compiler for entry in table.entries}
    lookups = {compiler: LookupTable(table.entries, kernel, compiler=compiler) for compiler in compilers}
    for entry in table.entries:
        assert entry.arch == path.stem
        assert space.unworkable(space.complete(entry.schedule), entry.problem) == []
        served = lookups[entry.compiler].resolve(entry.problem, entry.arch, entry.device_name)
        assert (served.provenance, served.stale) == (entry.provenance, "")
        assert served.schedule == space.complete(entry.schedule)
        if entry.provenance == "measured":
            assert entry.measurement.samples >= 8
            assert entry.measurement.ci_high_us - entry.measurement.ci_low_us < 0.03 * entry.measurement.median_us
            limit = kernel.tolerance(entry.problem, entry.schedule).relative
            fast = getattr(entry.problem, "fast_accum", False)  # of 8-bit floats, whose sums keep fewer bits
            rounded = (
                1e-2 if kernel.name == "attention_backward" else 4e-3
            )  # whose products take probabilities of 16 bits
            assert entry.measurement.accuracy.worst_tile_error < (limit if fast else rounded)


@pytest.mark.parametrize("path", BLACKWELL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_the_model_chose_for_blackwell_spills_no_registers_and_has_a_next_choice(path) -> None:
    table, kernel = read_table(path), kernel_named(path.parent.name)
    facts = {each.fingerprint: each.facts for each in table.artifacts}
    lookup = LookupTable(table.entries, kernel)
    for entry in table.entries:
        assert entry.provenance == "modelled"
        assert not spilled(facts[entry.fingerprint].spill_bytes)
        # Of the two passes tried with 128 columns one alone does not spill on sm_120 and sm_121.
        alone = kernel.name == "attention_backward" and entry.problem.deterministic and entry.problem.head_dim == 128
        assert alone or lookup.resolve(entry.problem, entry.arch).alternatives


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_shipped_machine_code_is_lost(path) -> None:
    """The programs served before a change of the code are served after it, whatever their schedules are called."""
    before = json.loads((ROOT / "tests" / "data" / "shipped_fingerprints.json").read_text())
    served = {str(entry.fingerprint)[:8] for entry in read_table(path).entries}
    assert set(before[f"{path.parent.name}/{path.stem}"].split()) <= served


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention/sm_90", "attention/sm_121", "matmul/sm_90", "rms_norm/sm_90"])
def test_shipped_machine_code_is_made_again(name) -> None:
    """For each tile function that the table runs, the smallest program that this compiler built is built again."""
    from tiledsched.build.compiler import compile_schedule, prepare_process

    prepare_process()
    table = read_table(data_files.tuning_db() / "tables" / f"{name}.json")
    sizes = {each.fingerprint: each.facts.code_bytes for each in table.artifacts}
    kernel, _, arch = name.partition("/")
    declared, device = kernel_named(kernel), arch_spec(arch)
    smallest: dict = {}
    for entry in sorted(table.entries, key=lambda each: sizes[each.fingerprint], reverse=True):
        if entry.toolchain.tileiras == installed_toolchain().tileiras:
            functions = tuple(step.function.__name__ for step in steps(declared, entry.problem, entry.schedule, device))
            smallest[functions] = entry
    for entry in smallest.values():
        built = compile_schedule(declared, entry.problem, entry.schedule, arch)
        assert built.fingerprint == entry.fingerprint, f"{entry.problem} with {entry.schedule.short()}"


@pytest.mark.parametrize("path", LANDSCAPES, ids=lambda path: path.name.split(".")[0])
def test_a_landscape_is_complete(path) -> None:
    table = read_table(path)
    first = table.measurements[0].measurement
    programs, checked, unchecked = set(), [], []
    for stored in table.measurements:
        m = stored.measurement
        assert (m.problem, m.device, m.regime, m.runner) == (first.problem, first.device, first.regime, "gpu")
        assert m.ci_low_us <= m.median_us <= m.ci_high_us
        assert m.samples_us
        if m.accuracy is None:  # hopeless, or out after the opening: never checked, and far from winning
            unchecked.append(m.median_us)
        else:
            checked.append(m.median_us)
            assert m.accuracy.repeatable
        programs.add((m.fingerprint, Attention.grids(m.problem, m.schedule, m.device)))
    assert len(programs) >= (250 if first.regime == "burst" else 24)
    assert min(unchecked, default=math.inf) > 1.02 * min(checked)
    assert {(stored.measurement.fingerprint) for stored in table.measurements} == {
        a.fingerprint for a in table.artifacts
    }


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
        if "://" not in target:
            page = path.parent / target if target else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are linked by."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("line", "file", "ours", "other"),
    [
        ("our attention kernel, untuned", "bench.csv", "tiledsched", "untuned"),
        ("torch's attention (cuDNN)", "flash4.csv", "tiledsched", "torch_cudnn"),
        ("FlashAttention-4", "flash4.csv", "tiledsched", "flash_attention_4"),
        ("attention's gradients: cuDNN", "backward.csv", "tiledsched", "torch_cudnn"),
        ("attention's gradients: FlashAttention-4", "backward.csv", "tiledsched", "flash_attention_4"),
        ("products of 8-bit floats", "products.csv", "scaled_matmul", None),
        ("products of groups", "products.csv", "grouped_matmul", None),
        ("RMSNorm, softmax", "norms.csv", "tiledsched", "torch_compile"),
        ("layer norm", "memory_kernels.csv", "tiledsched", "torch_compile"),
    ],
)
def test_the_figures_of_the_readme_are_the_recorded_ones(line, file, ours, other) -> None:
    rows = list(csv.DictReader((ROOT / "docs" / "results" / "h200" / file).open()))
    if other:
        times: dict = {}
        suite = [problem.to_json() for problem in Attention.suite("attention")]
        for row in rows:
            if row["regime"] == "burst" and (file != "bench.csv" or json.loads(row["problem"]) in suite):
                times.setdefault(row["problem"], {})[row["method"]] = float(row["median_us"])
        ratios = [each[other] / each[ours] for each in times.values() if other in each]
    else:
        ratios = [float(row["torch_us"]) / float(row["ours_us"]) for row in rows if row["kernel"] == ours]
    shown = f"{len(ratios)}|{statistics.geometric_mean(ratios):.2f}x|{sum(ratio < 1 for ratio in ratios)}|"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\|{re.escape(line)}[^|]*\|{re.escape(shown)}", text, re.MULTILINE), shown
    assert file != "bench.csv" or f"takes {shown.split('|')[1][:-1]} times as long" in text


# The manifest: what ships is what was shipped


TABLE = "tables/softmax/sm_90.json"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of some of the shipped data, which may be damaged."""
    folder = tmp_path / "tuning_db"
    for name in (TABLE, "tables/rms_norm/sm_90.json", "manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data_files.tuning_db() / name, folder / name)
        if name.startswith("tables/"):
            shutil.copy(copy_path(data_files.tuning_db() / name), copy_path(folder / name))
    monkeypatch.setattr(data_files, "tuning_db", lambda: folder)
    manifest.listed_files.cache_clear()
    yield folder
    manifest.listed_files.cache_clear()


def test_every_shipped_file_is_listed_and_as_listed() -> None:
    folder = data_files.tuning_db()
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {
        path.relative_to(folder).as_posix() for part in manifest.LISTED for path in (folder / part).rglob("*.json*")
    }
    assert set(listed) == present
    for name in listed:
        manifest.check_shipped(folder / name, (folder / name).read_bytes())


def test_the_command_writes_what_is_there(copied) -> None:
    written = {path: path.read_bytes() for path in [copied / "manifest.json", *copied.rglob("*.serving")]}
    assert len(written) == 3
    for path in written:
        path.unlink()
    assert shipped.write_manifest() == 2
    whole = json.loads(written.pop(copied / "manifest.json"))["files"]
    assert json.loads((copied / "manifest.json").read_text())["files"].items() <= whole.items()
    for path, data in written.items():
        assert path.read_bytes() == data


def test_landscapes_are_known_without_reading_them() -> None:
    found = manifest.shipped_landscapes("attention", "sm_90")
    assert len(found) == 58
    one = next(each for each in found if "sq1_sk8192" in each.path.name)
    assert (one.regime, one.problem.seq_q, one.problem.kv_heads) == ("burst", 1, 8)
    assert exchange.read_table(one.path).measurements[0].measurement.problem == one.problem
    assert manifest.shipped_landscapes("attention", "sm_80") == []


def test_a_file_that_is_not_the_one_that_shipped_is_refused(copied, tmp_path) -> None:
    whole = (copied / TABLE).read_text()
    for path, match in (
        (copied / TABLE, r"tables/softmax/sm_90\.json is not the file that shipped .its hash is another"),
        (copied / "tables/softmax/sm_91.json", "the manifest does not list it"),
        (tmp_path / "mine.json", None),  # files elsewhere are the user's own
    ):
        path.write_text(whole.replace('"median_us": ', '"median_us": 1', 1))
        with pytest.raises(DatabaseError, match=match) if match else contextlib.nullcontext():
            assert exchange.read_table(path).entries


OF_A_HASH = '{"schema_version": 1, "files": {"a": {"sha256": "' + 64 * "0" + '"%s}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        "\ud800",
        '{"schema_version": 2, "files": {}}',
        '{"schema_version": 1, "files": {"a": {}}}',
        *(OF_A_HASH % more for more in (', "bytes": "1"', ', "problem": "x"', ', "arch": {}')),
    ],
    ids=lambda text: text[-20:],
)
def test_a_damaged_manifest_is_said_to_be_damaged(copied, text) -> None:
    (copied / "manifest.json").write_text(text, errors="surrogatepass")
    manifest.listed_files.cache_clear()
    with pytest.raises(DatabaseError, match=r"manifest\.json is not the file that shipped"):
        exchange.read_table(copied / TABLE)


def test_what_a_manifest_leaves_out_is_not_guessed(copied) -> None:
    data = json.loads((copied / "manifest.json").read_text())
    for listed in data["files"].values():
        for name in ("bytes", "arch"):
            listed.pop(name, None)
    (copied / "manifest.json").write_text(json.dumps(data))
    manifest.listed_files.cache_clear()
    assert read_shipped_entries(copied / TABLE)
    assert manifest.shipped_landscapes("attention", "sm_90") == []


@pytest.mark.parametrize(("name", "read", "none"), [("transfer", loss_bands, ()), ("published", published_figures, {})])
def test_a_damaged_model_file_is_left_out(copied, caplog, name, read, none) -> None:
    path = copied / f"model/attention/{name}.json"
    path.parent.mkdir(parents=True)
    for text in ("[" * 100_000, '{"a": 1}', '{"bands": [{}], "devices": 3}'):
        path.write_text(text)
        read.cache_clear()
        assert read("attention") == none
        assert f"{name}.json is not the file that shipped" in caplog.text
        caplog.clear()
    read.cache_clear()


@pytest.mark.parametrize("damage", ["none", "missing", "changed", "of another table"])
def test_a_serving_copy_is_read_where_it_is_that_of_the_table(copied, damage) -> None:
    """A table that has its own copy is not looked at."""
    table = copied / TABLE
    copy = copy_path(table)
    whole = [entry.replace(layer="shipped") for entry in exchange.read_table(table).entries]
    if damage == "none":
        table.write_text(" " * table.stat().st_size)
        os.utime(table, (0, 0))
    elif damage == "missing":
        copy.unlink()
    elif damage == "changed":
        copy.write_text(copy.read_text().replace('"median_us":', '"median_us":1', 1))
    else:
        shutil.copy(copy_path(copied / "tables/rms_norm/sm_90.json"), copy)
    assert read_shipped_entries(table) == whole


def test_a_table_changed_since_its_copy_was_made_is_never_served_from_the_copy(copied) -> None:
    table = copied / TABLE
    text = table.read_text()
    os.utime(table, (2**31, 2**31))  # younger than its copy, and the same: a checkout writes files in any order
    assert read_shipped_entries(table)
    for other in (text.replace('"median_us": 1', '"median_us": 2', 1), text + " "):
        table.write_text(other)
        with pytest.raises(DatabaseError, match="is not the file that shipped"):
            read_shipped_entries(table)


def test_serving_goes_on_without_a_refused_table(copied, tmp_path, caplog) -> None:
    whole = {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))}
    assert whole == {"softmax", "rms_norm"}
    path = copied / TABLE
    path.write_text(path.read_text() + " ")
    assert {entry.kernel for entry in load_entries(Settings(db=str(tmp_path / "none.db")))} == {"rms_norm"}
    assert "is not the file that shipped" in caplog.text
    assert Attention.name not in caplog.text
