"""Starts ranks as Ray's actors: ray_ranks.py RANKS COMMAND... Each actor sets the variables and runs the command."""

import os
import socket
import subprocess
import sys

import ray

size, command = int(sys.argv[1]), sys.argv[2:]


@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, rank):
        self.rank = rank

    def free_address(self):
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, address, port):
        variables = {"RANK": self.rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
        return subprocess.run(command, env=os.environ | {name: str(value) for name, value in variables.items()}).returncode


ray.init(num_cpus=size, include_dashboard=False, log_to_driver=True)
ranks = [Rank.remote(rank) for rank in range(size)]
meeting = ray.get(ranks[0].free_address.remote())
codes = ray.get([rank.run.remote(*meeting) for rank in ranks])
print("exit codes", codes)
sys.exit(max(codes))
