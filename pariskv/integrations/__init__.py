"""Where pariskv meets other libraries: the only folder that imports transformers, and only inside functions."""
