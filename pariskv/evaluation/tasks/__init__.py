"""Published benchmarks on a model with dense attention and with retrievers, on the same items.

item.py       what a task is: items, sources, scores         ruler/, longbench2.py, gpqa.py, maths.py   the tasks
data.py       where their data come from                     catalogue.py   the tasks by name
answering.py  a batch of prompts, decoded by one retriever   evaluation.py  tasks x items x retrievers, in units
folder.py     what a run leaves, and goes on from            launch.py, cluster.py   units here, or on a Ray cluster
statistics.py, summary.py, report.py                         what the answers say
"""
