"""The plugin: what pariskv calls when it looks for retrievers."""

from pariskv import Register, hookimpl

from pariskv_random_projection.retriever import Options, RandomProjection

__all__ = ["Options", "RandomProjection"]


@hookimpl
def register_retrievers(register: Register) -> None:
    register("random-projection", RandomProjection, options=Options, api=1)
