"""docs/security.md promises what tests show: each row of its table has, here, the tests that show it, by how their names begin."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
SHOWN = {
    "names of kernels, jobs and samplers in data": (
        "test_data_names_no_kernel_that_the_user_did_not_allow",
        "test_data_may_name_kernels_that_ship_or_are_registered",
        "test_data_names_no_sampler_that_the_user_did_not_allow",
        "test_a_campaigns_row_names_no_code_that_the_user_did_not_allow",
    ),
    "tables, landscapes, `db import`": (
        "test_a_table_is_held_to_its_form_by_key",
        "test_an_estimate_that_its_samples_do_not_give_is_not_taken",
        "test_another_database_is_held_to_the_same",
        "test_a_small_file_that_unpacks_to_much_is_refused",
    ),
    "notes of what programs called": (
        "test_damaged_lines_are_counted_and_a_line_fits_the_terminal",
        "test_a_kernel_of_a_file_is_left_out_until_it_is_named",
    ),
    "constraints in search spaces": ("test_what_would_take_long_or_much",),
    "`db query`, views": (
        "test_what_is_no_question_is_refused_and_changes_nothing",
        "test_a_question_without_end_is_given_up",
        "test_the_name_of_a_view_comes_from_its_kernel_and_never_from_a_row",
    ),
    "`tiledsched.toml` in the current directory": (
        "test_a_project_file_names_places_outside_its_folder_only_once_it_is_trusted",
        "test_no_way_leads_out_of_the_folder",
        "test_other_files_are_not_read",
        "test_no_code_is_imported_from_there",
    ),
    "processes that compile and measure": (
        "test_no_child_imports_from_the_current_directory",
        "test_a_child_finds_what_its_parent_finds",
    ),
    "machine code on disk": (
        "test_what_others_may_write_is_not_launched",
        "test_a_bundle_that_others_may_write_is_refused_whoever_owns_it",
        "test_a_file_gives_back_what_was_put_in_and_any_damage_is_absence",
        "test_other_machine_code_than_the_bundle_says_is_refused",
    ),
    "spaces and declarations": (
        "test_every_look_at_a_space_ends",
        "test_a_slow_model_does_not_outlast_the_budget",
        "test_a_declaration_that_never_returns_is_ended_by_a_signal",
    ),
    "what is deleted": (
        "test_strangers_files_stay",
        "test_what_is_not_ours_stays",
        "test_half_written_files_of_killed_processes_go_and_no_others",
    ),
    "tables that ship": ("test_a_file_that_is_not_the_one_that_shipped_is_refused",),
    "Many at once": ("test_nothing_is_lost_and_nothing_raises",),
}


def test_each_promise_is_shown() -> None:
    page = (TESTS.parent / "docs" / "security.md").read_text()
    doors = re.findall(r"^\|\[?([^|\]]+)[^|]*\|", page, re.MULTILINE)[2:]
    assert [*doors, *re.findall(r"^\*\*(Many at once)\.", page, re.MULTILINE)] == [*SHOWN]
    there = [
        name
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    lacking = [each for shown in SHOWN.values() for each in shown if not any(name.startswith(each) for name in there)]
    assert lacking == []
