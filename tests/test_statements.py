"""What reports, `explain` and `show` say is what the files hold, as other code finds it; and what is planted is found."""

import re
import shutil

import pytest
import statements
from recomputed import Evidence
from report_samples import add_times, draws_nothing, entry, grid
from statements import Reader

from tiledsched.store.db import TuningDB


@pytest.fixture(autouse=True, scope="module")
def without_drawings(tmp_path_factory):
    """No statement is read from the drawings of a report, which take half its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", draws_nothing(tmp_path_factory.mktemp("drawing") / "module"))
        yield


def said(capsys, *arguments):
    """Whether statements were wrong, and what the script prints."""
    status = statements.main(list(arguments))
    return status, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        ("rms_norm", "sm_90"),
        ("attention", "sm_90"),
        ("attention", "sm_121"),
        ("matmul", "sm_90"),
        ("matmul", "sm_121"),
        ("layer_norm", "sm_90"),
    ],
)
def test_what_is_said_of_shipped_data_is_what_the_files_hold(capsys, kernel, arch):
    status, out = said(capsys, "--kernel", kernel, "--arch", arch, "--seed", "62", "--hide", "30")
    assert not status, out
    assert "unread sentences: 0\n" in out


@pytest.mark.slow
def test_what_is_said_of_a_database_is_what_it_holds(capsys, tmp_path):
    path = tmp_path / "tuning.db"
    with TuningDB.open(path) as db:
        times = add_times(db, grid())
        best = min(grid(), key=grid().get)
        db.put_entry(entry(best, measurement_id=times[best], candidates=len(times), margin=0.06, source="tune run 1"))
    status, out = said(capsys, "--db", str(path), "--seed", "62")
    assert not status, out


@pytest.fixture(scope="module")
def evidence():
    return Evidence("rms_norm", "sm_90")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report that is right."""
    folder = tmp_path_factory.mktemp("report")
    statements.run("report", "rms_norm", "--arch", "sm_90", "-o", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "pattern", "instead", "said"),
    [
        ("report.md", r"\b149\.9 µs", "148.9 µs", "148.9"),
        ("report.md", r"(\d+) programs of this problem", "41 programs of this problem", "41"),
        ("report.html", r'"us":\[149\.9,', '"us":[148.9,', 148.9),
        ("schedules.csv", r",149\.904,", ",150.904,", 150.904),
    ],
)
def test_a_planted_mistake_is_found(tmp_path, evidence, written, file, pattern, instead, said):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    text, count = re.subn(pattern, instead, (tmp_path / file).read_text(), count=1)
    (tmp_path / file).write_text(text)
    wrong = [each for each in Reader(evidence, tmp_path, {}).report() if each.said == said and each.check()]
    assert count == 1
    assert wrong


@pytest.mark.slow
def test_a_sentence_that_no_pattern_reads_is_counted(tmp_path, evidence, written):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "report.md").open("a") as file:
        file.write("\nThe moon takes 28 days.\n")
    reader = Reader(evidence, tmp_path, {})
    assert all(reader.report())
    assert reader.unread == ["The moon takes 28 days."]
