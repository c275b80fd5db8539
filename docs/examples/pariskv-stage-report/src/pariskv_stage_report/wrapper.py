"""The wrapper `stage-report`: how long each stage takes, and how much it finds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from pariskv import Query, Selected, Selection, Store, WorkingSet, hookimpl
from pariskv.types import Tensors
from torch import Tensor

from pariskv_stage_report.recall import StepSeen, measure_step
from pariskv_stage_report.report import Report

Attention = tuple[Tensor, Tensor]


class StageReport:
    """Watches every stage of a request; the report is printed when the request's cache is gone.

    A step goes through one layer after the other, so what `coarse_select` and `fetch` were last
    asked belongs to the `attend` that comes next.
    """

    def __init__(self, report: Report | None = None) -> None:
        self.report = report or Report()
        self.candidates: Tensor | None = None
        self.fetched: tuple[Selection, Store] | None = None
        weakref.finalize(self, self.report.print)

    @hookimpl(wrapper=True)
    def encode(self) -> Generator[None, Tensors, Tensors]:
        with self.timing("encode"):
            return (yield)

    @hookimpl(wrapper=True)
    def encode_query(self) -> Generator[None, Tensors, Tensors]:
        with self.timing("encode_query"):
            return (yield)

    @hookimpl(wrapper=True)
    def coarse_select(self) -> Generator[None, Selection, Selection]:
        with self.timing("coarse_select"):
            selection = yield
        self.candidates = selection.indices
        return selection

    @hookimpl(wrapper=True)
    def rerank(self) -> Generator[None, Selection, Selection]:
        with self.timing("rerank"):
            return (yield)

    @hookimpl(wrapper=True)
    def fetch(self, selection: Selection, store: Store) -> Generator[None, Selected, Selected]:
        with self.timing("fetch"):
            selected = yield
        self.fetched = selection, store
        return selected

    @hookimpl(wrapper=True)
    def update(self) -> Generator[None, None, None]:
        with self.timing("update"):
            yield

    @hookimpl(wrapper=True)
    def attend(
        self, query: Query, working: WorkingSet, selected: Selected | None
    ) -> Generator[None, Attention, Attention]:
        with self.timing("attend"):
            out, lse = yield
        # Without a selection the pass is over sink and ring alone.
        if selected is not None and self.fetched is not None:
            selection, store = self.fetched
            seen = StepSeen(query, working, self.candidates, selection, store, out)
            for measures in measure_step(seen):
                self.report.add_quality(measures)
        return out, lse

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Add the time of what happens inside, which is over when the device is done."""
        _wait_for_device()
        start = time.perf_counter()
        yield
        _wait_for_device()
        self.report.add_time(stage, time.perf_counter() - start)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
