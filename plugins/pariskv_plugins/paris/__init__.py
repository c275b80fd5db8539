"""ParisKV (arXiv 2602.07721), the default retriever: START READING HERE.

Sign patterns propose, 4-bit codes decide: the tokens whose patterns agree most with the query are the candidates,
and their codes give estimates of the inner products, by which the best are kept.

    paper.py    `pariskv-paper`: the method as published
    format.py   what is stored of a key
    frame.py    `pariskv`: the frame in which keys are encoded, learnt from the prompt
    framed.py   `pariskv`: votes and estimates in that frame

`pariskv` is the same method with what measures better switched on; each option can be switched off.
"""

from __future__ import annotations

from pariskv.hookspecs import Register, hookimpl
from pariskv_plugins.paris.framed import Options, ParisKV
from pariskv_plugins.paris.paper import PaperOptions, ParisPaper

__all__ = ["Options", "PaperOptions", "ParisKV", "ParisPaper"]


@hookimpl
def register_retrievers(register: Register) -> None:
    register("pariskv", ParisKV, options=Options)
    register("pariskv-paper", ParisPaper, options=PaperOptions)
