"""A sequence sharded over two processes of this machine, connected by loopback."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest


@pytest.mark.long
def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    # As conftest.py has it, but for how many devices there are: programs compile in less time.
    flags = [x for x in os.environ["XLA_FLAGS"].split() if "device_count" not in x]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.process", address, "2", str(index)],
            cwd=pathlib.Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert output.count(f"process {index}:") == 3
