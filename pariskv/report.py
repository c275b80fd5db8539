"""What a run did, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from pariskv.prompt import History

MEGA = 1e6


@dataclass(frozen=True)
class Report:
    """One run of one prompt; bytes are of keys, values and codes, not of the model's weights.

    attended_tokens_per_step  tokens that a query head attends to, mean over steps and layers
    kv_device_bytes           keys and values held on the device: sink, ring and slots (all of them when dense)
    kv_dense_bytes            what dense attention holds for the same tokens
    kv_host_bytes             keys and values in host memory
    decode_tokens_per_s       of the decode steps; None where the prefill gave the only token
    prefill_history           where a chunk found the ones before it: buffer (on the device) or store; None when dense
    answer_found              None without a needle
    calibration               the file of the model's query statistics that the codes were made by; None without one
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    attended_tokens_per_step: float | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    code_bytes: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    answer_found: bool | None
    prefill_history: History | None = None
    calibration: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def attended_percent(self) -> float | None:
        """Attended tokens as a share of the mean history during decoding."""
        history = self.prompt_tokens + self.new_tokens / 2
        return None if self.attended_tokens_per_step is None else 100 * self.attended_tokens_per_step / history


def as_table(columns: Sequence[tuple[str, Report]]) -> Table:
    """Runs side by side."""
    table = Table(title="What retrieval saved", title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *(cell(report) for _, report in columns))
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _megabytes(count: int) -> str:
    return f"{count / MEGA:,.1f} MB"


def _attended(report: Report) -> str:
    if report.attended_tokens_per_step is None or report.attended_percent is None:
        return "-"
    return f"{report.attended_tokens_per_step:,.0f} ({report.attended_percent:.1f} %)"


def _found(report: Report) -> str:
    return {True: "yes", False: "no", None: "-"}[report.answer_found]


_ROWS = (
    ("prompt tokens", lambda r: f"{r.prompt_tokens:,}"),
    ("new tokens", lambda r: f"{r.new_tokens:,}"),
    ("tokens attended per step", _attended),
    ("keys and values on the device", lambda r: _megabytes(r.kv_device_bytes)),
    ("the same, dense", lambda r: _megabytes(r.kv_dense_bytes)),
    ("keys and values in host memory", lambda r: _megabytes(r.kv_host_bytes)),
    ("codes", lambda r: _megabytes(r.code_bytes)),
    ("earlier chunks during the prefill", lambda r: r.prefill_history or "-"),
    ("prefill, tokens per second", lambda r: _number(r.prefill_tokens_per_s)),
    ("decode, tokens per second", lambda r: _number(r.decode_tokens_per_s)),
    ("needle found", _found),
)
