"""Sends an event of a job to chats, mail or phones with apprise: the command of the run file's section `notify`.

    notify:
      command: [/home/me/apprise/bin/python, /home/me/notify_apprise.py, /home/me/.config/apprise.yaml]

The file names the services (https://github.com/caronc/apprise/wiki/config). It contains passwords, so only you may
read it. `pip install apprise` into a virtual environment that the first node of a job sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import apprise


def main(config: str) -> int:
    """Exit status 0 if all services took the event; otherwise the job tries again."""
    if Path(config).stat().st_mode & 0o077:
        print(f"{config}: others can read it; run chmod 600 {config}", file=sys.stderr)
        return 2
    event = json.load(sys.stdin)
    services = apprise.Apprise()
    services.add(apprise.AppriseConfig(paths=[config]))
    title = f"{event['run']}: {event['event'].replace('_', ' ')}"
    return 0 if services.notify(title=title, body=event["text"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
