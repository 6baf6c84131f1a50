"""The tiling-sensitivity report: numbers first (`build_report`), then files (`write_report`)."""

from tiledsched.report.model import ModelTimes, build_report
from tiledsched.report.records import Report
from tiledsched.report.sources import WithShipped
from tiledsched.report.text import write_report

__all__ = ["ModelTimes", "Report", "WithShipped", "build_report", "write_report"]
