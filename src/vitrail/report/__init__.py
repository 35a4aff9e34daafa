"""Run folder -> a page for people."""

from vitrail.report.page import write_report

__all__ = ["write_report"]
