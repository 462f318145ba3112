"""`bitdraft serve` as a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: object, cache: Path | None = None) -> None:
        command = [sys.executable, "-c", "from bitdraft.cli import main; main()", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | ({"BITDRAFT_CACHE": str(cache)} if cache else {}),
        )
        self.said = ""
        assert self.process.stderr
        while "serving" not in self.said:
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line
        found = re.search(r"serving (.+) at (http://\S+)", self.said)
        assert found
        self.name, self.url = found[1], found[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, list[dict]]:
        """The exit code after SIGTERM, and the lines of the log."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
