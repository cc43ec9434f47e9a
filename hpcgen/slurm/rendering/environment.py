"""The Jinja environment for scripts: loads and renders templates, and quotes the values they write."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import jinja2
from jinja2 import meta
from jinja2.bccache import Bucket
from jinja2.loaders import split_template_path
from markupsafe import Markup

from hpcgen.config.trust import require_safe_parents, require_trusted
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import to_read
from hpcgen.resources import shipped
from hpcgen.slurm.rendering.filters import LOGIC_FILTERS, OUTPUT_FILTERS, shell_word
from hpcgen.slurm.rendering.template_check import CheckingCodeGenerator
from hpcgen.slurm.rendering.template_errors import template_errors

# A site's slurm/train.sbatch.j2 extends "hpcgen/slurm/train.sbatch.j2". The plain name refers to the site's file.
SHIPPED_PREFIX = "hpcgen"
SHIPPED = "shipped:"
"""Prefix of the origin of files shipped with hpcgen."""

T = TypeVar("T")

_COMMENT_IN_EXPANSION = re.compile(r"(?<!\{% raw %\})\$\{#")


class _Compiled(jinja2.BytecodeCache):
    """Templates that this process has compiled, in any environment, until their text changes."""

    def __init__(self) -> None:
        self._code: dict[tuple[str, str], CodeType | None] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Called before a template is compiled."""
        bucket.code = self._code.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Called after a template was checked and compiled."""
        self._code[bucket.key, bucket.checksum] = bucket.code


_COMPILED = _Compiled()
_FOUND: dict[tuple[Callable[[jinja2.nodes.Template], object], str, str], Any] = {}
"""Results of functions on the trees of templates, by function, file and text."""


class ShellEnvironment(jinja2.Environment):
    """An environment that writes shell code. `directories` contain its templates, with the shipped ones last."""

    code_generator_class = CheckingCodeGenerator

    def __init__(self, directories: Sequence[Path], loader: jinja2.BaseLoader) -> None:
        super().__init__(
            loader=loader,
            undefined=jinja2.StrictUndefined,
            # Markup (text of macros and blocks, and results of filters) is written unchanged. Everything else
            # passes through `finalize`, which converts it to Markup.
            autoescape=True,
            finalize=_quoted,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
            bytecode_cache=_COMPILED,
        )
        self.directories = tuple(directories)
        self.filters = {**OUTPUT_FILTERS, **LOGIC_FILTERS}
        self.globals = {}
        self._parsed: dict[tuple[str, str | None], jinja2.nodes.Template] = {}

    def parse(
        self, source: str, name: str | None = None, filename: str | None = None
    ) -> jinja2.nodes.Template:
        """The template's syntax tree. Compiling the template reuses it, because parsing takes a third of the time."""
        tree = super().parse(source, name, filename)
        self._parsed[source, filename] = tree
        return tree

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed = self._parsed.pop((source, filename), None)
        return super()._parse(source, name, filename) if parsed is None else parsed

    def found(self, find: Callable[[jinja2.nodes.Template], T], source: str, name: str, filename: str) -> T:
        """Result of a function on the syntax tree of a template. Each text is read once per process."""
        key = find, filename, source
        if key not in _FOUND:
            _FOUND[key] = find(self.parse(source, name, filename))
        found: T = _FOUND[key]
        return found

    def preprocess(self, source: str, name: str | None = None, filename: str | None = None) -> str:
        """Refuses `${#` in the source: Jinja reads it as the start of a comment that ends at any later `#}`."""
        mistake = _COMMENT_IN_EXPANSION.search(source)
        if mistake:
            lineno = source.count("\n", 0, mistake.start()) + 1
            reason = "{# begins a Jinja comment; write {% raw %}${#name}{% endraw %}"
            raise jinja2.TemplateSyntaxError(reason, lineno, name, filename)
        return super().preprocess(source, name, filename)

    def getitem(self, obj: object, argument: object) -> object:
        """Like Jinja's, but strings have no items: one character of a quoted word could be its quote."""
        if isinstance(obj, str):
            return self.undefined(f"a string has no item {argument!r}")
        return super().getitem(obj, argument)


