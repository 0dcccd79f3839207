"""Groups of verbs that know each by name and help; the module of a verb is imported when the verb runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

Verbs = Mapping[str, tuple[str, str]]
"""Verb → module with register(app), and the line in --help. A new verb is one line and one file."""


class LazyGroup(TyperGroup):
    """Each command is a stand-in that carries help, until it is called."""

    verbs: Verbs

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {verb: TyperCommand(verb, help=text) for verb, (_, text) in self.verbs.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the table."""
        return list(self.verbs)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of its stand-in."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(self.verbs, str(name)) if name in self.verbs else command, rest


def lazy_group(verbs: Verbs) -> type[LazyGroup]:
    """The class of a group with these verbs, for typer.Typer(cls=…)."""
    return type("LazyGroup", (LazyGroup,), {"verbs": verbs})


def load_verb(verbs: Verbs, verb: str) -> Any:
    """Import a verb's module and build its command, or group of commands."""
    parent = typer.Typer(callback=lambda: None)
    importlib.import_module(verbs[verb][0]).register(parent)
    return typer.main.get_group(parent).commands[verb]
