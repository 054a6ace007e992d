"""The command line: finds commands by name, reads their words, and calls them.

stoker's rooms register commands as another package would (``basics/plugins.py``). A package is
imported when its command is called, and for the list of commands. One that cannot be imported is
listed with the reason, and stops no other command.

A command is a function. Its docstring is its help, its parameters are what it takes: those behind
``*`` are options, the others are arguments; ``bool`` is a flag. An option ``list[str]`` may be
given several times; an argument ``list[str]`` takes all from the first word that is no option.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from stoker.basics import plugins
from stoker.errors import StokerError
from stoker.version import __version__

# What stands above the list of a group's commands, by the group's name.
_GROUPS = {
    "": "Find out how long a training job waits for its data, and serve data to several jobs.\n\n"
    "Begin with: stoker analyze train.py\n\n"
    "stoker COMMAND --help shows an example of each command.",
    "cache": "List, remove or serve the caches of this host.",
}
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class Argument(NamedTuple):
    """What ``Annotated`` says of a command's parameter, beside its type.

    ``help`` is a sentence; ``metavar`` is shown for the value, by default a word for its type;
    ``least`` is the smallest number that is accepted.
    """

    help: str = ""
    metavar: str = ""
    least: float | None = None


Script = Annotated[
    list[str],
    Argument(
        "The training script and its arguments, as you would give them to python; or a launcher "
        "such as torchrun with its own.",
        metavar="SCRIPT|-m MODULE|LAUNCHER",
    ),
]
"""The script that a command starts: all behind its first word is the script's own."""


def main(words: Sequence[str] | None = None) -> None:
    """Run a command line; None: this process's own. Raises SystemExit where it does not succeed."""
    try:
        _call("", list(sys.argv[1:] if words is None else words))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextlib.contextmanager
def report_errors(
    command: str, *errors: type[Exception], stopped: str = "stopped"
) -> Iterator[None]:
    """Report an error in a line on stderr, with exit status 1, or 130 after Ctrl-C."""
    expected: tuple[type[Exception], ...] = (OSError, StokerError, *errors)
    try:
        yield
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        raise SystemExit(130) from None
    except expected as error:
        print(f"stoker {command}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def check_outputs(*paths: Path | None) -> None:
    """Raise ValueError for a file that cannot be written, before the work whose result it gets."""
    for path in paths:
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.absolute().parent}")


class _Parser(argparse.ArgumentParser):
    """Has a whole docstring as its help, and says what is wrong in one line."""

    def __init__(self, program: str, help_text: str) -> None:
        super().__init__(
            program,
            description=_wrap(help_text),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help shows all)\n")

    def read(self, words: Sequence[str], options: Iterable[str]) -> dict[str, Any]:
        """Return the values by their names; ``options`` are what a wrong one is compared with."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            what = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"there is no {what} {unknown[0]}{_guess(unknown[0], options)}")
        return vars(found)


def _wrap(text: str) -> str:
    """Fill each paragraph; one that is indented, an example, stays as it is."""
    width = shutil.get_terminal_size().columns - 2
    return "\n\n".join(
        each if each.startswith(" ") else textwrap.fill(each, width) for each in text.split("\n\n")
    )


def _guess(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known)
    return f": did you mean {' or '.join(near)}?" if near else ""


def _call(name: str, words: list[str]) -> None:
    """Call the command of a name, such as ``cache.list``; of a group, the one that words name."""
    program = " ".join(["stoker", *filter(None, name.split("."))])
    if not _is_group(name):
        try:
            command = _load(name)
        except Exception as error:  # another package's code may raise anything
            print(f"{program}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        _call_function(program, command, words)
        return
    below = _names_below(name)
    first = words[0] if words else "--help"
    if first in below:
        _call(below[first], words[1:])
        return
    parser = _Parser(program, _GROUPS.get(name, ""))
    parser.usage = f"{program} COMMAND ..."
    if not name:
        version = f"stoker {__version__}"
        parser.add_argument(
            "--version", action="version", version=version, help="show the version and exit"
        )
    if first in ("-h", "--help"):
        _list_commands(parser, below)
        parser.print_help()
        raise SystemExit(0 if words else 2)
    if not first.startswith("-"):
        parser.error(f"there is no command {first!r}{_guess(first, below)}")
    parser.read(words, ["--help", "--version"])


def _is_group(name: str) -> bool:
    return name in _GROUPS or name not in plugins.names(plugins.COMMANDS)


def _names_below(group: str) -> dict[str, str]:
    """Return the whole names of a group's commands and groups, by their last words."""
    start = f"{group}." if group else ""
    names = [name for name in plugins.names(plugins.COMMANDS) if name.startswith(start)]
    words = sorted({name.removeprefix(start).partition(".")[0] for name in names})
    return {word: start + word for word in words}


