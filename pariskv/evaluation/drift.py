"""Drift: how well old tokens and new ones are found while generation moves away from the prompt.

What a retriever learnt from the prompt, and never again, describes what comes later less and less well; the first
figure of ParisKV (arXiv 2602.07721) shows it. Recall@100 against the decode position, on the same queries and keys for
every retriever:

    synthetic  keys whose mean, 4 standard deviations long, and whose principal directions turn by 90 degrees in the
               course of the steps; each query is like the newest keys, and the zone mixes old and new. Several
               tries, of other random numbers, tell how far chance goes; keys that do not turn, what length alone does
    a model    a prompt in one domain and a continuation in another, teacher-forced: prose, then source code

`start` and `end` are the means of the first and the last tenth of the positions, at least one each; `slope` is that of
the least squares line, per thousand tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pariskv.binding import bind
from pariskv.cache import RequestState
from pariskv.compare import config_for
from pariskv.config import Config
from pariskv.evaluation.charts import Chart
from pariskv.evaluation.results import Results, Table, number, percent
from pariskv.metrics import dense_truth, measure
from pariskv.registry import Registry
from pariskv.replay import LayerTrace, filled_layer, observe
from pariskv.types import LayerInfo, Query

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel

TOP_K = 100

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Synthetic:
    """Keys that turn away from the prompt's: sizes of one layer, and how often recall is looked at."""

    steps: int = 100_000
    prompt: int = 8192
    heads: int = 2
    group: int = 4
    dim: int = 64
    positions: int = 20
    queries: int = 4  # asked at each position
    mean: float = 4.0  # length of the keys' mean, in standard deviations
    degrees: float = 90.0  # by which the keys turn in the course of the steps
    seed: int = 0

    def info(self) -> LayerInfo:
        cpu, scaling = torch.device("cpu"), self.dim**-0.5
        return LayerInfo(0, 1, self.heads, self.group, self.dim, torch.float32, cpu, scaling, model="synthetic")

    def trace(self) -> LayerTrace:
        """The prompt's keys, then those of every step; the queries of a step are like the keys at that step."""
        generator = torch.Generator().manual_seed(self.seed)
        total = self.prompt + self.steps
        steps = torch.arange(total) - self.prompt
        angle = (steps.clamp(min=0) / self.steps * math.radians(self.degrees)).float()
        keys = self._turned(torch.randn(1, self.heads, total, self.dim, generator=generator), angle)
        heads = torch.randn(self.steps, self.heads * self.group, self.dim, generator=generator)
        heads = self._turned(heads.transpose(0, 1), angle[self.prompt :]).transpose(0, 1)
        heads = heads.reshape(self.steps, 1, self.heads, self.group, self.dim)
        return LayerTrace(self.prompt, keys, torch.zeros(()).expand_as(keys), heads)

    def _turned(self, noise: Tensor, angle: Tensor) -> Tensor:
        """Normal numbers [..., n, D] as keys at the angles [n]: their directions and their mean turn."""
        half = self.dim // 2
        spread = torch.logspace(0.5, -0.5, half)  # standard deviations from 3 to 1/3, of the first half of directions
        first, second = noise[..., :half] * spread, noise[..., half:] / 3
        first = first + self.mean * (torch.arange(half) == 0)
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        return torch.cat((cos * first - sin * second, sin * first + cos * second), dim=-1)


@dataclass(frozen=True)
class Point:
    """Recall@100 of a retriever at a decode position, the mean over layers, heads and queries."""

    retriever: str
    position: int
    recall: float


@dataclass(frozen=True)
class Summary:
    retriever: str
    start: float
    end: float
    ratio: float
    slope: float


def summarise(points: Sequence[Point]) -> list[Summary]:
    """One summary for each retriever, in the order of the points."""
    found = []
    for name in dict.fromkeys(point.retriever for point in points):
        own = sorted((point.position, point.recall) for point in points if point.retriever == name)
        few = max(1, len(own) // 10)
        start, end = (sum(recall for _, recall in part) / few for part in (own[:few], own[-few:]))
        mean_x, mean_y = (sum(one[i] for one in own) / len(own) for i in (0, 1))
        spread = sum((x - mean_x) ** 2 for x, _ in own)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in own) / spread if spread else 0.0
        found.append(Summary(name, start, end, end / start if start else 0.0, 1000 * slope))
    return found


