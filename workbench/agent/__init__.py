"""One host's process keeper: zygotes, ranks, black boxes, stacks, logs. Knows neither Dask nor Jupyter.

`wire zygote bootstrap fresh rank excepthook contract environment` run inside zygotes and ranks, maybe under another
interpreter: standard library and torch only. The others run in the worker's process.
"""