def _load(name: str) -> Callable[..., None]:
    command: Callable[..., None] = plugins.load(plugins.COMMANDS, name)
    if not callable(command):
        raise TypeError(f"a command is a function, not {command!r}")
    return command


def _list_commands(parser: _Parser, commands: dict[str, str]) -> None:
    """Add commands to a group's help, with the first paragraph of what they say of themselves."""
    own = parser.add_argument_group("commands")
    others = parser.add_argument_group("commands of other packages")
    for word, name in commands.items():
        section = others
        if _is_group(name):
            text = _GROUPS.get(name) or f"Commands: {', '.join(_names_below(name))}."
        else:
            try:
                text = inspect.getdoc(_load(name)) or ""
            except Exception as error:  # another package's code may raise anything
                text = f"Cannot be used: {error}"
        if name in _GROUPS or (not _is_group(name) and plugins.is_own(plugins.COMMANDS, name)):
            section = own
        section.add_argument(word, help=text.partition("\n\n")[0].replace("%", "%%"))


def _call_function(program: str, command: Callable[..., None], words: list[str]) -> None:
    """Read words as the signature of a command's function says, and call it."""
    parser = _Parser(program, inspect.getdoc(command) or "")
    parser.usage = f"{program} [OPTIONS]"
    hints = get_type_hints(command, include_extras=True)
    options = {"-h": False, "--help": False}  # whether a value follows
    has_script = False
    for name, parameter in inspect.signature(command).parameters.items():
        kind, is_list, about = _read_hint(hints[name])
        settings: dict[str, Any] = {"help": _describe(about, parameter)}
        if kind is bool:
            settings["action"] = "store_true"
        else:
            settings["type"] = _reader(kind, about.least)
            settings["metavar"] = about.metavar or _METAVARS[kind]
        if parameter.kind is parameter.KEYWORD_ONLY:
            option = f"--{name.replace('_', '-')}"
            options[option] = kind is not bool
            if parameter.default is parameter.empty:
                settings["required"] = True
            else:
                settings["default"] = parameter.default
            if is_list:
                settings["action"] = "append"
            parser.add_argument(option, dest=name, **settings)
        else:
            if is_list:
                has_script, settings["nargs"] = True, "+"
            parser.usage += f" {settings['metavar']}{' ...' * is_list}"
            parser.add_argument(name, **settings)
    if has_script:
        words = _set_script_apart(words, options)
    command(**parser.read(words, options))


def _read_hint(hint: Any) -> tuple[type, bool, Argument]:
    """Return the type of a parameter's value or values, whether it is a list, and its Argument."""
    about = Argument()
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)
    if get_origin(hint) in (Union, UnionType):  # with None, of an option that may be left out
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    is_list = get_origin(hint) is list
    return get_args(hint)[0] if is_list else hint, is_list, about


def _describe(about: Argument, parameter: inspect.Parameter) -> str:
    """Return the help of a parameter, with its default and bound."""
    notes = []
    if parameter.default is parameter.empty:
        notes.append("required")
    elif parameter.default not in (None, False, ""):
        notes.append(f"default: {parameter.default}")
    if about.least is not None:
        notes.append(f"at least {about.least:g}")
    text = f"{about.help} [{'; '.join(notes)}]" if notes else about.help
    return text.replace("%", "%%")


def _reader(kind: type, least: float | None) -> Callable[[str], Any]:
    """Return what makes a value of a word."""
    if least is None:
        return kind

    def read(word: str) -> Any:
        value = kind(word)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{word} is not at least {least:g}")
        return value

    read.__name__ = kind.__name__  # for argparse's errors
    return read


def _set_script_apart(words: list[str], options: dict[str, bool]) -> list[str]:
    """Put ``--`` before the script, which begins at the first word that is no option's."""
    at = 0
    while at < len(words) and (option := words[at].partition("=")[0]) in options:
        at += 2 if options[option] and option == words[at] else 1
    script = words[at:]
    return words if script[:1] == ["--"] or not script else [*words[:at], "--", *script]


def cache_list() -> None:
    """List this user's caches: their content, how full they are, and the processes that use them.

    Example: stoker cache list
    """
    from stoker.cache.inventory import print_table

    print_table()


def cache_remove(
    which: Annotated[str, Argument("A name from the list, or a folder.", metavar="NAME")],
) -> None:
    """Remove a cache that no process uses. Its examples are read from their source again.

    Example: stoker cache remove /scratch/cache
    """
    from stoker.cache.inventory import remove, resolve_name

    with report_errors("cache"):
        folder = resolve_name(which)
        remove(folder)
        print(f"removed {folder}")
