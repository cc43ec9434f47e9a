"""Rules about programs that a site's code starts: those that no longer start, fail unnoticed, or need root."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgen.check.comparison import Comparison, site_rule
from hpcgen.check.lint.rule import Hit
from hpcgen.check.lint.script import Command

EPILOGUE = "site_epilogue"
_LOADS = {
    "module": ("load", "add", "swap", "switch", "restore"),
    "ml": ("",),
    "spack": ("load",),
    "conda": ("activate",),
    "mamba": ("activate",),
    "micromamba": ("activate",),
}
"""Program -> the subcommands that change the environment and can fail; "" for any word."""
_ROOT_PROGRAMS = frozenset((
    "apt-get", "cpupower", "dnf", "insmod", "iptables", "mkfs", "modprobe", "nvidia-persistenced", "rmmod",
    "setenforce", "swapoff", "swapon", "tuned-adm", "umount", "useradd", "yum",
))  # fmt: skip
"""Programs that ask for root in every use that a job could have."""
_ROOT_OPTIONS = {
    "nvidia-smi": re.compile(
        r"-(pm|pl|lgc|rgc|lmc|rmc|ac|rac|am|caa|e|c|r|mig|gom|cgi|cci|dgi|dci)$|--(persistence-mode|power-limit"
        r"|lock-(gpu|memory)-clocks|reset-(gpu|memory)-clocks|applications-clocks|reset-applications-clocks|gpu-reset"
        r"|ecc-config|compute-mode|multi-instance-gpu)(=|$)"
    ),
    "ethtool": re.compile(r"-[sKGACL]$"),
    "ip": re.compile(r"(set|add|del)$"),
    "mount": re.compile(r"-[ot]$|/"),
    "sysctl": re.compile(r"-w$|--write$|[\w.]+="),
    "systemctl": re.compile(r"(start|stop|restart|reload|enable|disable|mask)$"),
    "tee": re.compile(r"/(proc/sys|sys)/"),
    "dmesg": re.compile(r"-[cC]$|--clear$"),
}
"""Program -> its options that need root."""
_KERNEL_FILE = re.compile(r">\s*[\"']?/(proc/sys|sys)/")


@site_rule("path-replaced", "`PATH` loses its directories")
def path_replaced(both: Comparison) -> Iterator[Hit]:
    """The script then finds neither srun nor scontrol, and often not even rm."""
    for item in both.own(both.site.assigned):
        keeps = item.append or not item.text or re.search(r"\$\{?\w*PATH\b|\$\(|`", item.text)
        if item.name == "PATH" and not keeps and both.shell_of(item) != "apart":
            fix = 'keep the old value: export PATH="/opt/site/bin:$PATH"'
            yield Hit.at(item.line, f"{item.text} leaves out $PATH", fix)


@site_rule("module-unchecked", "a module whose loading may fail unnoticed", severity="warning")
def module_unchecked(both: Comparison) -> Iterator[Hit]:
    """Nothing stops the job if the module does not exist: it trains with other libraries."""
    for call in both.own(both.site.commands):
        is_checked = call.status != "plain" or call.in_subshell or _ends_at_failure(both, call)
        if not is_checked and _loads(call.written):
            text = " ".join(call.written)
            yield Hit.at(
                call.line, f"the job continues if `{text}` fails", f'{text} || die "{text} failed (above)"'
            )


def _loads(words: Sequence[str]) -> bool:
    commands = _LOADS.get(words[0], ())
    arguments = [word for word in words[1:] if not word.startswith("-")]
    return bool(arguments) and (arguments[0] in commands or "" in commands)


def _ends_at_failure(both: Comparison, call: Command) -> bool:
    """True if the function has `set -e` above a command."""
    return any(
        other.written[0] == "set" and re.match(r"-\w*e", " ".join(other.written[1:])) is not None
        for other in both.site.commands
        if other.definition == call.definition and other.offset < call.offset
    )


@site_rule("epilogue-requeue", "the epilogue changes the job's end")
def epilogue_requeue(both: Comparison) -> Iterator[Hit]:
    """The script decides whether it is requeued. From the epilogue, a finished job would start again."""
    functions = both.site.reachable(EPILOGUE)
    for call in both.own(both.site.commands):
        text = " ".join(call.written)
        requeues = re.match(r"(\S*/)?scontrol\s+(requeue|requeuehold)\b", text)
        cancels = re.match(r"(\S*/)?scancel\b.*SLURM_(ARRAY_)?JOB_?ID", text)
        repeats = re.match(r"(\S*/)?sbatch\b.*\$\{?0\b", text)
        if call.function in functions and (requeues or cancels or repeats):
            yield Hit.at(call.line, f"`{text}` runs after the job's verdict", "remove it")


@site_rule("needs-root", "a command that only root may run", severity="warning")
def needs_root(both: Comparison) -> Iterator[Hit]:
    """Jobs run as their users. The command fails, and with it prepare_node or the step that runs it."""
    fix = "let Slurm's Prolog run it, or append `|| true`"
    for call in both.own(both.site.commands):
        if call.status != "ignored" and "sudo" not in call.written:
            writes = next(filter(_KERNEL_FILE.match, call.redirections), "")
            if what := _root_command(call.written) or (f"{call.written[0]} {writes}" if writes else ""):
                yield Hit.at(call.line, f"`{what}` needs root", fix)


def _root_command(words: Sequence[str]) -> str:
    """The command in these words, possibly behind srun and its options, that needs root; "" if none does."""
    for index, word in enumerate(words):
        name, rest = word.rpartition("/")[2], words[index + 1 :]
        if name in _ROOT_PROGRAMS and not (index and words[index - 1].startswith("-")):
            return " ".join((name, *rest[:2]))
        options = _ROOT_OPTIONS.get(name)
        found = next((option for option in rest if options and options.match(option)), "")
        if found:
            return f"{name} {found}"
    return ""
