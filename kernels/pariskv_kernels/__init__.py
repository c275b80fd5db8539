"""The kernels of the default retriever: each folder's `naive.py` is the definition, on any device."""
