"""The tiling-sensitivity report: numbers first (`build_report`), then files (`write_report`)."""

from tiledsched.report.model import ModelTimes, build_report
from tiledsched.report.records import Report
from tiledsched.report.text import write_report

__all__ = ["ModelTimes", "Report", "build_report", "write_report"]
