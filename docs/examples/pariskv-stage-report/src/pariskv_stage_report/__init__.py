"""The plugin: what pariskv calls when it looks for retrievers and wrappers."""

from pariskv import Register, hookimpl

from pariskv_stage_report.report import Report
from pariskv_stage_report.wrapper import StageReport

__all__ = ["Report", "StageReport"]


@hookimpl
def register_retrievers(register: Register) -> None:
    register.wrapper("stage-report", StageReport, api=1)
