"""What every command shares: the object that it is given, its parameters, its help and its errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tiledsched.cli import output, problems, renamed
from tiledsched.core import config, problem, registry
from tiledsched.core.device import ARCHS, arch_named, arch_spec
from tiledsched.core.errors import ConfigError, DatabaseError, MeasureError
from tiledsched.measure import nvml
from tiledsched.store.records import PROVENANCES
from tiledsched.tuning.options import Options, OptionSpec, options_of

if TYPE_CHECKING:
    from tiledsched.measure.runner import Device
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.resources import Tools
    from tiledsched.tuning.session import Session

SCHEMA_VERSION = 1
USUAL_KERNEL = "attention"
"""The kernel of a command that names none."""
USUAL_ARCH = "sm_121"
"""The arch of a command that names none, on a machine without a GPU."""
KERNEL_HELP = "a kernel that ships (attention, matmul, ...), package.module:Class or path/file.py:Class"
DB_HELP = "database, a path or URL (default: TILEDSCHED_DB, or tuning.db in the user's data folder)"
FILE, FOLDER = click.Path(dir_okay=False), click.Path(file_okay=False)
MOST_SECONDS = 1e8
"""The longest time that a flag sets, in seconds."""
EVERYWHERE = "Every command"
"""The heading of the options that all commands have."""
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[..., Callable[[Decorated], Decorated]]


@dataclass
class Invocation:
    """One call of the command line: what all its commands can ask for. Tests put fakes in its fields."""

    words: list[str] = field(default_factory=list)
    """What was typed after `tiledsched`."""
    devices: Callable[[], Sequence[Device]] = nvml.devices
    """Lists the GPUs of this machine."""
    tools: Tools | None = None
    """How a session makes what it works with; None for the compiler and the GPU of this machine."""
    db: str | None = None
    """The database that `--db` names."""
    json: bool = False
    """Whether `--json` asks for JSON on standard output."""
    kernel_word: str = USUAL_KERNEL
    """The kernel, as it was typed."""

    def settings(self, **flags: Any) -> config.Settings:
        """The settings, those that flags of the command give first."""
        return config.load_settings({"db": self.db, **flags})

    def session(self, arch: str, jobs: int | None = None, **flags: Any) -> Session:
        """A session for an arch, with the settings that flags of the command give."""
        from tiledsched.tuning.session import Session

        return Session(arch, settings=self.settings(**flags), jobs=jobs, tools=self.tools)

    def open_db(self, *, read_only: bool = False) -> TuningDB:
        """The database of this call."""
        from tiledsched.store.db import TuningDB

        return TuningDB.open(self.settings().db, read_only=read_only)

    def print(self, value: dict[str, Any], text: str | Callable[[], None] = "") -> None:
        """Print a result: as JSON where that was asked for, else as text, or by calling the function that prints it.

        JSON takes what the values' `to_json` gives, and the text of those that have none, such as paths.
        """
        if self.json:
            print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2, default=_as_json))
        elif callable(text):
            text()
        else:
            print(text)

    def gpus(self) -> Sequence[Device]:
        """The GPUs here; none where there is no GPU, or its driver does not answer."""
        try:
            return self.devices()
        except MeasureError:
            return ()

    def arch(self, given: str | None) -> str:
        """The arch that `--arch` names, or that of the first GPU here, or the usual one; what was not given is announced."""
        if given is not None:
            return given
        found = next((device.arch for device in self.devices()), USUAL_ARCH)
        output.note(f"tiledsched: for {found}; --arch names another")
        return found

    def archs(self, given: Sequence[str] | None) -> list[str]:
        """The archs that `--arch` names, or those of the GPUs here.

        Raises:
            ConfigError: none is named, and there is no GPU.
        """
        found = list(given or ()) or sorted({device.arch for device in self.devices()})
        if not found:
            why = nvml.why_unusable() or "there is no GPU here to tell the arch by"
            raise ConfigError(f"{why}; pass --arch, e.g. --arch sm_90")
        return found


def _as_json(value: Any) -> Any:
    return value.to_json() if hasattr(value, "to_json") else str(value)


def made_folder(path: str) -> Path:
    """The folder that results are written to, made where it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}; give another one") from error
    return Path(path)


