"""One layer driven with random keys beside a plain list of tokens; and a format that learns, to look into."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from torch import Tensor

from pariskv import CodeField, Codes, LayerInfo, Prefill, Register, Retriever, hookimpl
from pariskv.binding import LayerPipeline, bind
from pariskv.config import parse_config
from pariskv.decode import attend_layer
from pariskv.layer import LayerState
from pariskv.registry import Registry, Source
from pariskv.request import Request
from pariskv.types import TOKENS, Tensors
from pariskv.window import Window

H, G, D = 2, 3, 16
REGISTRY = Registry.load(entry_points=False)

WINDOWS = st.builds(
    Window,
    sink=st.integers(0, 4),
    local=st.integers(1, 5),
    update=st.integers(1, 5),
    dense_below=st.integers(0, 25),
)


class Learner(Retriever):
    """Codes that are the keys less the prompt's mean: to see what `fit` got, and that its state is frozen."""

    format = "centred"
    needs = frozenset({"query_moment", "recent_queries"})

    def __init__(self) -> None:
        self.views: list[tuple[list[int], Tensor, Tensor]] = []

    @hookimpl
    def allocate_codes(self, layer: LayerInfo, capacity: int) -> Codes:
        sums = CodeField((D,), torch.float64, reduce="sum")
        return Codes.empty(layer, capacity, keys=CodeField((TOKENS, D), torch.float64), total=sums)

    @hookimpl
    def fit(self, layer: LayerInfo, prefill: Prefill) -> Tensors:
        assert prefill.query_moment is not None
        assert prefill.recent_queries is not None
        self.views.append((prefill.lengths, prefill.query_moment, prefill.recent_queries))
        mean = torch.zeros(layer.batch, H, 1, D, dtype=torch.float64)
        for row, n in enumerate(prefill.lengths):
            for keys, _ in prefill.blocks(row):
                mean[row, :, 0] += keys.sum(1) / n
        return {"mean": mean}

    @hookimpl
    def encode(self, keys: Tensor, values: Tensor, state: Tensors) -> Tensors:
        return {"keys": keys - state["mean"], "total": keys.sum(2)}


class Relearner(Learner):
    """A learner whose state is stale once `after` tokens have left since; keeps what it was asked."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.asked: list[tuple[Tensor, Tensor, list[int], list[int]]] = []

    @hookimpl
    def is_stale(self, keys: Tensor, state: Tensors, fitted: list[int], since: list[int]) -> list[bool]:
        self.asked.append((keys.clone(), state["mean"].clone(), fitted, since))
        return [tokens >= self.after for tokens in since]


def offer(registry: Registry, made: Learner) -> None:
    """Register a ready object under the name learner."""

    @hookimpl
    def register_retrievers(register: Register) -> None:
        register("learner", lambda: made)

    registry._add(Source("learner", "tests", "0"), lambda: SimpleNamespace(register_retrievers=register_retrievers))


def pipeline(retriever: str = "exact", **layer: object) -> LayerPipeline:
    values = {"retriever": retriever, "top_k": 400, "candidates": 1.0, **layer}
    return bind(parse_config({"layers": {"default": values}}), 1, REGISTRY)[0]


def new_layer(window: Window, bound: LayerPipeline, batch: int, new_tokens: int = 16) -> LayerState:
    info = LayerInfo(0, batch, H, G, D, torch.float64, torch.device("cpu"), D**-0.5)
    return LayerState(info, bound, window, Request(new_tokens=new_tokens))


class Driver:
    """Feeds a layer and keeps, per row, every token that it should hold."""

    def __init__(self, layer: LayerState, pads: list[int], seed: int = 0):
        self.layer, self.pads = layer, pads
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[list[Tensor]] = [[] for _ in pads]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def prefill(self, columns: int, chunk: int) -> None:
        self.layer.request.prefilling = True
        tokens = self.random(len(self.pads), H, columns, 2, D)
        allowed = torch.arange(columns) >= torch.tensor(self.pads).unsqueeze(-1)
        for start in range(0, columns, chunk):
            stop = min(start + chunk, columns)
            part = tokens[:, :, start:stop]
            self.layer.append(part[..., 0, :], part[..., 1, :])
            mask = allowed[:, None, None, :stop].expand(-1, 1, stop - start, -1)
            self.layer.chunk_attended(self.random(len(self.pads), H * G, stop - start, D), mask)
        self.layer.request.prefilling = False
        self.layer.end_prefill()
        for row, pad in enumerate(self.pads):
            self.rows[row] += list(tokens[row, :, pad:].unbind(1))

    def step(self, active: list[bool] | None = None) -> tuple[Tensor, Tensor]:
        """One token a row; returns the layer's output and what dense attention over the lists gives."""
        batch = len(self.rows)
        active = active or [True] * batch
        self.layer.finish_step()
        self.layer.set_active(active)
        token = self.random(batch, H, 1, 2, D)
        self.layer.append(token[..., 0, :], token[..., 1, :])
        for row in range(batch):
            if active[row]:
                self.rows[row].append(token[row, :, 0])
        heads = self.random(batch, H, G, D)
        out, _ = attend_layer(self.layer, heads)
        want = torch.stack([self.dense(row, heads[row]) for row in range(batch)])
        return out, want

    def check(self, active: list[bool] | None = None) -> None:
        """Take a step, and compare the rows that are active."""
        out, want = self.step(active)
        for row, is_active in enumerate(active or [True] * len(want)):
            if is_active:
                torch.testing.assert_close(out[row], want[row], msg=lambda text, row=row: f"row {row}: {text}")

    def crop(self, row: int, tokens: int) -> None:
        """Leave a row's first tokens, of which there are so many."""
        if tokens:
            self.layer.crop(row, tokens)
            del self.rows[row][tokens:]

    def dense(self, row: int, heads: Tensor) -> Tensor:
        tokens = torch.stack(self.rows[row], dim=1)  # [H, n, 2, D]
        scores = heads @ tokens[:, :, 0].transpose(-1, -2) * D**-0.5
        return torch.softmax(scores, -1) @ tokens[:, :, 1]
