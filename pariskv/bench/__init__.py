"""Benchmarks that anyone can run: `pariskv bench kernels | layer | decode | retrievers | memory | batching`, then
`markdown` and `plot`.

    cli.py        the commands
    timing.py     medians of CUDA graph replays, cycling through layers that do not fit into the L2
    synthetic.py  layers full of random tokens, consecutive steps that choose some of the same rows
    dense.py      what retrieval must beat: the better SDPA backend
    kernels.py, layer.py, decode.py, retrievers.py, memory.py, batching.py    what each command measures, row by row
    manifest.py, output.py, plots.py    where it ran; tables, JSON, Markdown; pictures

Nothing is imported from the plugins and kernels at import time. `docs/benchmarks.md` says what the figures mean.
"""
