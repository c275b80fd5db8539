"""Instruments: how much of dense attention a retriever finds on real texts, as it drifts, and in the needle test.

fidelity.py   along a text, layer by layer, against dense attention
drift.py      recall while generation moves away from the prompt, of a real model or synthetic keys
needle.py     the needle grid, length by depth
results.py    what they have in common: JSON, tables, definitions in words, the manifest
charts.py     pictures, in a file or as parts of a page
page.py       a result as one HTML file that needs nothing else (`--report`)
cli.py        `pariskv eval`
"""
