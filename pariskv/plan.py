"""`pariskv plan`: what a request of a configuration takes, and the largest that a machine can hold.

Machine   the memory at hand, or one that is described
describe  the configuration's model without its weights, and its planner
plan      the figures of one context and batch, with dense attention beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from pariskv import memory
from pariskv.attention_memory import attention_bytes
from pariskv.config import Config
from pariskv.errors import ConfigError
from pariskv.memory import gigabytes
from pariskv.planner import Need, Planner, largest
from pariskv.resolve import GPU_ATTEND, GPU_STORE

if TYPE_CHECKING:
    from pariskv.plan_time import StepTime
    from pariskv.registry import Registry

MOST_TOKENS, MOST_ROWS = 1 << 30, 1 << 20
"""Where the search for the largest context and batch ends, where nothing else limits them."""

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    """Where a request would run.

    device         cpu: one memory for everything; cuda: a GPU beside a host
    device_memory  bytes of the GPU, None on a CPU, or where nobody says
    host_memory    bytes of the host, None where nobody says
    """

    device: torch.device
    device_memory: int | None
    host_memory: int | None

    @classmethod
    def of(cls, config: Config, device_memory: int | None = None, host_memory: int | None = None) -> Machine:
        """The machine at hand; with a device's memory described, a GPU of that size.

        Raises ConfigError for a device's memory where the configuration wants a CPU.
        """
        wanted = config.model.device
        if wanted == "auto":
            wanted = "cuda" if device_memory is not None or torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(wanted)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"model.device={wanted!r}: a plan is for cpu or cuda; use auto, cpu or cuda")
        if device.type == "cpu" and device_memory is not None:
            raise ConfigError(
                "--device-memory: got a size, but model.device=cpu, and a CPU has the host's memory only; "
                "give --host-memory, or set model.device=cuda"
            )
        if device.type == "cuda" and device_memory is None:
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"model.device={wanted}: torch sees no CUDA device here; describe it by --device-memory, such as "
                    f"--device-memory 80GB"
                )
            device_memory = memory.available_bytes(device)
        if host_memory is None:
            host_memory = memory.available_bytes(HOST)
        return cls(device, device_memory, host_memory)

    @property
    def free(self) -> int | None:
        """The memory that weights and caches share: the GPU's, or the host's where there is no GPU."""
        return self.device_memory if self.device.type == "cuda" else self.host_memory


@dataclass(frozen=True)
class Described:
    """A configuration's model without its weights.

    weights         bytes of the weights
    context         positions that the model was made for, None where its configuration does not say or they may be
                    exceeded
    new             tokens of a context that are generated at most
    step_weights    bytes of the weights that a decode step reads
    prompt_weights  numbers of the matrices that every token of a prompt is multiplied by
    """

    planner: Planner
    weights: int
    context: int | None
    new: int
    step_weights: int
    prompt_weights: int


def for_machine(config: Config, device: torch.device) -> Config:
    """The configuration as it is resolved on such a device, with its CUDA kernels whether they are here or not."""
    if device.type != "cuda":
        return config
    store = GPU_STORE if config.store == "auto" else config.store
    attend = GPU_ATTEND if config.runtime.attend == "auto" else config.runtime.attend
    return replace(config, store=store, runtime=replace(config.runtime, attend=attend))


def describe(config: Config, device: torch.device, registry: Registry | None = None) -> Described:
    """What a plan needs of a configuration's model; reads its configuration, not its weights.

    Raises ModelError for a model that cannot be found or served.
    """
    from pariskv.integrations.described import describe_model

    return describe_model(for_machine(config, device), device, registry)


@dataclass(frozen=True)
class Plan:
    """What a request takes, in bytes, and the largest that fits, in tokens and rows.

    device       weights, codes, working_set (everything else at the largest moment), graph, total
    host         store, total
    dense        kv, total: the same request through a dense cache
    fits         into the machine, and the context into the model's
    max_context  at this batch, prompt and new tokens together;    max_batch  at this context
    limit        what binds the context: "memory", "the model's context" or "nothing"
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    dense: Mapping[str, int]
    fits: bool
    max_context: int
    max_batch: int
    limit: str
    need: Need

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        found = asdict(self)
        return {key: found[key] for key in ("device", "host", "dense", "fits", "max_context", "max_batch")}


def plan(model: Described, machine: Machine, context: int, batch: int) -> Plan:
    """The figures of `batch` rows of `context` tokens each, prompt and new ones together, on a machine."""
    search = _Search(model, machine)
    need = search.need(context, batch)
    is_cuda = machine.device.type == "cuda"
    # A CPU's store is in the host's memory, as everything is; it is listed there, as the report of a run does.
    store = need.held.hosted if is_cuda else need.held.store
    on_device = need.peak if is_cuda else max(0, need.peak - store)
    device = {
        "weights": model.weights,
        "codes": need.held.codes,
        "working_set": max(0, on_device - need.held.codes - need.graph),
        "graph": need.graph,
    }
    most, limit = search.max_context(batch)
    return Plan(
        {**device, "total": sum(device.values())},
        {"store": store, "total": store},
        dense(model, context, batch),
        search.fits(context, batch) and (model.context is None or context <= model.context),
        most,
        search.max_batch(context),
        limit,
        need,
    )


