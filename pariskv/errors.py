"""Every error that a user can meet, and what each is for.

ParisKVError                 anything below: the message says what was wanted, given, where, and what to do
├── ConfigError              the YAML, an override or a command-line value is wrong
├── ModelError               the model cannot be found, loaded or served
├── PluginError
│   ├── PluginLoadError      a plugin could not be imported or registered, or its factory failed
│   ├── PluginContractError  a plugin breaks the contract of `pariskv.hookspecs`
│   └── BindingError         the layer's stages do not fit together (no producer of a format, ...)
├── PrefixError              a saved prefix cannot be written or read, or does not belong here
├── ShapeError               a tensor has the wrong shape, dtype or device
└── CapacityError            the request needs more memory or more positions than there are
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ParisKVError(Exception):
    """The base of every error that pariskv raises on purpose."""


class ConfigError(ParisKVError):
    """A configuration value is missing, unknown, of the wrong type or out of range."""


class ModelError(ParisKVError):
    """A model cannot be found, loaded or served."""


class PluginError(ParisKVError):
    """The base of what can go wrong with a plugin."""


class PluginLoadError(PluginError):
    """A plugin could not be imported or registered, or its factory failed."""


class PluginContractError(PluginError):
    """A plugin breaks the contract of `pariskv.hookspecs`."""


class BindingError(PluginError):
    """The stages chosen for a layer do not fit together."""


class PrefixError(ParisKVError):
    """A saved prefix cannot be written or read, or does not belong to the model and configuration at hand."""


class ShapeError(ParisKVError):
    """A tensor has the wrong shape, dtype or device."""


class CapacityError(ParisKVError):
    """The request needs more memory or more positions than there are."""


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note, such as `at decode step 3`, to what is raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def described(error: BaseException) -> str:
    """An error as one line, with its notes, and its type where it is none of ours."""
    notes = "; ".join(getattr(error, "__notes__", []))
    kind = "" if isinstance(error, ParisKVError) else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    return f"{text} ({notes})" if notes else text
