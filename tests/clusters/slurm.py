"""A Slurm of its own: slurmctld, munged and two slurmd, each slurmd on a host of its own."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from cluster_hosts import Cluster, assigned
from patience import until

__all__ = ["EVEN", "Slurm"]

CONFIGURATION = """
ClusterName=tessera
SlurmctldHost=hub({hub})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


EVEN = ["-N2", "-n4", "--ntasks-per-node=2"]


class Slurm:
    """Its commands, as a user at the hub gives them."""

    def __init__(self, cluster: Cluster, at: Path, environment: Mapping[str, str]) -> None:
        self.cluster, self.at = cluster, at
        self.environment = {**environment, "SLURM_CONF": str(at / "slurm.conf")}
        nodes = [f"NodeName={node.name} NodeAddr={node.address} CPUs=4 State=UNKNOWN" for node in cluster.nodes]
        text = CONFIGURATION.format(hub=cluster.hub.address, at=at, nodes="\n".join(nodes))
        (at / "slurm.conf").write_text(text)
        (at / "state").mkdir()
        (at / "munge.key").touch(0o600)
        (at / "munge.key").write_bytes(secrets.token_bytes(128))
        files = {"--key-file": "munge.key", "--socket": "munge.socket", "--pid-file": "munge.pid"}
        files |= {"--log-file": "munge.log", "--seed-file": "munge.seed"}
        munged = ["munged", "--foreground", "--force", *(f"{option}={at / name}" for option, name in files.items())]
        cluster.hub.start(*munged, log=at / "munged.out")
        until((at / "munge.socket").exists, 30, "munged has no socket")
        cluster.hub.start("slurmctld", "-D", log=at / "slurmctld.log", environment=self.environment)
        for node in cluster.nodes:
            node.start("slurmd", "-D", log=at / f"slurmd-{node.name}.log", environment=self.environment)
        wanted = sorted(f"{node.name} idle" for node in cluster.nodes)
        until(lambda: self.nodes() == wanted, 60, self.logs)

    def nodes(self) -> list[str]:
        return sorted(set(self("sh", "-c", "sinfo --noheader --Node --format='%N %T' || true").splitlines()))

    def logs(self) -> str:
        return "".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.at.glob("*.log")))

    def __call__(self, *command: str | Path, timeout: float = 120, more: Mapping[str, str] | None = None) -> str:
        environment = {**self.environment, **(more or {})}
        return self.cluster.hub.run("env", "-i", *assigned(environment), *command, timeout=timeout)

    def srun(self, *arguments: str | Path, timeout: float = 120, more: Mapping[str, str] | None = None) -> str:
        return self("srun", "--immediate=60", *arguments, timeout=timeout, more=more)

    def batch(self, at: Path, step: str, *options: str, more: Mapping[str, str] | None = None) -> int:
        """Queues a script of the one line `step`, which prints into `at`/job.log; returns the number of the job."""
        (at / "job.sh").write_text(f"#!/bin/sh\n{step}\n")
        output = f"--output={at / 'job.log'}"
        return int(self("sbatch", "--parsable", output, "--open-mode=append", *options, at / "job.sh", more=more))

    def state(self, job: int) -> str:
        """Of a job or, where they differ, of the tasks of its array, joined by commas."""
        shown = self("scontrol", "--oneliner", "show", "job", str(job))
        return ",".join(sorted(set(re.findall(r"JobState=(\w+)", shown))))

    def ended(self, job: int, at: Path, seconds: float = 90) -> str:
        """Waits for the end of the job; what it printed."""
        running = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"}
        log = at / "job.log"

        def over() -> bool:
            return not running & set(self.state(job).split(","))

        until(over, seconds, lambda: f"{self.state(job)}\n{log.read_text() if log.exists() else ''}\n{self.logs()}")
        return log.read_text()
