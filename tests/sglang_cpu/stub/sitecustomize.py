"""Lets SGLang start where torchvision is missing: it imports names from there for pictures, and a text model uses none.

On PYTHONPATH, so that Python reads it first, in the server's children too.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Nothing(type):
    """A class whose attributes are all their own names: enough for `InterpolationMode.BICUBIC` in a default."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Hollow(types.ModuleType):
    """A module that has every name one asks for."""

    __path__ = ()
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        hollow = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if hollow else None

    def create_module(self, spec):
        return _Hollow(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
