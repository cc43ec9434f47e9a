"""Rendezvous addresses that may not reach the first node."""

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
    "several addresses, or the loopback address",
    source="hostname(1), --ip-address and --all-ip-addresses; Debian Reference, The hostname resolution",
)
def host_address(job: Job) -> Iterator[Hit]:
    """hostname --ip-address prints every address that the node's name resolves to, including 127.0.1.1 in /etc/hosts.

    hostname -I prints the addresses of all interfaces. The ranks need one that the other nodes can reach. A script
    that extracts one address (awk, cut, ${ip%% *}) is not reported.
    """
    holders = {
        item.name: (item.line, found)
        for item in job.script.assignments
        if item.value and not item.dead and (found := _OWN_ADDRESS.search(item.value.source))
    }
    if any(map(partial(_is_split, job), holders)):
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
                else "may print several addresses, or 127.0.1.1 from /etc/hosts"
            )
            yield Hit.at(
                line,
                f"`hostname {found[1]}` {what}; the ranks need one that the other nodes can reach",
                '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )


def _is_split(job: Job, name: str) -> bool:
    """True if the script extracts one address, or sets the variable twice."""
    text = "\n".join(line for line in job.script.lines if not line.lstrip().startswith("#"))
    cut = (
        rf"\$\{{{name}\s*[%#\[/:]|<<<\s*\"?\$\{{?{name}\b|\$\{{?{name}\}}?[^\n]*\|\s*(awk|cut|head|tr|sed)\b"
    )
    settings = [item for item in job.script.assignments if item.name == name]
    return len(settings) > 1 or bool(re.search(cut, text))
