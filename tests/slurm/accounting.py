"""The accounting of a private Slurm cluster: a MariaDB and a slurmdbd of its own, with all files in its directory."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.patience import wait_until

DAEMONS = ("slurmdbd", "mariadbd")
PROGRAMS = (*DAEMONS, "mariadb-install-db", "sacct", "sacctmgr")

SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={directory}/munge.socket
"""
# The user of the database needs no password: MariaDB listens only on a socket in the cluster's directory.
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
LogFile={directory}/slurmdbd.log
PidFile={directory}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounting
"""
# Small files, and no wait for the disk: the data lives as long as the cluster.
MARIADB = (
    "--no-defaults",
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
    "--skip-networking",
)
INSTALL = ("--skip-test-db", "--auth-root-authentication-method=normal")
IN_BACKGROUND = 'exec setsid --fork "$0" "$@" </dev/null >/dev/null 2>&1'


def start(directory: Path, user: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Starts MariaDB and slurmdbd. `run` runs a program in the cluster's environment.

    Raises:
        TimeoutError: one of them does not answer. Their logs are in the cluster's directory.
    """
    data = (*MARIADB, f"--user={user}", f"--datadir={directory}/mariadb")
    database = directory / "mariadbd.socket"
    files = (
        f"--socket={database}",
        f"--pid-file={directory}/mariadbd.pid",
        f"--log-error={directory}/mariadbd.log",
    )
    run("mariadb-install-db", *data, *INSTALL)
    run("sh", "-c", IN_BACKGROUND, "mariadbd", *data, *files)
    wait_until(lambda: _listens(database), timeout_s=120)
    (directory / "slurmdbd.conf").chmod(0o600)  # slurmdbd requires it
    run("env", f"MYSQL_UNIX_PORT={database}", "slurmdbd")
    wait_until(lambda: run("sacctmgr", "list", "cluster", check=False).returncode == 0, timeout_s=120)


def add_user(user: str, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Lets a user submit jobs where limits are enforced. Root may already."""
    if user != "root":
        run("sacctmgr", "--immediate", "add", "user", user, "account=root")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
