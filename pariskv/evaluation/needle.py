"""The needle grid: one sentence that matters in a haystack, by length and depth, dense attention beside retrievers.

The prompt is that of `pariskv.needle`. A dense pass reads it once and answers; then every retriever is given the
prompt's keys and values and answers for itself, so that only decoding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pariskv.compare import config_for
from pariskv.config import DEFAULT, Config
from pariskv.decode import Batch, make_steps
from pariskv.evaluation.charts import Chart
from pariskv.evaluation.fidelity import CHUNK, wants_queries
from pariskv.evaluation.results import Results, Table
from pariskv.lengths import refuse_beyond_context
from pariskv.needle import needle_prompt
from pariskv.registry import Registry
from pariskv.replay import PassThrough

if TYPE_CHECKING:
    from pariskv.integrations.language_model import LanguageModel
    from pariskv.integrations.reference import Reference

DENSE = "dense"
ANSWER_TOKENS = 16

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Cell:
    """How often a retriever found the needle at a length and a depth, of `tries` needles."""

    retriever: str
    length: int
    depth: float
    found: int
    tries: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def configs_of(config: Config, retrievers: Sequence[str]) -> dict[str, Config]:
    """A configuration for each retriever but dense attention, which needs none."""
    top_k = config.layers[DEFAULT].top_k or 1
    return {name: config_for(config, name, top_k) for name in retrievers if name != DENSE}


def measure_needles(
    model: LanguageModel,
    config: Config,
    retrievers: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    tries: int,
    registry: Registry,
    progress: Progress = lambda *_: None,
) -> Iterator[Cell]:
    """The cells of the grid, all retrievers of a length and depth together; dense attention is always the first."""
    configs = configs_of(config, retrievers)
    names = [DENSE, *configs]
    refuse_beyond_context(config, model.context_length, max(lengths), ANSWER_TOKENS, "the longest prompt (--lengths)")
    done, total = 0, len(lengths) * len(depths) * tries
    for length in lengths:
        for depth in depths:
            found = dict.fromkeys(names, 0)
            for seed in range(tries):
                needle = needle_prompt(length, model.count_tokens, depth, seed)
                answers = _answers(model, needle.prompt, configs, registry)
                for name, answer in answers.items():
                    found[name] += needle.is_found(answer)
                progress(f"{length:,} tokens, depth {depth:g}", done := done + 1, total)
            yield from (Cell(name, length, depth, found[name], tries) for name in names)


@torch.no_grad()
def _answers(model: LanguageModel, prompt: str, configs: dict[str, Config], registry: Registry) -> dict[str, str]:
    """What dense attention answers, and each retriever."""
    from pariskv.integrations.reference import read_densely
    from pariskv.integrations.transformers import ParisCache

    tokens = model.encode([prompt]).tokens
    keep = any(wants_queries(ParisCache(model.model, config, registry)) for config in configs.values())
    reference = read_densely(model, tokens, tokens[:, :0], ANSWER_TOKENS, CHUNK, keep)
    found = {DENSE: model.decode(reference.tokens[0].tolist())}
    for name, config in configs.items():
        cache = ParisCache(model.model, config, registry)
        cache.warm_up()
        found[name] = _answer(model, cache, config, reference)
    return found


def _answer(model: LanguageModel, cache: object, config: Config, reference: Reference) -> str:
    from pariskv.integrations.transformers import ParisCache

    assert isinstance(cache, ParisCache)
    for _ in reference.fill(cache):
        pass
    run = make_steps(model, cache, Batch(reference.prompt), PassThrough(), config.runtime, reference.prompt.device)
    answer = [int(reference.tokens[0, 0])]  # of the prompt's own last logits, which are dense
    while len(answer) < ANSWER_TOKENS:
        answer.append(int(run.step(torch.tensor([[answer[-1]]], device=reference.prompt.device)).argmax()))
    return model.decode(answer)


def results_of(cells: Sequence[Cell], manifest: Mapping[str, Any], title: str) -> Results:
    """The grids as tables, heat maps and JSON."""
    names = list(dict.fromkeys(cell.retriever for cell in cells))
    lengths, depths = (sorted({getattr(cell, name) for cell in cells}) for name in ("length", "depth"))
    at = {(cell.retriever, cell.depth, cell.length): cell for cell in cells}

    def count(name: str) -> str:
        own = [cell for cell in cells if cell.retriever == name]
        return f"{sum(cell.found for cell in own)} of {sum(cell.tries for cell in own)}"

    def grid(name: str) -> Table:
        rows = [[at[name, depth, length] for length in lengths] for depth in depths]
        shown = [[f"{cell.found} of {cell.tries}" for cell in row] for row in rows]
        return Table(
            name,
            ("depth", *(f"{length:,} tokens" for length in lengths)),
            [[f"{depth:g}", *row] for depth, row in zip(depths, shown, strict=True)],
        )

    return Results(
        manifest,
        {"rows": [cell.to_dict() for cell in cells]},
        title,
        f"Needles that are found, at {len(lengths)} lengths and {len(depths)} depths: "
        f"{'; '.join(f'{name} {count(name)}' for name in names)}.",
        [(count(name), f"{name}: found") for name in names],
        [grid(name) for name in names],
        [Chart(name, partial(_draw, name, [c for c in cells if c.retriever == name]), (4.4, 3.4)) for name in names],
        ("needle", "depth"),
    )


def _draw(name: str, cells: Sequence[Cell], figure: Any) -> None:
    """One retriever's heat map, length by depth."""
    lengths, depths = (sorted({getattr(cell, name) for cell in cells}) for name in ("length", "depth"))
    share = {(cell.depth, cell.length): cell.found / cell.tries for cell in cells}
    grid = [[share[depth, length] for length in lengths] for depth in depths]
    plane = figure.subplots()
    # Half of the colours: the darkest ones would hide the numbers.
    plane.pcolormesh(grid, vmin=-0.5, vmax=1.5, cmap="RdYlGn", edgecolors="white", linewidth=1)
    plane.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{length:,}" for length in lengths])
    plane.set_yticks([i + 0.5 for i in range(len(depths))], [f"{depth:g}" for depth in depths])
    plane.set(title=name, xlabel="tokens", ylabel="depth")
    plane.invert_yaxis()
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            shown = {"ha": "center", "va": "center", "fontsize": 8, "color": "#111111"}  # on a colour of its own
            plane.text(column + 0.5, row + 0.5, f"{value:.0%}", **shown)
