"""The command line: the core's own commands, and those that packages register.

stoker's rooms on top register theirs as another package would (``basics/plugins.py``). A package is
imported when its command is called, and for the list of commands. One that cannot be imported is
listed with the reason, and stops no other command.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stoker.basics import plugins
from stoker.errors import StokerError
from stoker.version import __version__

# A command that cannot be imported takes any arguments, so that it always gives its reason.
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}

FOR_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""The context settings of commands that start a script: all behind it is the script's own."""
Script = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT|-m MODULE|LAUNCHER",
        help="The training script and its arguments, as you would give them to python; or a "
        "launcher such as torchrun with its own.",
    ),
]
"""The script that such a command starts."""


class CommandGroup(TyperGroup):
    """A group's own commands, and those that packages register below its name."""

    def list_commands(self, ctx: Any) -> list[str]:
        group = _group(ctx)
        registered = (
            name.removeprefix(group)
            for name in plugins.names(plugins.COMMANDS)
            if name.startswith(group)
        )
        own = super().list_commands(ctx)
        return sorted({*own, *(name for name in registered if "." not in name)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own, name = super().get_command(ctx, cmd_name), _group(ctx) + cmd_name
        if own is not None or name in plugins.names(plugins.COMMANDS):
            return own or _find_command(name)
        near = difflib.get_close_matches(cmd_name, self.list_commands(ctx))
        if near:
            ctx.fail(f"No such command {cmd_name!r}. Did you mean {' or '.join(near)}?")
        return None


def _group(ctx: Any) -> str:
    """Return what the registered names of a group's commands begin with, such as ``cache.``."""
    return "" if ctx.parent is None else f"{_group(ctx.parent)}{ctx.info_name}."


def _find_command(name: str) -> Any:
    """Return the command that is registered under a name; if it cannot be imported, a stand-in."""
    try:
        command = _command(plugins.load(plugins.COMMANDS, name))
    except Exception as error:  # another package's code may raise anything
        command = _broken_command(name, error)
    command.name = name.rpartition(".")[2]
    command.help = _unwrap_paragraphs(command.help)
    if not plugins.is_own(plugins.COMMANDS, name):
        command.rich_help_panel = "Commands of other packages"
    return command


def _command(found: Any, **settings: Any) -> Any:
    """Make a command of a function, or of a ``typer.Typer``."""
    if not isinstance(found, typer.Typer):
        if not callable(found):
            raise TypeError(f"a command is a function or a typer.Typer, not {found!r}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(**settings)(found)
        found = app
    return typer.main.get_command(found)


def _broken_command(name: str, error: Exception) -> Any:
    shown = name.replace(".", " ")

    def fail() -> None:
        typer.echo(f"stoker {shown}: {error}", err=True)
        raise typer.Exit(1)

    return _command(fail, help=f"Cannot be used: {error}", context_settings=_ANY_ARGUMENTS)


def _unwrap_paragraphs(text: str | None) -> str:
    """Return a help text with one line for each paragraph, which the terminal then wraps."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(each.replace("\n", " ") for each in paragraphs)


app = typer.Typer(
    name="stoker",
    cls=CommandGroup,
    help="Find out how long a training job waits for its data, and serve data to several jobs.\n\n"
    "Begin with: stoker analyze train.py\n\n"
    "stoker COMMAND --help shows an example of each command.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from the list, or a folder.")]


@contextlib.contextmanager
def report_errors(
    command: str, *errors: type[Exception], stopped: str = "stopped"
) -> Iterator[None]:
    """Report an error in a line on stderr, with exit status 1, or 130 after Ctrl-C."""
    expected: tuple[type[Exception], ...] = (OSError, StokerError, *errors)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(stopped, err=True)
        raise typer.Exit(130) from None
    except expected as error:
        typer.echo(f"stoker {command}: {error}", err=True)
        raise typer.Exit(1) from None


def check_outputs(*paths: Path | None) -> None:
    """Raise ValueError for a file that cannot be written, before the work whose result it gets."""
    for path in paths:
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    hidden=True,
    context_settings=_ANY_ARGUMENTS,
)
def demo() -> None:
    """Say where the demo is: in the repository, not in the package."""
    typer.echo("stoker demo: the demo is in stoker's repository: run scripts/demo there", err=True)
    raise typer.Exit(2)


caches = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="List, remove or serve the caches of this host.",
)
app.add_typer(caches, name="cache")


@caches.command("list")
def cache_list() -> None:
    """List this user's caches: their content, how full they are, and the processes that use them.

    Example: stoker cache list
    """
    from stoker.cache.inventory import print_table

    print_table()


@caches.command("remove")
def cache_remove(which: _Name) -> None:
    """Remove a cache that no process uses. Its examples are read from their source again.

    Example: stoker cache remove /scratch/cache
    """
    from stoker.cache.inventory import remove, resolve_name

    with report_errors("cache"):
        folder = resolve_name(which)
        remove(folder)
        typer.echo(f"removed {folder}")


for _own in (*app.registered_commands, *caches.registered_commands):
    _own.help = _unwrap_paragraphs(_own.callback and _own.callback.__doc__)


def main() -> None:
    """Run the command line."""
    app()
