"""Modules in which every name exists and nothing works: enough for ``import`` and for decorators."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


class _AnyAttribute(type):
    """A class whose unknown attributes are strings with their own name, as enumerations are used."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandInClass(metaclass=_AnyAttribute):
    """Can be subclassed and constructed with anything."""

    def __init_subclass__(cls, **_kwargs: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


def stand_in_class(name: str, module: str) -> type:
    """A new class called ``name``."""
    return _AnyAttribute(name, (StandInClass,), {"__module__": module})


class StandInModule(types.ModuleType):
    """A module in which capitalised names are classes and others are modules that can be called as decorators."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        value = stand_in_class(name, self.__name__) if name[:1].isupper() else StandInModule(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package, as a stand-in."""

    def __init__(self, root: str) -> None:
        self._prefix = f"{root}."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, module)


def install(root: str) -> None:
    """Make every submodule of the package ``root`` importable; called from that package's ``__init__``."""
    sys.meta_path.append(_Finder(root))
