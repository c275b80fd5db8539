"""`pariskv new-plugin NAME`: a complete package with one retriever that works, to be changed into an idea of one's own.

The files lie in `template/`, with `<<name>>` where a value goes in. Our tests build, install, check and run what comes
out, so the template cannot rot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from pariskv.errors import ConfigError
from pariskv.hookspecs import HOOK_API
from pariskv.registry import RESERVED, Registry, own_version

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FIELD = re.compile(r"<<(\w+)>>")
SUFFIX = ".tmpl"
PREFIX = "pariskv-"
LONGEST = 40
TAKEN = (
    *("budget", "code-field", "codes", "config-error", "layer-info", "options", "query"),
    *("retriever", "selection", "tensor", "tensors"),
)
"""Names whose class would hide something that the template imports or defines."""


@dataclass(frozen=True)
class Names:
    """What a plugin is called, in each of the places where it has a name."""

    name: str
    """The retriever's, in YAML: `my-idea`."""

    @property
    def distribution(self) -> str:
        """On PyPI, and the new folder: `pariskv-my-idea`."""
        return f"{PREFIX}{self.name}"

    @property
    def package(self) -> str:
        """In Python: `pariskv_my_idea`."""
        return self.distribution.replace("-", "_")

    @property
    def class_name(self) -> str:
        """`MyIdea`."""
        return "".join(word.capitalize() for word in self.name.split("-"))

    @property
    def exported(self) -> list[str]:
        """What the package exports, in the order in which linters want it: constants, then classes."""
        names = ["NAME", "Options", self.class_name]
        return sorted(names, key=lambda name: (not (len(name) > 1 and name.isupper()), name))

    def values(self) -> dict[str, str]:
        """What the template's fields stand for."""
        return {
            "exported": "\n    ".join(f"{name}," for name in self.exported),
            "exported_names": "\n    ".join(f'"{name}",' for name in self.exported),
            "name": self.name,
            "hook_api": str(HOOK_API),
            "distribution": self.distribution,
            "package": self.package,
            "class_name": self.class_name,
            "pariskv_version": own_version(),
        }


def names_of(name: str, registry: Registry) -> Names:
    """The plugin's names; raises ConfigError for one that cannot be used, or that is taken here."""
    if not NAME.fullmatch(name) or len(name) > LONGEST or name in (*RESERVED, *TAKEN):
        raise ConfigError(
            f"new-plugin {name!r}: wanted lower-case letters and digits, words joined by hyphens, such as my-idea; "
            f"at most {LONGEST} characters, none of {', '.join((*RESERVED, *TAKEN))}"
        )
    if name.startswith(PREFIX):
        raise ConfigError(
            f"new-plugin {name}: the package is called {PREFIX}NAME by itself; give the retriever's name alone: "
            f"{name.removeprefix(PREFIX)}"
        )
    if name in registry.names():
        raise ConfigError(f"new-plugin {name}: {registry.origin(name)} offers a retriever of that name; choose another")
    return Names(name)


def create(names: Names, parent: Path) -> list[Path]:
    """Write the package into a new folder of `parent`; returns its files, the folder first.

    Raises ConfigError where the folder is there already or cannot be made.
    """
    folder = parent / names.distribution
    values = names.values()
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder}: is there already; remove it, or choose another --into") from error
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}; choose another --into") from error
    written = [folder]
    for source, path in _templates(files(__package__) / "template"):
        target = folder / path.replace("PACKAGE", names.package).replace("NAME", names.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(FIELD.sub(lambda match: values[match[1]], source.read_text(encoding="utf-8")), "utf-8")
        written.append(target)
    return written


def _templates(folder: Traversable, prefix: str = "") -> list[tuple[Traversable, str]]:
    """The template's files, each with its path in the new package."""
    found = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            found.append((entry, prefix + entry.name.removesuffix(SUFFIX)))
    return found
