"""Two network namespaces as two hosts: ranks meet over a network, and end within the limit when it is cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.two_hosts import LIMIT_SECS

ROOT = Path(__file__).parents[2]
PORT = 29911
GRACE_SECS = 8.0  # over the limit: the search for who is missing, and a loaded machine


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Hosts:
    """Two namespaces with a cable between them; the first has address 10.203.0.1."""

    def __init__(self) -> None:
        self.names = [f"moe-ep-{os.getpid()}-{host}" for host in range(2)]
        self.links = [f"mep{os.getpid() % 100000}.{host}" for host in range(2)]
        self.processes: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"10.203.0.{host + 1}/24", "dev", link)
            for device in (link, "lo"):
                _ip("-n", name, "link", "set", device, "up")

    def start(self, world: int, ranks_per_host: int, job: str) -> None:
        for rank in range(world):
            host = rank // ranks_per_host
            place = [str(number) for number in (rank, world, ranks_per_host)]
            command = [sys.executable, "-m", "tests.helpers.two_hosts", *place, "10.203.0.1", str(PORT), job]
            environ = os.environ | {"GLOO_SOCKET_IFNAME": self.links[host], "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)

    def await_line(self, line: str) -> None:
        """Until every rank has printed it."""
        for process in self.processes:
            assert process.stdout is not None
            said = process.stdout.readline()
            if said.strip() != line:
                process.kill()
                raise AssertionError(f"{said!r} instead of {line!r}: {process.communicate()[1][-2000:]}")

    def results(self, timeout_secs: float) -> list[dict[str, object]]:
        found = []
        for process in self.processes:
            out, errors = process.communicate(timeout=timeout_secs)
            assert process.returncode == 0, errors[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
        return found

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def remove(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs ip (iproute2) and the right to make network namespaces")
    made = Hosts()
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


@pytest.mark.slow(ci=True)
def test_ranks_on_two_hosts_find_their_nodes_and_give_what_the_loops_give(hosts: Hosts) -> None:
    hosts.start(4, 2, "all_works")
    for rank, found in enumerate(hosts.results(120)):
        assert found["buffer"] == (f"Buffer(backend='internode', rank={rank}, group_size=4, num_nodes=2, hop='torch')")


@pytest.mark.slow(ci=True)
def test_ranks_of_both_hosts_end_within_the_limit_when_the_network_is_cut(hosts: Hosts) -> None:
    hosts.start(2, 1, "is_cut_off")
    hosts.await_line("ready")
    hosts.cut()
    for rank, found in enumerate(hosts.results(60)):
        assert f"dispatch on rank {rank} of the EP group of ranks [0, 1] failed" in str(found["error"]), found
        assert float(str(found["secs"])) < LIMIT_SECS + GRACE_SECS
