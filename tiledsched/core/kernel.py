"""The class that authors of kernels subclass: a declaration that is read, registered and checked when the class is made."""

from __future__ import annotations

import inspect
from typing import Any

from tiledsched.core import registry
from tiledsched.core.fields import ArrayField, ProblemField, Scalar
from tiledsched.core.problem import Declaration
from tiledsched.core.schedule import PLAIN
from tiledsched.core.validate import FUNCTIONS, check_declaration


class Kernel(Declaration):
    """A tunable kernel. Subclass it; docs/kernels.md shows what may be declared.

    Functions in the class body are written without `self`, and need no decorator.

    Raises:
        DeclarationError: the declaration is wrong. The message names the field and what is allowed.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = vars(cls)
        for name in FUNCTIONS:
            if inspect.isfunction(own.get(name)):
                setattr(cls, name, staticmethod(own[name]))
        found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls.fields = {name: value for name, value in found.items() if isinstance(value, ProblemField)}
        cls.array_fields = {name: value for name, value in found.items() if isinstance(value, ArrayField)}
        cls.scalar_fields = {name: value for name, value in found.items() if isinstance(value, Scalar)}
        if "name" not in own:
            cls.name = f"{registry.module_word(cls)}:{cls.__name__}"
        PLAIN.update({name: value for name, value in cls.plain.items() if name not in PLAIN})
        check_declaration(cls)
        registry.register(cls)
