"""Problems in words: what `--problem` and `--suite` name, and which problems a filter lets through."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiledsched.core import errors
from tiledsched.core.config import TRUTHS
from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.fields import Choice, Flag, ProblemField, Sizes
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.problem_lists import problems_of
from tiledsched.core.text import fields_called, format_problem, short_names

MOST_PROBLEMS = 10_000
"""Problems that the values of one `-p` may name."""


def named_problems(
    kernel: KernelClass, named: Sequence[str], suites: str | None = None, *, every_batch: bool = False
) -> list[Problem]:
    """The problems that `--problem` and `--suite` name, or where neither names any, the kernel's default ones.

    With `every_batch`, a problem may be named without its batch; see :func:`tiledsched.core.problem_lists.problems_of`.

    Raises:
        ConfigError: a key, a value or a suite that the kernel does not have, or nothing is named and nothing declared.
        ProblemError: values that do not go together.
    """
    found = [problem for text in named for problem in read_problems(kernel, text, every_batch=every_batch)]
    found += [problem for name in (suites or "").split(",") if name.strip() for problem in kernel.suite(name.strip())]
    found = found or kernel.default_problems()
    if not found:
        raise ConfigError(
            f"{kernel.name} has no suite; name its problems, by its keys {', '.join(keys(kernel))}: -p KEY=VALUE,..."
        )
    return list(dict.fromkeys(found))


def read_problems(kernel: KernelClass, text: str, *, every_batch: bool = False) -> list[Problem]:
    """Every combination of the values in `rows=4096,columns=4096:8192,dtype=bfloat16`; or a problem as it is printed.

    A key is a field, or a short name of the kernel's label. A short name means all its dims, or, where slashes part the
    values, each of them (`H=32/8`). A word alone is a flag that is set (`transposed`) or the choice of a field (`bfloat16`).

    Raises:
        ConfigError: the key and what is allowed.
        ProblemError: values that the kernel does not take together.
    """
    values = read_values(kernel, text)
    count = math.prod(map(len, values.values()))
    if count > MOST_PROBLEMS:
        raise ConfigError(
            f"these values name {count:,} problems, and at most {MOST_PROBLEMS:,} are taken; name fewer values"
        )
    fields = list(itertools.chain(*values))
    cases = [dict(zip(fields, itertools.chain(*chosen), strict=True)) for chosen in itertools.product(*values.values())]
    return problems_of(kernel, cases, every_batch=every_batch)


def read_values(kernel: KernelClass, text: str) -> dict[tuple[str, ...], list[tuple[Any, ...]]]:
    """The allowed values of `rows=4096,columns=4096:8192`: the fields that each key stands for -> a value for each of them.

    Raises:
        ConfigError: the key and what is allowed.
    """
    values: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    known = [word for field in kernel.fields.values() if isinstance(field, Choice) for word in field.words]
    # Arrays of remembered searches are written with spaces, such as float16[64 128]: there every value has its key.
    spaced = any(re.search(r"[\s,:]", word) for word in known)
    key_follows = rf"[,\s]+(?=(?:{'|'.join(map(re.escape, keys(kernel)))})=)"
    for part in re.split(key_follows, text.strip()) if spaced else _parts(text):
        key, equals, words = part.partition("=")
        if not equals:
            key, words = _alone(kernel, part)
        names = fields_called(kernel, key, "/" in words)
        if names is None:
            raise ConfigError(
                f"--problem {part!r}: write key=value{_meant(kernel, part)}; the keys of {kernel.name} are "
                f"{', '.join(keys(kernel))}"
            )
        if any(set(names).issuperset(each) for each in values):
            raise ConfigError(f"--problem {part!r}: {key} is given twice; write several values as {key}=VALUE:VALUE")
        either = "$^" if spaced else ":" if isinstance(kernel.fields[names[0]], Sizes) else "[:,]"
        values[names] = [_read_each(kernel, names, key, word.strip()) for word in re.split(either, words)]
    return values


def _meant(kernel: KernelClass, part: str) -> str:
    """Which part of a problem was meant by one that has no known key: `head_dims=64`, `casual`, `S4096` or `S:4096`; of a key
    also what it takes."""
    key, equals, _ = part.partition("=")
    joined = re.fullmatch(r"([A-Za-z_]+):?(\d+)", part)
    if joined and joined[1] in keys(kernel):
        return f" (did you mean '{joined[1]}={joined[2]}'?)"
    words = {
        name: ("yes", "no") if isinstance(field, Flag) else getattr(field, "words", ("whole numbers",))
        for name, field in kernel.fields.items()
    }
    known = keys(kernel) if equals else [*keys(kernel), *itertools.chain(*words.values())]
    takes = words.get((fields_called(kernel, errors.nearest(key, known) or "") or ("",))[0], ())
    return errors.did_you_mean(key, known) + f", which takes {' or '.join(filter(None, takes))}" * bool(
        equals and takes
    )


def _parts(text: str) -> list[str]:
    """The parts between commas or spaces. A number alone is another value of the part before it: `S=1024,2048`."""
    text = re.sub(r"[\s,]+", ",", re.sub(r"\s*([=:])\s*", r"\1", text)).strip(",")
    return [part for part in re.split(r",(?!\d+(?:,|$))", text) if part]


def _alone(kernel: KernelClass, word: str) -> tuple[str, str]:
    """The key and value that a word alone stands for (`transposed`, `+bias`, `bfloat16`), or the word and nothing."""
    plain = word.removeprefix("+").replace("-", "_")
    for name, field in kernel.fields.items():
        if isinstance(field, Flag) and name == plain:
            return name, "yes"
        if isinstance(field, Choice) and plain in field.words:
            return name, plain
    return word, ""


def _read_each(kernel: KernelClass, names: Sequence[str], key: str, word: str) -> tuple[Any, ...]:
    """One value for each field: the same for all of them, or those between the slashes."""
    words = word.split("/") if "/" in word else [word] * len(names)
    if len(words) != len(names):
        raise ConfigError(
            f"--problem {key}={word}: write {key}={'/'.join(names)}, or one value for all"
            if names[1:]
            else f"--problem {key}={word}: {key} takes one value, without slashes"
        )
    return tuple(_read(kernel.fields[name], key, each) for name, each in zip(names, words, strict=True))


def matching(problems: Iterable[Problem], named: Sequence[str]) -> list[Problem]:
    """The problems, of any kernels, that one of the filters lets through; all of them where there is no filter.

    Args:
        problems: those to choose from. Problems of a kernel that this process does not know match no filter.
        named: filters, written as for `--problem`. What a filter does not name may be anything.

    Raises:
        ConfigError: no kernel among the problems has such a key or value.
    """
    found = list(dict.fromkeys(problems))
    if not named:
        return found
    filters: dict[str, list[Mapping[tuple[str, ...], list[tuple[Any, ...]]]]] = {}
    wrong: TiledschedError | None = None
    for name, kernel in {each.kernel: each.declaration for each in found if each.known}.items():
        try:
            filters[name] = [read_values(kernel, text) for text in named]
        except TiledschedError as error:
            wrong = error
    if wrong is not None and not filters:
        raise wrong
    return [
        problem for problem in found if any(_fits(problem.values, each) for each in filters.get(problem.kernel, ()))
    ]


def _fits(values: Mapping[str, Any], wanted: Mapping[tuple[str, ...], list[tuple[Any, ...]]]) -> bool:
    return all(tuple(values[name] for name in names) in allowed for names, allowed in wanted.items())


def _read(field: ProblemField, key: str, word: str) -> Any:
    try:
        if isinstance(field, Flag):
            return field.read(key, TRUTHS.get(word.lower(), word))
        if isinstance(field, Sizes):
            return field.read(key, [int(size) if size.isdigit() else size for size in re.split("[+,]", word)])
        is_number = not isinstance(field, Choice) and re.fullmatch(r"-?\d+", word)
        return field.read(key, int(word) if is_number else word)
    except ValueError as error:
        if isinstance(error, TiledschedError):
            raise
        raise ConfigError(f"--problem: {error}{_number_meant(word)}") from error


def _number_meant(word: str) -> str:
    """Which whole number was meant by one with a unit or a letter behind it: 4k means 4096."""
    found = re.fullmatch(r"(\d+)([a-zA-Z]+)", word)
    if not found:
        return ""
    number = int(found[1]) * {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(found[2].lower(), 1)
    return f" (did you mean {number}?)"


def read_variants(kernel: KernelClass, text: str) -> dict[str, list[str]]:
    """Name -> values of `--also any-length,group=1:4`.

    Raises:
        ConfigError: the kernel has no such variant.
    """
    found: dict[str, list[str]] = {}
    for part in text.split(",") if text else ():
        name, _, values = part.strip().partition("=")
        if name not in kernel.variants:
            known = ", ".join(kernel.variants) or "none"
            raise ConfigError(
                f"--also {part}: the problems of {kernel.name} vary by {known}{errors.did_you_mean(name, kernel.variants)}"
            )
        found[name] = values.split(":") if values else []
    return found


def describe_kernel(kernel: KernelClass) -> list[tuple[str, str]]:
    """What the help of a command says of a kernel: its keys, its suites and an example."""
    lines = [("keys", ", ".join(keys(kernel)))]
    if named := kernel.default_problems():
        lines.append(("example", f"-p {format_problem(named[0])}"))
    if kernel.suites:
        default = f"{kernel.default_suite} where none is named" if kernel.default_suite else "all where none is named"
        lines.append(("suites", f"{', '.join(kernel.suites)}; {default}"))
    return lines


def keys(kernel: KernelClass) -> list[str]:
    """What may stand before `=` in `-p`: short names and fields."""
    return [*short_names(kernel), *kernel.fields]
