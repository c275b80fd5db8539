"""The needle grid: one sentence that matters in a haystack, by length and depth, dense attention beside retrievers.

The prompt is that of `pariskv.needle`. A dense pass reads it once and answers; then every retriever is given the
prompt's keys and values and answers for itself, so that only decoding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pariskv.compare import config_for
from pariskv.compare_output import make_canvas
from pariskv.config import DEFAULT, Config
from pariskv.decode import Batch, make_steps
from pariskv.errors import ConfigError
from pariskv.evaluation.fidelity import CHUNK, wants_queries
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
    names = [DENSE, *(name for name in retrievers if name != DENSE)]
    top_k = config.layers[DEFAULT].top_k or 1
    configs = {name: config_for(config, name, top_k) for name in names[1:]}
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


def draw(cells: Sequence[Cell], path: Path) -> None:
    """A heat map for each retriever, length by depth; ConfigError where the file cannot be written."""
    names = list(dict.fromkeys(cell.retriever for cell in cells))
    lengths, depths = (sorted({getattr(cell, name) for cell in cells}) for name in ("length", "depth"))
    canvas = make_canvas((1.5 + 3.2 * len(names), 3.4))
    planes = canvas.figure.subplots(1, len(names), squeeze=False)[0]
    for plane, name in zip(planes, names, strict=True):
        share = {(cell.depth, cell.length): cell.found / cell.tries for cell in cells if cell.retriever == name}
        grid = [[share[depth, length] for length in lengths] for depth in depths]
        plane.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        plane.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        plane.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        plane.set(title=name, xlabel="tokens", ylabel="depth")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                plane.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8)
    try:
        canvas.figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error}") from error
