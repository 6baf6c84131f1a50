"""The tiling-sensitivity report: `build_report` computes its numbers, `write_report` writes its files."""

from tiledsched.report.model import ModelTimes, build_report
from tiledsched.report.records import Report
from tiledsched.report.sources import WithShipped
from tiledsched.report.text import write_report

__all__ = ["ModelTimes", "Report", "WithShipped", "build_report", "write_report"]
