"""Sums of what was seen, and the tables that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pariskv.stages import STAGES
from rich.console import Console
from rich.table import Table


@dataclass
class Total:
    """A sum, and of how many."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.value += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self.value / self.count


@dataclass
class Report:
    """Seconds by stage, measures of quality by name (`pariskv.metrics` defines them)."""

    seconds: dict[str, Total] = field(default_factory=dict)
    quality: dict[str, Total] = field(default_factory=dict)

    def add_time(self, stage: str, seconds: float) -> None:
        self.seconds.setdefault(stage, Total()).add(seconds)

    def add_quality(self, measures: Mapping[str, float]) -> None:
        for name, value in measures.items():
            self.quality.setdefault(name, Total()).add(value)

    def tables(self) -> list[Table]:
        """Stages in the contract's order, then the quality; nothing of what was not seen."""
        times = Table("stage", "calls", "ms a call", "seconds")
        for stage in STAGES:
            if stage in self.seconds:
                total = self.seconds[stage]
                calls, each = str(total.count), f"{1e3 * total.mean:.3f}"
                times.add_row(stage, calls, each, f"{total.value:.2f}")
        quality = Table("measure", "mean", "of steps, layers and rows")
        for name, total in self.quality.items():
            quality.add_row(name, f"{total.mean:.4g}", str(total.count))
        return [table for table in (times, quality) if table.row_count]

    def print(self) -> None:
        """To standard error, so that standard output stays the answer's."""
        for table in self.tables():
            Console(stderr=True).print(table)
