"""Files that here-documents of a script write, and the commands that run them."""

from __future__ import annotations

from dataclasses import replace

from hpcgen.check.lint.mpi import STEP_PROGRAMS
from hpcgen.check.lint.script import SHELLS, Command
from hpcgen.check.lint.words import Word

_EDITORS = ("sed", "perl", "patch", "envsubst", "ed", "rm", "mv")
"""Programs that change the files that they name."""


class WrittenFiles:
    """The texts of files, by their paths as the script expands them."""

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    def change(self, path: Word) -> None:
        """Forgets a file, because a redirection changes it."""
        self._commands.pop(_key(path), None)

    def run(self, command: Command) -> None:
        """Remembers the file that `cat >FILE <<EOF` or `tee FILE <<EOF` writes."""
        target = command.writes_to
        if command.name == "tee" and len(command.words) == 2:
            target = command.words[1]
        if command.here_document and target is not None and command.name in ("cat", "tee"):
            self._commands[_key(target)] = command
        elif command.name in _EDITORS:
            for word in command.words[1:]:
                self.change(word)

    def read_by(self, command: Command) -> Command:
        """The command with the text of the written script that it runs.

        sbatch gets the text as if it came from sbatch's own here-document.
        """
        for index, word in enumerate(command.words):
            writer = self._commands.get(_key(word))
            if writer is None or command.here_document:
                continue
            if command.name == "sbatch":
                return replace(
                    command,
                    here_document=writer.here_document,
                    here_line=writer.here_line,
                    here_expands=writer.here_expands,
                    here_expanded=writer.here_expanded,
                )
            if _runs(command, index, writer.here_document):
                text = Word(
                    text=writer.here_document,
                    known=not writer.here_expanded,
                    line=writer.here_line,
                    source=writer.here_document,
                    certain=writer.conditional == command.conditional,
                    unknowns=writer.here_expanded,
                )
                return replace(command, file_text=text, file_arguments=command.words[index + 1 :])
        return command


def _key(path: Word) -> str:
    return path.text.removeprefix("./")


def _runs(command: Command, index: int, text: str) -> bool:
    """True if a command runs the shell script that its word at `index` names."""
    names = [word.text.rpartition("/")[2] for word in command.words[:index]]
    while names and names[-1].startswith("-"):
        names.pop()
    if names and names[-1] in SHELLS:
        return True
    shebang = text.partition("\n")[0].removeprefix("#!").split() if text.startswith("#!") else []
    is_shell = any(word.rpartition("/")[2] in SHELLS for word in shebang)
    return is_shell and (index == 0 or names[0] in STEP_PROGRAMS)
