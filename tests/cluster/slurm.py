"""One machine as a SLURM cluster of four nodes, its daemons and files a test's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

NODES = tuple(f"127.0.0.{number}" for number in range(11, 15))  # names that resolve: groups meet by them
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> list[str]:
    """Programs of SLURM that are not here, and whoever may not start them."""
    found = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return found if os.geteuid() == 0 else [*found, "root"]


@dataclass(frozen=True)
class Cluster:
    """SLURM's commands against daemons of our own."""

    environment: dict[str, str]
    folder: Path

    def run(self, *command: str, **more: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=self.environment | more, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def until(self, command: tuple[str, ...], wanted: str, within_s: float = 60, exactly: bool = False) -> None:
        """Waits until what the command says holds `wanted`, or is just that."""
        end_s = time.monotonic() + within_s
        while (said := self.run(*command)) != wanted and (exactly or wanted not in said):
            assert time.monotonic() < end_s, f"{command} says {said!r}, not {wanted!r}:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts the three daemons, and ends them."""
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=8000"
        for name in NODES
    ]
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, folder=folder, control=free_port(), nodes="\n".join(nodes))
    )
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munged = ["munged", "--force", "-F", "--log-file", str(folder / "munge.log")]
    munged += [part for flag, name in files.items() for part in (f"--{flag}", str(folder / name))]
    with contextlib.ExitStack() as ends:
        here = Cluster(environment, folder)
        for command in (munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)):
            ends.callback(_end, _start(command, environment, folder))
            if command is munged:
                _wait_for(folder / "munge.socket")
        here.until(("sinfo", "-h", "-o", "%T"), "idle")
        try:
            yield here
        finally:  # steps outlive their daemons
            here.run("scancel", "--full", "--user=root")
            here.until(("squeue", "-h", "-o", "left"), "", within_s=60, exactly=True)


def _start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}-{Path(command[-1]).name}.out").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _wait_for(path: Path) -> None:
    end_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} did not come"
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
