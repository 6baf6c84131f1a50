"""What every command shares: the object that it is given, its parameters, its help and its errors."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tiledsched.cli import renamed
from tiledsched.cli.output import note
from tiledsched.cli.problems import describe_kernel
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.device import arch_named, arch_spec
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import SHIPPED, load_kernel
from tiledsched.measure import nvml
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
EVERYWHERE = "Every command"
"""The heading of the options that all commands have."""
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


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

    def settings(self, **flags: Any) -> Settings:
        """The settings, those that flags of the command give first."""
        return load_settings({"db": self.db, **flags})

    def session(self, arch: str, jobs: int | None = None, **flags: Any) -> Session:
        """A session for an arch, with the settings that flags of the command give."""
        from tiledsched.tuning.session import Session

        return Session(arch, settings=self.settings(**flags), jobs=jobs, tools=self.tools)

    def open_db(self, *, read_only: bool = False) -> TuningDB:
        """The database of this call."""
        from tiledsched.store.db import TuningDB

        return TuningDB.open(self.settings().db, read_only=read_only)

    def print(self, value: dict[str, Any], text: str | Callable[[], None] = "") -> None:
        """Print a result: as JSON where that was asked for, else as text, or by calling the function that prints it."""
        if self.json:
            print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))
        elif callable(text):
            text()
        else:
            print(text)

    def arch(self, given: str | None) -> str:
        """The arch that `--arch` names, or that of the first GPU here, or the usual one; what was not given is announced."""
        if given is not None:
            return given
        found = next((device.arch for device in self.devices()), USUAL_ARCH)
        note(f"tiledsched: for {found}; --arch names another")
        return found

    def archs(self, given: Sequence[str] | None) -> list[str]:
        """The archs that `--arch` names, or those of the GPUs here.

        Raises:
            ConfigError: none is named, and there is no GPU.
        """
        found = list(given or ()) or sorted({device.arch for device in self.devices()})
        if not found:
            raise ConfigError("there is no GPU here to tell the arch by; pass --arch, e.g. --arch sm_90")
        return found


def known_arch(text: str) -> str:
    """The arch that a name means, e.g. sm_90 for h200.

    Raises:
        ConfigError: nothing is known of such an arch; the message lists those that are known.
    """
    arch = arch_named(text)
    arch_spec(arch)
    return arch


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

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its names and its line of help, without what click would add."""
        record = super().get_help_record(ctx)
        return record and (record[0], self.help or "")


class Argument(click.Argument):
    """A positional argument with a line of help. Click has that from 8.5 on."""

    def __init__(self, *names: Any, help: str = "", **more: Any) -> None:
        super().__init__(*names, **more)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Its name and its line of help."""
        return self.human_readable_name, self.help or ""


def path_of(ctx: click.Context) -> str:
    """The words that lead to a command, e.g. `tiledsched db check`."""
    above = f"{path_of(ctx.parent)} " if ctx.parent else ""
    return f"{above}{ctx.info_name}"


class _Explained(click.Command):
    """A command that says which flag was meant where it does not know one, and whose help has headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        ctx.meta["tiledsched.words"] = words
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = path_of(ctx).partition(" ")[2]
            flags = [flag for param in self.get_params(ctx) for flag in param.opts if flag.startswith("--")]
            raise ConfigError(renamed.unknown_flag(name, error.option_name, words, flags)) from None
        except click.UsageError as error:
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
            with formatter.section(f"Problems of {kernel.name}"):
                formatter.write_dl(describe_kernel(kernel), col_max=26)


def _named_kernel(words: Iterable[str]) -> KernelClass:
    """The kernel that a command's words name, as far as it can be told without parsing them; else the usual one."""
    named = next((word for word in words if word in SHIPPED or (":" in word and "=" not in word)), USUAL_KERNEL)
    return load_kernel(named)


