"""For all folders of tests in Python."""

from session import no_process_is_left, pytest_report_header

__all__ = ["no_process_is_left", "pytest_report_header"]