class _Search:
    """Which contexts and batches fit a machine."""

    def __init__(self, model: Described, machine: Machine):
        self.model, self.machine = model, machine

    def need(self, context: int, batch: int) -> Need:
        """What the request takes, over the store where it does not fit in a buffer."""
        prompt, new = split(context, self.model.new)
        planner = self.model.planner
        wanted = planner.config.prefill.history
        if wanted != "auto":
            return planner.estimate(batch, prompt, new, wanted)
        buffered = planner.estimate(batch, prompt, new, "buffer")
        return buffered if self._holds(buffered) else planner.estimate(batch, prompt, new, "store")

    def fits(self, context: int, batch: int) -> bool:
        """Whether the machine holds it."""
        return self._holds(self.need(context, batch))

    def _holds(self, need: Need) -> bool:
        free, host = self.machine.free, self.machine.host_memory
        if free is not None and self.model.weights + need.peak > free:
            return False
        return not need.held.hosted or host is None or need.held.hosted <= host

    def max_context(self, batch: int) -> tuple[int, str]:
        """The longest context at this batch, and what binds it.

        Where a zone begins and where a prompt is read in more than one chunk, a longer context can take less. So
        each stretch between such lengths is searched by itself, the longest first.
        """
        top = self.model.context or MOST_TOKENS
        for low, high in stretches(self.model, top):
            if found := largest(lambda context: self.fits(context, batch), low, high):
                limit = "memory" if found < top else "the model's context" if self.model.context else "nothing"
                return found, limit
        return 0, "memory"

    def max_batch(self, context: int) -> int:
        """The most rows at this context."""
        return largest(lambda batch: self.fits(context, batch), 1, MOST_ROWS)


def split(context: int, new_tokens: int) -> tuple[int, int]:
    """A context as prompt and new tokens: the new ones are its last, and the prompt has one at least."""
    prompt = max(1, context - new_tokens)
    return prompt, context - prompt


def stretches(model: Described, top: int) -> list[tuple[int, int]]:
    """Contexts (first, last) between which a longer one takes no less, the longest first."""
    planner, new = model.planner, model.new
    windows = [planner.windows[index] for index, one in planner.pipelines.items() if one.indexes != "none"]
    starts = {1, 2, planner.whole_prompt + new + 1}
    for window in windows:
        first = max(window.dense_below, window.sink + window.local + window.update)
        starts |= {first, first + new}
    ordered = sorted(start for start in starts if start <= top)
    ends = [start - 1 for start in ordered[1:]] + [top]
    return [(low, high) for low, high in zip(ordered, ends, strict=True) if low <= high][::-1]


def dense(model: Described, context: int, batch: int) -> dict[str, int]:
    """The same request through transformers' dense cache: its keys and values, and all of it with the weights."""
    planner = model.planner
    prompt, new = split(context, model.new)
    infos = [planner.info(index, batch) for index in sorted(planner.pipelines)]
    each = [2 * batch * one.kv_heads * one.head_dim * one.dtype.itemsize for one in infos]
    forward = planner.model()
    stock = forward.stock(batch, context) if forward else 0
    kv = sum(each) * context + stock
    if forward is None:
        return {"kv": kv, "total": model.weights + kv}
    chunk = planner.chunk(prompt)
    # A cache that grows by concatenation has one layer twice for a moment.
    trace = forward.at(batch, chunk, False)
    attention = max(at + attention_bytes(info, chunk, prompt) for at, info in zip(trace.attend, infos, strict=True))
    twice = max(each) * prompt if chunk < prompt else 0
    reading = sum(each) * prompt + max(*trace.before, attention, trace.after) + twice
    decoding = kv + max(each) * context + max(forward.at(batch, 1, False).values) if new else 0
    return {"kv": kv, "total": model.weights + max(reading, decoding) + 8 * batch * prompt}


def as_table(plan: Plan, context: int, batch: int, time: StepTime | None = None) -> Table:
    """The plan for people, and the last step's time where there is one."""
    title = f"{context:,} tokens in each of {batch:,} rows: {'fits' if plan.fits else 'does not fit'}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("pariskv", "dense"):
        table.add_column(name, justify="right")
    for label, key in (("weights", "weights"), ("codes", "codes"), ("working set", "working_set"), ("graph", "graph")):
        table.add_row(label, gigabytes(plan.device[key]), gigabytes(plan.device[key]) if key == "weights" else "")
    table.add_row("keys and values, all of them", "", gigabytes(plan.dense["kv"]))
    table.add_row("device in all", gigabytes(plan.device["total"]), gigabytes(plan.dense["total"]))
    table.add_row("store in host memory", gigabytes(plan.host["store"]), "")
    table.add_row("the largest moment", plan.need.moment, "")
    table.add_row("the prompt's history while it is read", plan.need.history, "")
    table.add_row(f"largest context at this batch (limit: {plan.limit})", f"{plan.max_context:,}", "")
    table.add_row("largest batch at this context", f"{plan.max_batch:,}", "")
    if time is not None:
        if time.prompt_s is not None:
            table.add_row("reading the prompts takes at least", *[f"{time.prompt_s:.2f} s"] * 2)
        table.add_row("a step takes at least", f"{time.step_ms:.2f} ms", f"{time.dense.step_ms:.2f} ms")
        table.add_row("tokens per second at most", f"{time.tokens_per_s:,.1f}", f"{time.dense.tokens_per_s:,.1f}")
    return table