class Group(_Explained, click.Group):
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
                formatter.write_dl([line for each in commands for line in _one_line(each)], col_max=26)
        super().format_options(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of a command; without any word, its help is what was wanted."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was meant."""
        if args[0] not in self.commands:
            name = " ".join([*path_of(ctx).split()[1:], args[0]])
            raise ConfigError(renamed.unknown_command(name, self.commands))
        return super().resolve_command(ctx, args)


def _one_line(command: click.Command, above: str = "") -> list[tuple[str, str]]:
    """The name of a command and the first sentence of its help; of a group, those of each of its commands."""
    name = f"{above}{command.name}"
    if isinstance(command, Group) and not above:
        return [line for each in command.commands.values() for line in _one_line(each, f"{name} ")]
    return [(name, (command.help or "").partition(".\n")[0].replace("\n", " ").rstrip("."))]


class KernelType(click.ParamType):
    """A kernel, by its name or by where it is declared. A user's file is imported only where it is named."""

    name = "kernel"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The kernel of that name."""
        if ctx is not None:
            ctx.ensure_object(Invocation).kernel_word = value
        return load_kernel(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The kernels that ship and begin like that."""
        names = [name for name in SHIPPED if name.startswith(incomplete)]
        return [click.shell_completion.CompletionItem(name) for name in names]


class KernelNameType(KernelType):
    """The name under which tables list a kernel. One that is not known here is taken at its word."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name."""
        try:
            return load_kernel(value).name
        except ConfigError:
            return value


class CommaList(click.ParamType):
    """Words with commas between them, each once: a list of what `read` makes of each."""

    name = "list"

    def __init__(self, read: Callable[[str], str] = str.strip, allowed: Sequence[str] = ()) -> None:
        self.read, self.allowed = read, allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The words.

        Raises:
            click.BadParameter: there is none, or one that is not allowed.
        """
        found = list(dict.fromkeys(self.read(word) for word in value.split(",") if word.strip()))
        wrong = [word for word in found if self.allowed and word not in self.allowed]
        if wrong or not found:
            self.fail(f"{(wrong or [value])[0]!r} is not one of {', '.join(self.allowed)}", param, ctx)
        return found


class Count(click.ParamType):
    """An integer that is at least `least`."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer.

        Raises:
            click.BadParameter: the text is none, or one that is too small.
        """
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if number < self.least:
            self.fail(f"{value!r} is not an integer of {self.least} or more", param, ctx)
        return number


class ArchType(click.ParamType):
    """An arch, by its name or by that of one of its GPUs."""

    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The arch, e.g. sm_90."""
        return known_arch(value)


def option(*names: str, **more: Any) -> Callable[[Decorated], Decorated]:
    """An option of a command, under `heading`."""
    return click.option(*names, cls=Option, **more)


def argument(*names: str, **more: Any) -> Callable[[Decorated], Decorated]:
    """A positional argument of a command, with `help`."""
    return click.argument(*names, cls=Argument, **more)


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


db_option = option("--db", metavar="URL", expose_value=False, callback=_remember, heading=EVERYWHERE, help=DB_HELP)
common_options = several(
    option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_remember,
        heading=EVERYWHERE,
        help="print the result as JSON",
    ),
    option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_log,
        heading=EVERYWHERE,
        help="log more to stderr",
    ),
)
kernel_argument = argument(
    "kernel",
    type=KernelType(),
    required=False,
    default=USUAL_KERNEL,
    metavar="[KERNEL]",
    help=f"{KERNEL_HELP}; by default {USUAL_KERNEL}",
)
kernel_filter = argument(
    "kernel", type=KernelNameType(), required=False, metavar="[KERNEL]", help=f"only this kernel: {KERNEL_HELP}"
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
    elif each.type is int and each.minimum is not None:
        kind = Count(each.minimum)
    elif each.is_file:
        kind = FILE
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
    if many:
        return option("--arch", type=CommaList(known_arch), metavar="ARCH[,ARCH]", help=text, **more)
    return option("--arch", type=ArchType(), metavar="ARCH", help=text, **more)


target_option = arch_option(
    f"which GPUs, e.g. sm_90 or h200 (default: the GPU here, or else {USUAL_ARCH})", heading="Problems"
)
jobs_option = option("--jobs", type=Count(), metavar="N", help="compile processes (default: one per CPU)")


def command(
    name: str, *, db: bool = True, cls: type[Command] = Command, **more: Any
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command of class `cls`, with the options that all commands have.

    The function is given the Invocation first, and its parameters by name. It returns the exit code; None is 0. Its docstring
    is the command's help.
    """

    def make(function: Callable[..., int | None]) -> Command:
        options = several(db_option, common_options) if db else common_options
        return click.command(name, cls=cls, **more)(options(click.pass_obj(function)))

    return make
