"""The retrievers that ship with pariskv, each a plugin like any third party's."""
