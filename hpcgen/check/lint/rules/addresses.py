"""Addresses that the ranks cannot meet at for certain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.rules.rendezvous import addresses_of

_OWN_ADDRESS = re.compile(r"\bhostname\s+(-i|-I|--ip-address|--all-ip-addresses)\s*[)`]")


@rule(
    "host-address",
    "warning",
    "several addresses, or the node's own",
    source="hostname(1), --ip-address and --all-ip-addresses; Debian Reference, The hostname resolution",
)
def host_address(job: Job) -> Iterator[Hit]:
    """hostname --ip-address prints every address that the node's name resolves to, 127.0.1.1 of /etc/hosts among them.

    hostname -I prints the addresses of all interfaces. The ranks need one that the other nodes reach. A script that
    takes the output apart (awk, cut, ${ip%% *}) is not reported.
    """
    holders = {
        item.name: (item.line, found)
        for item in job.script.assignments
        if item.value and not item.dead and (found := _OWN_ADDRESS.search(item.value.source))
    }
    if any(map(partial(_is_taken_apart, job), holders)):
        return
    for line, word in addresses_of(job) if job.may_be_multi_node else ():
        found = _OWN_ADDRESS.search(word.source)
        name = next((name for name in word.variables if name in holders), None)
        if name and not found:
            line, found = holders[name]
        if found:
            what = (
                "prints the addresses of every interface"
                if found[1] in ("-I", "--all-ip-addresses")
                else "may print several addresses, or 127.0.1.1 of /etc/hosts"
            )
            yield Hit(
                line,
                f"`hostname {found[1]}` {what}; the ranks need one that the other nodes reach",
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


def _is_taken_apart(job: Job, name: str) -> bool:
    """Whether the script takes one address out of several, or sets the variable twice."""
    text = "\n".join(line for line in job.script.lines if not line.lstrip().startswith("#"))
    cut = (
        rf"\$\{{{name}\s*[%#\[/:]|<<<\s*\"?\$\{{?{name}\b|\$\{{?{name}\}}?[^\n]*\|\s*(awk|cut|head|tr|sed)\b"
    )
    settings = [item for item in job.script.assignments if item.name == name]
    return len(settings) > 1 or bool(re.search(cut, text))