def make_environment(
    site_directories: Sequence[Path] = (), trusted_groups: Collection[str] = ()
) -> ShellEnvironment:
    """The environment with the site's template directories, in that order, and the shipped templates.

    Raises:
        HpcgenError: a directory is missing, cannot be read, or can be changed by untrusted users.
    """
    sites = [Path(directory).absolute() for directory in site_directories]
    for site in sites:
        _require_usable(site)
        require_safe_parents(site)
        require_trusted(site, trusted_groups)
    shipped_directory = shipped("templates")
    shipped_loader = DirectoryLoader(shipped_directory)
    loaders: list[jinja2.BaseLoader] = [DirectoryLoader(site, trusted_groups) for site in sites]
    loader = jinja2.ChoiceLoader(
        [*loaders, shipped_loader, jinja2.PrefixLoader({SHIPPED_PREFIX: shipped_loader})]
    )
    return ShellEnvironment([*sites, shipped_directory], loader)


class DirectoryLoader(jinja2.BaseLoader):
    """Loads templates from one directory. A site's has `trusted_groups`, even if empty, and is checked.

    Unlike Jinja's loader, it never skips an unreadable file: another directory's template would silently replace it.
    """

    def __init__(self, directory: Path, trusted_groups: Collection[str] | None = None) -> None:
        self._directory = directory
        self._trusted_groups = trusted_groups

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """The template's text, its file, and a function that tells whether it is up to date."""
        path = self._directory.joinpath(*split_template_path(template))
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise HpcgenError("the template is a broken symbolic link", where=FilePlace(path)) from None
            raise jinja2.TemplateNotFound(template) from None
        except OSError as error:
            raise HpcgenError(f"cannot read the template: {error.strerror}", where=FilePlace(path)) from error
        except UnicodeDecodeError as error:
            raise HpcgenError(
                f"the template is not UTF-8 at byte {error.start}", where=FilePlace(path)
            ) from error
        if self._trusted_groups is not None:
            self._require_trusted(path, self._trusted_groups)
        return text, str(path), lambda: True

    def _require_trusted(self, path: Path, trusted_groups: Collection[str]) -> None:
        require_trusted(path, trusted_groups)
        if path.is_symlink():
            require_trusted(path.resolve().parent, trusted_groups)
        for parent in path.parents:
            if parent == self._directory:
                break
            require_trusted(parent, trusted_groups)


def template_origins(environment: ShellEnvironment, name: str) -> tuple[str, ...]:
    """Origins of the template and all templates it extends, includes or imports, starting with itself.

    The origin is "shipped:slurm/train.sbatch.j2" for shipped templates, and the file's path for a site's. A script's
    header lists them.

    Raises:
        HpcgenError: a template cannot be read.
    """
    shipped_directory = environment.directories[-1]
    origins: list[str] = []

    def visit(template: str) -> None:
        assert environment.loader is not None
        try:
            source, filename, _ = environment.loader.get_source(environment, template)
        except jinja2.TemplateNotFound:
            return  # an include with "ignore missing"; otherwise, rendering reports it
        path = Path(filename or "")
        origin = (
            f"{SHIPPED}{path.relative_to(shipped_directory).as_posix()}"
            if path.is_relative_to(shipped_directory)
            else str(path)
        )
        if origin not in origins:
            origins.append(origin)
            for referenced in environment.found(_referenced, source, template, str(path)):
                visit(referenced or "")

    with template_errors(environment.directories, name):
        visit(name)
    return tuple(origins)


def _referenced(tree: jinja2.nodes.Template) -> tuple[str | None, ...]:
    return tuple(meta.find_referenced_templates(tree))


@jinja2.pass_eval_context
def _quoted(eval_context: jinja2.nodes.EvalContext, value: object) -> Markup:
    """Jinja's `finalize`: a quoted shell word, unless the value is text that a template has already written.

    The unused context makes Jinja call it for literals too. Otherwise, the compiler would write `{{ "a b" }}`
    unquoted.
    """
    return value if isinstance(value, Markup) else Markup(shell_word(value))


def _require_usable(directory: Path) -> None:
    if not directory.is_dir():
        raise HpcgenError("the template directory does not exist", where=FilePlace(directory))
    if not os.access(directory, os.R_OK | os.X_OK):
        raise HpcgenError(
            "the template directory cannot be read", to_read(directory), where=FilePlace(directory)
        )


def render_template(environment: ShellEnvironment, name: str, context: Mapping[str, object]) -> str:
    """The template's text with these values, ending with a newline.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid, or a value is undefined or cannot be written where
            the template puts it. The message has the template's file and line.
    """
    with template_errors(environment.directories, name, context):
        text = environment.get_template(name).render(context)
    control = next((character for character in text if character < " " and character not in "\n\t"), None)
    if control is not None:
        line = text[: text.index(control)].count("\n") + 1
        raise HpcgenError(f"{name}: line {line} of the rendered text has the control character {control!r}")
    return text if text.endswith("\n") else text + "\n"
