"""Two hosts on one machine: network namespaces joined by a veth pair whose ends are shaped.

Needs root and iproute2; `available()` says why not. Nothing is installed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PORT = 29577


def available() -> str | None:
    """Why two hosts can't be made here, or None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "taskset"):
        if shutil.which(tool) is None:
            return f"{tool} (iproute2, util-linux) is not installed"
    try:
        with two_hosts(("1gbit", "1gbit")):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The namespaces' names; host 0 is the rendezvous."""

    names: tuple[str, str]

    def torchrun(self, *arguments: str, folder: Path, timeout_s: float) -> list[str]:
        """Run `torchrun -m pptune ARGUMENTS` with one rank on each host; both hosts' output.

        Raises CalledProcessError where one of them fails.
        """
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [
                    "ip", "netns", "exec", name,
                    # A core of its own, as a host has: else each would run a thread on every core.
                    "taskset", "-c", str(node % (os.cpu_count() or 1)),
                    sys.executable, "-m", "torch.distributed.run",
                    "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node),
                    "--master-addr", _ADDRESSES[0], "--master-port", str(_PORT),
                    "-m", "pptune", *arguments,
                ],
                cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for node, name in enumerate(self.names)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, "torchrun", output)
        return outputs


@contextlib.contextmanager
def two_hosts(rates: tuple[str | None, str | None]) -> Iterator[Hosts]:
    """Two namespaces; `rates` shape what host 0 and host 1 send, such as "1gbit"; None doesn't."""
    names = (f"pptune-a-{os.getpid()}", f"pptune-b-{os.getpid()}")
    ends = (f"ppa{os.getpid()}"[:15], f"ppb{os.getpid()}"[:15])
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address, rate in zip(names, ends, _ADDRESSES, rates, strict=True):
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate is not None:
                _run(
                    "ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                    "rate", rate, "burst", "4kb", "latency", "400ms",
                )  # fmt: skip
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", ends[0]], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
