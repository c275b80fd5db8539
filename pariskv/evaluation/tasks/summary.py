"""What the answers say: scores of each task and retriever, their errors, and how they differ from dense."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pariskv.evaluation.tasks.evaluation import DENSE, Record
from pariskv.evaluation.tasks.statistics import mcnemar, mean, paired_bootstrap, pass_at_k, standard_error


@dataclass(frozen=True)
class Paired:
    """A retriever against dense attention, on the items that both answered.

    difference   of the mean scores
    interval     of 95 %, by the paired bootstrap over items
    won, lost    items on which the retriever scores more, and less
    p            McNemar's exact two-sided, where every item has one answer that is right or wrong; else None
    """

    items: int
    difference: float
    interval: tuple[float, float]
    won: int
    lost: int
    p: float | None


@dataclass(frozen=True)
class Row:
    """One retriever on one task.

    score     pass@1: the mean over items of the mean over an item's samples
    error     its standard error over items, None of fewer than two
    pass_at   other pass@k by the unbiased estimator
    cut       answers that reached the limit of tokens
    too_long  items whose prompt and answer do not fit the model's context: in no score
    """

    task: str
    retriever: str
    items: int
    samples: int
    score: float | None
    error: float | None
    pass_at: Mapping[str, float]
    cut: int
    too_long: int
    new_tokens: float
    paired: Paired | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Grouped = dict[tuple[str, str], list[Record]]
"""Records by (task, retriever)."""


def by_task(records: Iterable[Record]) -> Grouped:
    """Records of each task and retriever, in the order in which these first appear."""
    found: Grouped = defaultdict(list)
    for record in records:
        found[record.task, record.retriever].append(record)
    return dict(found)


def summarise(records: Iterable[Record], pass_at: Mapping[str, Sequence[int]]) -> list[Row]:
    """A row for each task and retriever; `pass_at` has the k of each task."""
    grouped = by_task(records)
    rows = []
    for (task, retriever), own in grouped.items():
        dense = grouped.get((task, DENSE)) if retriever != DENSE else None
        rows.append(_row(task, retriever, own, pass_at.get(task, ()), compare(own, dense) if dense else None))
    return rows


def _row(task: str, retriever: str, records: list[Record], ks: Sequence[int], paired: Paired | None) -> Row:
    scores = scores_of(records)
    means = [mean(one) for one in scores.values()]
    asked = [record for record in records if not record.too_long]
    fewest = min(map(len, scores.values()), default=0)
    found = {
        f"pass@{k}": mean([pass_at_k(len(one), sum(score == 1 for score in one), k) for one in scores.values()])
        for k in ks
        if k <= fewest
    }
    return Row(
        task,
        retriever,
        len(means),
        fewest,
        mean(means) if means else None,
        standard_error(means),
        found,
        sum(not record.ended for record in asked),
        len({record.index for record in records if record.too_long}),
        mean([record.new_tokens for record in asked]) if asked else 0.0,
        paired,
    )


def scores_of(records: Iterable[Record]) -> dict[int, list[float]]:
    """The scores of each item, by its index."""
    found: dict[int, list[float]] = defaultdict(list)
    for record in records:
        if record.score is not None:
            found[record.index].append(record.score)
    return dict(sorted(found.items()))


def compare(records: Iterable[Record], dense: Iterable[Record]) -> Paired | None:
    """A retriever's answers against dense attention's, on the items that both have; None where there is none."""
    ours, theirs = scores_of(records), scores_of(dense)
    both = [index for index in ours if index in theirs]
    if not both:
        return None
    differences = [mean(ours[index]) - mean(theirs[index]) for index in both]
    won, lost = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    single = all(len(of[index]) == 1 and of[index][0] in (0, 1) for index in both for of in (ours, theirs))
    return Paired(
        len(both), mean(differences), paired_bootstrap(differences), won, lost, mcnemar(won, lost) if single else None
    )


@dataclass(frozen=True)
class Class:
    """The mean score of one retriever on the items of one class, such as difficulty: hard."""

    kind: str
    name: str
    retriever: str
    items: int
    score: float
    error: float | None


def by_class(records: Iterable[Record], classes: Callable[[Record], Mapping[str, str]]) -> list[Class]:
    """Scores by what `classes` says of a record: (kind, name) pairs."""
    grouped: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        for kind, name in classes(record).items():
            grouped[kind, name, record.retriever].append(record)
    found = []
    for (kind, name, retriever), own in grouped.items():
        if means := [mean(one) for one in _items(own).values()]:
            found.append(Class(kind, name, retriever, len(means), mean(means), standard_error(means)))
    return found


def _items(records: Iterable[Record]) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        if record.score is not None:
            found[record.task, record.index].append(record.score)
    return dict(found)


POSITIONS = 5
"""Parts of a text by which scores are reported."""


def classes_of(record: Record) -> dict[str, str]:
    """A record's own classes, its length where the task has lengths, and the part of the text its answer lies in."""
    kind, _, length = record.task.partition("@")
    found = {f"{kind}: {name}": value for name, value in record.groups.items()}
    if length:
        found["length"] = f"{int(length):,} tokens"
    if record.position is not None:
        part = min(int(record.position * POSITIONS), POSITIONS - 1)
        found["position"] = f"{part / POSITIONS:.0%} to {(part + 1) / POSITIONS:.0%}"
    return found
