"""Which kernel the words of a command name, and which problems of it."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.fields import Choice, Flag, ProblemField, Sizes
from tiledsched.core.labels import fields_called, short_names
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import SHIPPED

LOCATOR = re.compile(r"[^\s=,]+:[A-Za-z_]\w*")
FLAGS = {"yes": True, "true": True, "no": False, "false": False}


def kernel_word(words: Sequence[str], flags: Mapping[str, argparse.Action]) -> str | None:
    """The word among a command's that names a kernel: the first that is neither a flag nor a flag's value.

    Args:
        words: what follows the command.
        flags: those of every kernel, by name. What follows another flag is its value, unless it can only be a kernel.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            return word
        action = flags.get(word)
        if "=" in word or (action is not None and action.nargs == 0):
            continue
        many = action is not None and action.nargs in ("+", "*")
        while left and not left[0].startswith("-") and not (action is None and _is_kernel(left[0])):
            left.pop(0)
            if not many:
                break
    return None


def _is_kernel(word: str) -> bool:
    return word in SHIPPED or LOCATOR.fullmatch(word) is not None


def problems_of(kernel: KernelClass, options: argparse.Namespace) -> list[Problem]:
    """What `--problem` and `--suite` name; without them what the kernel's own flags do, or else all its suites.

    Raises:
        ConfigError: a key, a value or a suite that the kernel does not have, or nothing named and nothing declared.
        ProblemError: values that do not go together.
    """
    named = [problem for text in options.problem for problem in read_problems(kernel, text)]
    if options.suite:
        named += [problem for name in options.suite.split(",") for problem in kernel.suite(name.strip())]
    elif not named and kernel.from_flags is not None:
        named = kernel.from_flags(options)
    elif not named:
        named = [problem for suite in kernel.suites for problem in kernel.suite(suite)]
    if not named:
        raise ConfigError(f"{kernel.name} has no suite; name its problems, e.g. --problem {example(kernel)}")
    return list(dict.fromkeys(named))


