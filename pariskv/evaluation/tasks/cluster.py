"""The jobs of a run on a Ray cluster: a model on every GPU, jobs dealt out as workers become free.

Only the driver writes the folder. A worker that is lost is replaced, and its job is done again.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pariskv.config import Config
from pariskv.errors import ConfigError, ParisKVError
from pariskv.evaluation.tasks.evaluation import Answered, Evaluation, Job, Settings
from pariskv.evaluation.tasks.folder import RunFolder, Shard, description
from pariskv.evaluation.tasks.launch import Progress, own_jobs

LOCAL = "local"
"""The address of a cluster that is started on this machine, and stopped in the end."""

ATTEMPTS = 3
"""How often a job is given to a worker before the run gives up."""

TABLE_SECONDS = 60.0
"""A table of what is there so far, at most so often."""


class Worker:
    """A loaded model on one machine, in a process of its own."""

    def __init__(self, config: Config, settings: Settings):
        from pariskv.integrations.language_model import LanguageModel

        self.evaluation = Evaluation(LanguageModel.load(config), config, settings)

    def describe(self) -> tuple[dict[str, Any], list[Job]]:
        """What the run is, and its jobs."""
        return description(self.evaluation), self.evaluation.jobs()

    def answer(self, job: Job) -> Answered:
        """Do one job."""
        return self.evaluation.answer(job)


class Cluster:
    """Workers on a Ray cluster.

    workers  how many, None: one for each GPU, or for each core where there is no GPU
    """

    def __init__(self, ray: Any, config: Config, settings: Settings, workers: int | None, kind: type = Worker):
        self.ray, self.arguments = ray, (config, settings)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if config.model.device != "cpu" else 0
        self.size = workers or gpus or max(1, int(resources.get("CPU", 1)))
        self.actor = ray.remote(num_gpus=1 if gpus else 0, num_cpus=1)(kind)
        self.workers = [self._start() for _ in range(self.size)]

    def _start(self) -> Any:
        return self.actor.remote(*self.arguments)

    def describe(self) -> tuple[dict[str, Any], list[Job]]:
        """What the run is, and its jobs, from whichever worker is ready first.

        Raises ConfigError where every worker is lost before it has loaded its model.
        """
        waiting = [worker.describe.remote() for worker in self.workers]
        while True:
            (first, *_), waiting = self.ray.wait(waiting)
            try:
                found: tuple[dict[str, Any], list[Job]] = self._get(first)
            except self.ray.exceptions.RayActorError as error:
                if not waiting:
                    raise ConfigError(
                        f"--ray: all {self.size} workers were lost before they had loaded their model "
                        f"({str(error).splitlines()[0]}); look at their memory, or give --workers"
                    ) from error
            else:
                return found

    def run(
        self,
        jobs: Sequence[Job],
        folder: RunFolder,
        shard: Shard,
        progress: Progress = lambda *_: None,
        on_table: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer what the folder lacks of a shard.

        on_table  called now and then, when answers came in
        Raises ConfigError where a job loses its worker again and again.
        """
        own = own_jobs(jobs, shard)
        waiting = deque(job for job in own if folder.lacks(job.keys))
        idle, lost = list(self.workers), Counter[Job]()
        running: dict[Any, tuple[Any, Job]] = {}
        shown = time.monotonic()
        while waiting or running:
            while waiting and idle:
                worker, job = idle.pop(), waiting.popleft()
                running[worker.answer.remote(job)] = (worker, job)
            progress(f"{len(running)} workers", len(own) - len(waiting) - len(running), len(own))
            (answered, *_), _ = self.ray.wait(list(running))
            worker, job = running.pop(answered)
            try:
                folder.add(self._get(answered))
            except self.ray.exceptions.RayActorError as error:
                lost[job] += 1
                if lost[job] >= ATTEMPTS:
                    task, item, *_ = job.keys[0]
                    raise ConfigError(
                        f"{task}, item {item}: {ATTEMPTS} workers were lost over it ({str(error).splitlines()[0]}); "
                        f"look at their memory, or lower evaluation.batch; the same command goes on from what is done"
                    ) from error
                waiting.appendleft(job)
                worker = self._start()
            idle.append(worker)
            if time.monotonic() - shown > TABLE_SECONDS:
                on_table()
                shown = time.monotonic()

    def _get(self, reference: Any) -> Any:
        """A result; an error of ours as it was raised on the worker."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ParisKVError):
                raise error.cause from error
            raise


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster: `auto` (the one of this machine), an address, or `local` (a new one here)."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--ray needs Ray: pip install 'pariskv[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address == LOCAL else None)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"--ray {address}: no cluster answers there ({error}); start one by `ray start --head`, or give local"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
