"""Many requests at a time: a file of prompts, a batch whose rows are refilled, a journal that survives a kill.

prompts    one prompt a line, JSON; a bad line is one failed request
batching   continuous batching over a model and its caches
journal    what is done, on the disk as soon as it is done; then the results in the prompts' order
serve      the three together: `pariskv run --prompts`, `Session.answer_file`
"""