def read_problems(kernel: KernelClass, text: str) -> list[Problem]:
    """Every combination of `rows=4096,columns=4096:8192,dtype=bfloat16`, or a problem as it is printed.

    A key is a field or a short name of the kernel's label, which means all its dims, or each where slashes part the values. A
    word alone is a flag, or the choice of a field.

    Raises:
        ConfigError: the key and what is allowed.
        ProblemError: values that the kernel does not take together.
    """
    values = read_values(kernel, text)
    fields = list(itertools.chain(*values))
    return [
        kernel.problem(**dict(zip(fields, itertools.chain(*chosen), strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def read_values(kernel: KernelClass, text: str) -> dict[tuple[str, ...], list[tuple[Any, ...]]]:
    """What each key of `rows=4096,columns=4096:8192` may be, a value for each of the fields it stands for.

    Raises:
        ConfigError: the key and what is allowed.
    """
    values: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for part in _parts(text):
        key, equals, words = part.partition("=")
        if not equals:
            key, words = _alone(kernel, part)
        names = fields_called(kernel, key, "/" in words)
        if names is None:
            raise ConfigError(
                f"--problem {part!r}: write key=value; the keys of {kernel.name} are "
                f"{', '.join([*kernel.fields, *short_names(kernel)])}"
            )
        either = ":" if isinstance(kernel.fields[names[0]], Sizes) else "[:,]"
        values[names] = [_read_each(kernel, names, key, word.strip()) for word in re.split(either, words)]
    return values


def _parts(text: str) -> list[str]:
    """What commas or spaces part; a number alone belongs to the part before it."""
    parts: list[str] = []
    for part in re.split(r"\s*,\s*|\s+", text.strip()):
        if parts and part.isdigit():
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _alone(kernel: KernelClass, word: str) -> tuple[str, str]:
    """Key and value that a word alone stands for: `transposed`, `+bias`, `bfloat16`; itself where it is neither."""
    plain = word.removeprefix("+").replace("-", "_")
    for name, field in kernel.fields.items():
        if isinstance(field, Flag) and name == plain:
            return name, "yes"
        if isinstance(field, Choice) and plain in field.words:
            return name, plain
    return word, ""


def _read_each(kernel: KernelClass, names: Sequence[str], key: str, word: str) -> tuple[Any, ...]:
    """A value for each field: the same, or those that slashes part."""
    words = word.split("/") if "/" in word else [word] * len(names)
    if len(words) != len(names):
        raise ConfigError(f"--problem {key}={word}: write {key}={'/'.join(names)}, or one value for all")
    return tuple(_read(kernel.fields[name], key, each) for name, each in zip(names, words, strict=True))


def filtered(options: argparse.Namespace, problems: Iterable[Problem]) -> list[Problem]:
    """Those that the filters of a command let through; see `matching`."""
    found = list(dict.fromkeys(problems))
    let = matching(found, options.problem, own_filters(options), options.dtype)
    return [each for each in found if each in let]


def own_filters(options: argparse.Namespace) -> dict[str, Any]:
    """What the kernel's own flags say, as filters, by field."""
    return {name: value for name in options.own if name != "dtype" and (value := getattr(options, name)) is not None}


def matching(
    problems: Iterable[Problem], named: Sequence[str], own: Mapping[str, Any], dtypes: Sequence[str] | None
) -> set[Problem]:
    """Those that filters let through. What a filter does not name may be anything.

    Args:
        problems: of any kernels; those of a kernel that this process does not know match no filter.
        named: as for `--problem`; one of them has to match.
        own: values of a kernel's own flags, by field.
        dtypes: element types, one of which the problem has to have; None for any.

    Raises:
        ConfigError: no kernel among them has such a key or value.
    """
    found, wanted = set(problems), dict[str, list[dict[tuple[str, ...], list[tuple[Any, ...]]]]]()
    wrong: TiledschedError | None = None
    for name, kernel in {each.kernel: each.declaration for each in found if each.known}.items():
        try:
            wanted[name] = [read_values(kernel, text) for text in named]
        except TiledschedError as error:
            wrong = error
    if wrong is not None and not wanted:
        raise wrong

    def fits(problem: Problem) -> bool:
        values, fields = problem.values, problem.declaration.fields
        return (
            (
                not named
                or any(
                    all(tuple(values[name] for name in names) in allowed for names, allowed in one.items())
                    for one in wanted[problem.kernel]
                )
            )
            and all(name in values and values[name] in _allowed(fields[name], value) for name, value in own.items())
            and (dtypes is None or not set(dtypes).isdisjoint(map(str, values.values())))
        )

    if not named and not own and dtypes is None:
        return found
    return {each for each in found if each.kernel in wanted and fits(each)}


def _allowed(field: ProblemField, value: Any) -> Sequence[Any]:
    """What a flag's value lets a field be."""
    if isinstance(field, Flag):
        return (False, True) if value == "both" else (FLAGS.get(value, True),)
    return value if isinstance(value, list) else (value,)


def _read(field: ProblemField, key: str, word: str) -> Any:
    try:
        if isinstance(field, Flag):
            if word not in FLAGS:
                raise ValueError(f"{key} must be {', '.join(FLAGS)}, got {word!r}")
            return FLAGS[word]
        if isinstance(field, Choice):
            return field.read(key, word)
        if isinstance(field, Sizes):
            return field.read(key, [int(size) if size.isdigit() else size for size in re.split("[+,]", word)])
        return field.read(key, int(word) if re.fullmatch(r"-?\d+", word) else word)
    except ValueError as error:
        if isinstance(error, TiledschedError):
            raise
        raise ConfigError(f"--problem: {error}") from error


def example(kernel: KernelClass) -> str:
    """What a `--problem` of this kernel looks like."""
    words: list[str] = []
    for name, field in kernel.fields.items():
        if getattr(field, "omit_default", False):
            continue
        if isinstance(field, Choice):
            words.append(f"{name}={field.default}")
        elif isinstance(field, Flag):
            words.append(f"{name}=yes")
        elif isinstance(field, Sizes):
            words.append(f"{name}=128+64")
        elif field.default is None:
            words.append(f"{name}={1024 if field.most is None else min(64, field.most)}")
    return ",".join(words)
