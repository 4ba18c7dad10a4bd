"""Flags of one command: defined on its own FlagValues, parsed strictly, explained by --help.

Each command has only its own flags, so a flag that would be ignored is an error instead.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class CommandError(Exception):
    """Ends a command with one line on stderr and an exit code, without a traceback."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        """The line, and the code of the process."""
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(CommandError):
    """The command line asks for something that cannot be."""

    def __init__(self, message: str) -> None:
        """The line says which flag, which value and what would be right."""
        super().__init__(message, EXIT_USAGE)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One `octavo` command.

    Attributes:
      name: The word after `octavo`.
      summary: One line for the list of commands.
      positionals: Names of its arguments that are no flags, in order; all are needed.
      program: The words before its name.
      define_flags: Defines its flags.
      run: Does it, given the parsed flags and the positionals; returns the exit code.
    """

    name: str
    summary: str
    define_flags: Callable[[flags.FlagValues], None]
    run: Callable[[flags.FlagValues, Sequence[str]], int]
    positionals: tuple[str, ...] = ()
    program: str = "octavo"


def run_command(command: Command, arguments: Sequence[str]) -> int:
    """Parses the command's arguments and runs it; explains errors in one line on stderr.

    Returns:
      The exit code: 0, or 2 for arguments that cannot be, or what the command says.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    command.define_flags(values)
    try:
        positionals = _parse(command, values, arguments)
        if values.help:
            print(help_text(command, values))
            return 0
        return command.run(values, positionals)
    except CommandError as error:
        return _fail(command, str(error), error.exit_code)
    except ValueError as error:
        # Records name the field at fault first, and fields are called as their flags are.
        if str(error).split(" ", 1)[0] not in values:
            raise
        return _fail(command, f"--{error}", EXIT_USAGE)


def help_text(command: Command, values: flags.FlagValues) -> str:
    """What --help prints: each flag with its meaning and default, in order of definition."""
    lines = [_usage(command), "", command.summary, "", "flags:"]
    for name in values:
        flag = values[name]
        if name != flag.name:
            continue  # a short name
        lines.append(f"  --[no]{name}" if flag.boolean else f"  --{name}={_kind(flag)}")
        # absl adds in its own words that a flag may be given again; ours say so too.
        meaning, *_ = (flag.help or "").split(";\n    repeat this option")
        lines += textwrap.wrap(
            f"{meaning} {_default_text(flag)}".strip(),
            width=96,
            initial_indent="      ",
            subsequent_indent="      ",
        )
    lines += ["  --flagfile=path", "      Read more flags from a file, one a line."]
    return "\n".join(lines)


def is_given(values: flags.FlagValues, name: str) -> bool:
    """Whether the command line sets the flag, be it to its default."""
    return bool(values[name].present)


def check_utf8(name: str, text: str) -> None:
    """Raises UsageError for text that is not UTF-8.

    Python hands over such bytes of a command line or a terminal as lone surrogates, which nothing
    can send.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{name} is {text!a}; it must be UTF-8")


def _usage(command: Command) -> str:
    words = [command.program, command.name, *command.positionals, "[flags]"]
    return f"usage: {' '.join(words)}"


def _kind(flag: flags.Flag[Any]) -> str:
    return {"int": "INT", "float": "NUMBER"}.get(flag.flag_type(), "TEXT")


def _default_text(flag: flags.Flag[Any]) -> str:
    """Nothing for flags that are off or open by default; their help says what that means."""
    is_open = flag.default is None or flag.default is False or flag.default == []
    return "" if is_open else f"(default: {flag.default})"


def _parse(command: Command, values: flags.FlagValues, arguments: Sequence[str]) -> tuple[str, ...]:
    """Sets the flags; returns the positionals."""
    try:
        _, *positionals = values([f"{command.program} {command.name}", *arguments])
    except flags.IllegalFlagValueError as error:
        raise UsageError(_illegal_value(values, error)) from error
    except flags.Error as error:
        raise UsageError(str(error).removeprefix("ERROR:: ")) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--flagfile has bytes that are no UTF-8: {error}") from error
    except ValueError as error:  # --noFLAG=VALUE: absl has no class for it
        raise UsageError(str(error)) from error
    if not values.help:
        num_given, num_wanted = len(positionals), len(command.positionals)
        if num_given < num_wanted:
            missing = command.positionals[num_given]
            raise UsageError(f"{missing} is missing; {_usage(command)}")
        if num_given > num_wanted:
            raise UsageError(f"{positionals[num_wanted]!r} is too much; {_usage(command)}")
    return tuple(positionals)


def _illegal_value(values: flags.FlagValues, error: flags.IllegalFlagValueError) -> str:
    """In our words: absl's are `flag --NAME=VALUE: WHY`, and its WHY is often Python's."""
    message = str(error).removesuffix(f": {error.__context__}")
    found = re.fullmatch(r"flag --(\w+)=(.*)", message, re.DOTALL)
    if found is None:
        return str(error)
    name, value = found.groups()
    return f"--{name} is {value!a}; it must be {_wanted(values[name])}"


def _wanted(flag: flags.Flag[Any]) -> str:
    if flag.boolean:
        return "true or false"
    if isinstance(flag.parser, flags.EnumParser):
        return f"one of {', '.join(flag.parser.enum_values)}"
    wanted = flag.parser.syntactic_help  # "an integer in the range ...", but "number >= 1.0"
    return wanted if wanted.startswith("a") else f"a {wanted}"


def _fail(command: Command, message: str, exit_code: int) -> int:
    print(f"{command.program} {command.name}: error: {message}", file=sys.stderr)
    return exit_code
