"""A run from its jobs to its folder, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pariskv.evaluation.tasks.evaluation import Evaluation, Job
from pariskv.evaluation.tasks.folder import RunFolder, Shard

Progress = Callable[[str, int, int], None]
"""Called with (what is done, how many jobs of the shard are done, how many there are)."""


def own_jobs(jobs: Sequence[Job], shard: Shard) -> list[Job]:
    """The jobs of a shard."""
    return [job for job in jobs if shard.has(job.unit.index)]


def run_here(evaluation: Evaluation, folder: RunFolder, shard: Shard, progress: Progress = lambda *_: None) -> None:
    """Answer what the folder lacks of a shard, one job after the other; each is written when it is done."""
    jobs = own_jobs(evaluation.jobs(), shard)
    for done, job in enumerate(jobs):
        task = evaluation.tasks[job.unit.task].name
        progress(f"{task}, {job.retriever}", done, len(jobs))
        if folder.lacks(job.keys):
            folder.add(evaluation.answer(job))
    progress("done", len(jobs), len(jobs))
