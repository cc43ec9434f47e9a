"""The rules, one module for each part of a script. Importing the package imports all of them, which fills RULES."""

from importlib import import_module
from pkgutil import iter_modules

from hpcgen.check.lint.rule import RULES

__all__ = ["RULES"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