def mean_points(tries: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean recall over the tries, at each position of each retriever."""
    found: dict[tuple[str, int], list[float]] = {}
    for point in (point for points in tries for point in points):
        found.setdefault((point.retriever, point.position), []).append(point.recall)
    return [Point(*key, statistics.fmean(recalls)) for key, recalls in found.items()]


def ratios_of(tries: Sequence[Sequence[Point]]) -> dict[str, list[float]]:
    """End over start of every try, by retriever."""
    found: dict[str, list[float]] = {}
    for one in (one for points in tries for one in summarise(points)):
        found.setdefault(one.retriever, []).append(one.ratio)
    return found


def with_error(ratio: float, ratios: Sequence[float]) -> str:
    """A ratio as a table shows it, with the standard error of the mean of the tries' ratios where there are several."""
    if len(ratios) < 2:
        return number(ratio, 3)
    return f"{number(ratio, 3)} ± {number(statistics.stdev(ratios) / math.sqrt(len(ratios)), 3)}"


def to_json(points: Sequence[Point]) -> dict[str, Any]:
    """The rows and their summary, as plain values."""
    return {"rows": [asdict(point) for point in points], "summary": [asdict(one) for one in summarise(points)]}


def measure_drift(
    config: Config,
    retrievers: Sequence[str],
    traces: Mapping[int, tuple[LayerInfo, LayerTrace]],
    positions: int,
    queries: int,
    registry: Registry,
    moments: Mapping[int, Tensor] | None = None,
    progress: Progress = lambda *_: None,
) -> Iterator[Point]:
    """The points of each retriever over the same layers' traces, one retriever after the other."""
    for name in retrievers:
        sums: dict[int, list[float]] = {}
        state = RequestState(
            bind(config_for(config, name, TOP_K), max(traces) + 1, registry, traces), config.window, moments=moments
        )
        for done, (info, trace) in enumerate(traces.values()):
            for position, recall in _follow(state, info, trace, positions, queries):
                sums.setdefault(position, []).append(recall)
                progress(name, done * trace.steps + position, len(traces) * trace.steps)
        yield from (Point(name, position, sum(values) / len(values)) for position, values in sorted(sums.items()))


@torch.no_grad()
def _follow(
    state: RequestState, info: LayerInfo, trace: LayerTrace, positions: int, queries: int
) -> Iterator[tuple[int, float]]:
    """One layer's steps; at some positions, the recall of the last `queries` queries before it."""
    layer = filled_layer(trace, state, info)
    wanted = {max(queries, round(trace.steps * (i + 1) / positions)) for i in range(positions)}
    asked = {position - i: position for position in wanted for i in range(queries)}
    found: dict[int, list[float]] = {}
    for step in range(trace.steps):
        at = trace.prompt_tokens + step
        layer.append(trace.keys[:, :, at : at + 1], trace.values[:, :, at : at + 1].contiguous())
        if step + 1 in asked:
            keys, values = trace.history(step)
            query = Query(trace.heads[step], None, info.scaling, info.softcap)
            truth = dense_truth(query, keys, values, [at + 1], layer.zones, layer.window.sink)
            recall = measure(truth, observe(layer, trace.heads[step]), TOP_K)["recall"]
            found.setdefault(asked[step + 1], []).append(float(recall.mean()))
        state.end_step()
        if step + 1 in wanted:
            yield step + 1, sum(found[step + 1]) / len(found[step + 1])
    state.reset()


def results_of(tries: Sequence[Sequence[Point]], manifest: Mapping[str, Any], title: str) -> Results:
    """Rows and summaries, the means of the tries, as tables, a chart and JSON."""
    points, ratios = mean_points(tries), ratios_of(tries)
    summaries = summarise(points)
    at = {(point.retriever, point.position): point.recall for point in points}
    names = [one.retriever for one in summaries]
    positions = sorted({point.position for point in points})
    said = [f"{one.retriever} {percent(one.start)} at the start, {percent(one.end)} at the end" for one in summaries]
    numbers = [
        (
            one.retriever,
            number(one.start, 3),
            number(one.end, 3),
            with_error(one.ratio, ratios[one.retriever]),
            f"{one.slope:+.5f}",
        )
        for one in summaries
    ]
    return Results(
        manifest,
        to_json(points),
        title,
        f"Found of the {TOP_K} tokens that matter most: {'; '.join(said)}.",
        [(number(one.ratio, 3), f"{one.retriever}: end / start") for one in summaries],
        [
            Table(
                f"recall@{TOP_K}",
                ("retriever", "start", "end", "end / start", "slope per 1,000 tokens"),
                numbers,
            ),
            Table(
                "By decode position",
                ("position", *names),
                [[f"{position:,}", *(number(at.get((name, position)), 3) for name in names)] for position in positions],
            ),
        ],
        [Chart(f"Recall@{TOP_K} as generation moves away from the prompt", lambda figure: _draw(figure, points))],
        ("recall", "start", "end", "slope"),
    )


def _draw(figure: Any, points: Sequence[Point]) -> None:
    """Recall against the position, a line for each retriever."""
    plane = figure.subplots()
    for name in dict.fromkeys(point.retriever for point in points):
        own = [(point.position, point.recall) for point in points if point.retriever == name]
        plane.plot(*zip(*own, strict=True), marker="o", label=name)
    plane.set(xlabel="decode position", ylabel=f"recall@{TOP_K}", ylim=(0, 1))
    plane.grid()
    plane.legend()


def model_traces(
    model: LanguageModel, prompt: str, continuation: str, tokens: int, steps: int, chunk: int = 2048
) -> dict[int, tuple[LayerInfo, LayerTrace]]:
    """Every layer's queries, keys and values along `tokens` tokens of one text and `steps` of another."""
    from pariskv.integrations.geometry import Geometry
    from pariskv.integrations.reference import read_densely

    first, then = (model.encode([text]).tokens[:, :count] for text, count in ((prompt, tokens), (continuation, steps)))
    whole = torch.cat((first, then), dim=1)
    reference = read_densely(model, whole[:, :-1], whole[:, -1:], 0, chunk, keep_queries=True)
    geometry = Geometry(model.model, model.model.config.get_text_config(decoder=True))
    found = {}
    for index, trace in reference.layers.items():
        info, queries = geometry.expected_info(index, 1), trace.prompt_queries
        assert queries is not None
        shape = (1, info.kv_heads, info.group, queries.shape[2], info.head_dim)
        heads = torch.cat((queries.view(shape).permute(3, 0, 1, 2, 4)[first.shape[1] :], trace.heads))
        own = queries[:, :, : first.shape[1]]
        found[index] = info, LayerTrace(first.shape[1], trace.keys, trace.values, heads, own)
    return found