class Option(click.Option):
    """An option that stands under a heading in the help of its command."""

    def __init__(self, *names: Any, heading: str = "Options", **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading


class Argument(click.Argument):
    """A positional argument with a line of help. Click has that from 8.5 on."""

    def __init__(self, *names: Any, help: str = "", **more: Any) -> None:
        super().__init__(*names, **more)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Its name and its line of help."""
        return self.human_readable_name, self.help or ""


class _Explained(click.Command):
    """A command that knows what took the place of its old flags, and whose help has headings."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters, then the options of the program, which may stand anywhere on the line, then `--help`."""
        own = super().get_params(ctx)
        shared = [each for each in PROGRAM_OPTIONS if each not in own]
        return [*self.params, *shared, *own[len(self.params) :]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["tiledsched.words"] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            renamed.check_flag(ctx.command_path, error.option_name)
            raise
        except click.UsageError as error:
            for word in re.findall(r"unexpected extra arguments? \((.+)\)", error.message):
                check_word(word)
            for flag, word in re.findall(r"'(--\w+)': '(\w+)' is not one of", error.format_message()):
                renamed.check_flag(ctx.command_path, f"{flag} {word}")
            error.ctx = error.ctx or ctx
            raise

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: from 8.5 on click would write the arguments here, and they stand with the options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the parameters under their headings, and last what is particular to the kernel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                usual = "Arguments" if isinstance(param, click.Argument) else EVERYWHERE
                sections.setdefault(getattr(param, "heading", usual), []).append(record)
        sections[EVERYWHERE] = sections.pop(EVERYWHERE)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)


class Command(_Explained):
    """A command."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write how problems of the kernel are named, where the command takes problems."""
        if any(param.name == "problem" for param in self.params):
            kernel = _named_kernel(ctx.meta["tiledsched.words"])
            with formatter.section(f"Problems of {registry.title_of(kernel)}"):
                formatter.write_dl(problems.describe_kernel(kernel), col_max=26)


def _named_kernel(words: Iterable[str]) -> problem.KernelClass:
    """The kernel that a command's words name, as far as it can be told without parsing them; else the usual one."""
    words = list(words)
    named = next(
        (word for word in words if word in registry.SHIPPED or (":" in word and "=" not in word)), USUAL_KERNEL
    )
    return _find_kernel(named, words)


def _find_kernel(named: str, words: Sequence[str]) -> problem.KernelClass:
    """The kernel of a name. One that is known from calls of exhaustive_search in the database is taken from there: its module, or
    the program that made the calls, is not imported.

    Args:
        named: the name.
        words: what was typed, which may name the database.
    """
    place, _, name = named.rpartition(":")
    if place and not (os.path.isfile(place) and name in registry.declared_names(Path(place))[0]):
        from tiledsched.remember.declaration import stored_kernel

        places = [after for word, after in itertools.pairwise(words) if word == "--db"]
        places += [word.removeprefix("--db=") for word in words if word.startswith("--db=")]
        with contextlib.suppress(DatabaseError):  # whoever needs the database says what is wrong with it
            stored = stored_kernel(named, places[-1] if places else config.load_settings().db)
            if stored is not None:
                return stored
    return registry.load_kernel(named)


class CommandGroup(_Explained, click.Group):
    """Commands under one name. `sections` are headings of its help, each with the commands below it."""

    def __init__(self, *given: Any, sections: Mapping[str, Sequence[click.Command]], **more: Any) -> None:
        super().__init__(*given, **more)
        self.sections = sections
        for each in itertools.chain(*sections.values()):
            self.add_command(each)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and after them the options."""
        for heading, commands in self.sections.items():
            with formatter.section(heading):
                listed, above = commands, ""
                if len(commands) == 1 and isinstance(
                    commands[0], CommandGroup
                ):  # a section of its own lists what is in it
                    listed, above = [*commands[0].commands.values()], f"{commands[0].name} "
                formatter.write_dl([(f"{above}{each.name}", _first_sentence(each)) for each in listed], col_max=26)
        super().format_options(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of a command line. Without any word, the help is shown."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say what took the place of an old one."""
        renamed.check_command(f"{ctx.command_path} {args[0]}")
        return super().resolve_command(ctx, args)


def _first_sentence(command: click.Command) -> str:
    return (command.help or "").partition(".\n")[0].replace("\n", " ").rstrip(".")


def check_word(word: str) -> None:
    """Make sure that a word in the place of a kernel is not what a flag takes.

    Raises:
        ConfigError: it is; the message names the flag.
    """
    fits = {"--arch": arch_named(word) in ARCHS, "--provenance": word in PROVENANCES, "-p": "=" in word}
    for flag in filter(fits.get, fits):
        raise ConfigError(f"{word} is no kernel; pass it with its flag: {flag} {word}")


def _kernel(ctx: click.Context, param: click.Parameter, value: str) -> problem.KernelClass:
    """The kernel of a name. A user's file is imported only where it is named."""
    ctx.ensure_object(Invocation).kernel_word = value
    try:
        return _find_kernel(value, ctx.meta["tiledsched.words"])
    except ConfigError:
        check_word(value)
        raise


def _kernel_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name under which tables list a kernel. One that is not known here is taken at its word."""
    try:
        ctx.ensure_object(Invocation).kernel_word = value or ""
        return value and _find_kernel(value, ctx.meta["tiledsched.words"]).name
    except ConfigError:
        check_word(value or "")
        from tiledsched.remember.declaration import names_of

        return names_of(value or "")[0]


def _shipped_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The kernels that ship and begin like that, for a shell."""
    return [name for name in registry.SHIPPED if name.startswith(incomplete)]


class CommaList(click.ParamType):
    """Words with commas between them, each once."""

    name = "list"

    def __init__(self, each: click.ParamType = click.STRING) -> None:
        self.each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Each word, converted by the type of the words."""
        words = [word.strip() for word in value.split(",") if word.strip()]
        return list(dict.fromkeys(self.each.convert(word, param, ctx) for word in words or [value]))


class Integer(click.IntRange):
    """An integer in a range."""

    name = "integer"


class Number(click.FloatRange):
    """A number in a range. Click lets NaN into every range: no comparison with it is true."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        found = float(super().convert(value, param, ctx))
        return self.fail(f"{value!r} is not a number", param, ctx) if math.isnan(found) else found


class Seconds(click.types.FloatParamType):
    """A time in seconds. One that is longer than clocks take, such as inf, is cut to three years."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The time.

        Raises:
            click.BadParameter: it is no number, or below 0.
        """
        found: float = super().convert(value, param, ctx)
        if not found >= 0:  # nor is it NaN
            self.fail(f"{value!r} is no time in seconds, which is 0 or more", param, ctx)
        return min(found, MOST_SECONDS)


class ArchType(click.ParamType):
    """An arch, by its name or by that of one of its GPUs."""

    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The arch, e.g. sm_90 for h200.

        Raises:
            ConfigError: nothing is known of such an arch; the message lists those that are known.
        """
        arch = arch_named(value)
        arch_spec(arch)
        return arch


option: Decorator = functools.partial(click.option, cls=Option)
"""An option of a command, under `heading`."""
argument: Decorator = functools.partial(click.argument, cls=Argument)
"""A positional argument of a command, with `help`."""


def several(*decorators: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Several decorators as one, the first outermost."""
    return lambda function: functools.reduce(lambda inner, outer: outer(inner), reversed(decorators), function)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep an option that all commands have where each finds it."""
    if value:
        setattr(ctx.find_object(Invocation), str(param.name), value)


def _log(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        logging.getLogger().setLevel(logging.DEBUG)


PROGRAM_OPTIONS: Sequence[click.Option] = [
    Option(["--db"], metavar="URL", expose_value=False, callback=_remember, heading=EVERYWHERE, help=DB_HELP),
    Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=_remember,
        heading=EVERYWHERE,
        help="print the result as JSON",
    ),
    Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        callback=_log,
        heading=EVERYWHERE,
        help="log more to stderr",
    ),
]
"""The options of the program, which every command takes, too."""
kernel_argument = argument(
    "kernel",
    callback=_kernel,
    shell_complete=_shipped_names,
    required=False,
    default=USUAL_KERNEL,
    metavar="[KERNEL]",
    help=f"{KERNEL_HELP}; by default {USUAL_KERNEL}",
)
kernel_filter = argument(
    "kernel",
    callback=_kernel_name,
    shell_complete=_shipped_names,
    required=False,
    metavar="[KERNEL]",
    help=f"only this kernel: {KERNEL_HELP}",
)
kernel_option = option(
    "--kernel", callback=_kernel_name, default="", metavar="NAME", help="only this kernel, named as elsewhere"
)
filter_option = option(
    "-p",
    "--problem",
    multiple=True,
    metavar="K=V,...",
    heading="Problems",
    help="only problems with these values; what is not named may be anything. May be repeated",
)
problem_options = several(
    option(
        "-p",
        "--problem",
        multiple=True,
        metavar="K=V,...",
        heading="Problems",
        help="problems by their sizes; with : between values, every combination. May be repeated",
    ),
    option("--suite", metavar="NAME[,NAME]", heading="Problems", help="named sets of problems"),
)


def generated_options(cls: type[Options], *only: str, heading: str = "Options") -> Callable[[Decorated], Decorated]:
    """A flag for each option of an options class of `tiledsched.tuning.options`, or for some of them."""
    return several(*(_generated(each, heading) for each in options_of(cls) if not only or each.name in only))


def _generated(each: OptionSpec, heading: str) -> Callable[[Decorated], Decorated]:
    kind: Any = each.type
    if each.choices:
        kind = click.Choice(each.choices)
    elif each.is_file:
        kind = FILE
    elif each.metavar == "SECONDS":
        kind = Seconds()
    elif each.minimum is not None:
        kind = (Integer if each.type is int else Number)(each.minimum)
    usual = each.default_help or (f"{each.default:g}" if each.type is float else each.default)
    return option(
        each.flag,
        each.name,
        type=kind,
        default=each.default,
        is_flag=each.type is bool,
        metavar=each.metavar or None,
        heading=heading,
        help=each.help if each.type is bool else f"{each.help} (default: {usual})",
    )


def arch_option(text: str, *, many: bool = False, **more: Any) -> Callable[[Decorated], Decorated]:
    """`--arch`: one arch; with `many`, a list of them. None where it is not given."""
    kind, metavar = (CommaList(ArchType()), "ARCH[,ARCH]") if many else (ArchType(), "ARCH")
    return option("--arch", type=kind, metavar=metavar, help=text, **more)


target_option = arch_option(
    f"which GPUs, e.g. sm_90 or h200 (default: the GPU here, or else {USUAL_ARCH})", heading="Problems"
)
jobs_option = option("--jobs", type=Integer(1), metavar="N", help="compile processes (default: one per CPU)")


def command(name: str, *, cls: type[Command] = Command, **more: Any) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command of class `cls`.

    The function is given the Invocation first, and its parameters by name. It returns the exit code; None is 0. Its docstring
    is the command's help.
    """
    return lambda function: click.command(name, cls=cls, **more)(click.pass_obj(function))
