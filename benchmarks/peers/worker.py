"""The driver's end of a worker process, and what else the processor did while the worker worked."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol import Job
from systems import System

from bitdraft.ops.hardware import Ticks


class WorkerError(RuntimeError):
    """A worker could not load, answered with an error, or died."""


class Worker:
    """A process that answers one request at a time and is stopped in between, so that it uses no processor then.

    Attributes:
        versions: what the worker says that it runs.
    """

    def __init__(self, system: System, job: Job, environments: Path, log: Path) -> None:
        """Start the process and wait until it has loaded.

        Args:
            system: whose worker.
            job: what it loads.
            environments: where the peers' virtual environments lie.
            log: gets what the worker's libraries print.

        Raises:
            WorkerError: it did not load.
        """
        python = Path(sys.executable) if system.name == "bitdraft" else environments / system.name / "bin" / "python"
        if not python.exists():
            raise WorkerError(f"{python} does not exist. Make it with: setup_peers.py {system.name}")
        self._name, self._log = str(system), log
        threads = str(job.threads)
        settings = {**os.environ, "OMP_NUM_THREADS": threads, "BITDRAFT_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        if system.name != "bitdraft":
            settings.pop("PYTHONPATH", None)  # what is set for bitdraft has no place in a peer's environment
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                [python, system.script, json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=settings,
            )
        self.versions: dict[str, str] = self._answer()["ready"]
        os.kill(self._process.pid, signal.SIGSTOP)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask for one measurement and wait for it.

        Returns:
            The answer, with "other_cpu": the share of the processor time of the whole machine, while the worker
            worked, that others used.

        Raises:
            WorkerError: the worker answered with an error, or died.
        """
        os.kill(self._process.pid, signal.SIGCONT)
        before = Ticks.now(self._process.pid)
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._death() from None
        answer = self._answer()
        after = Ticks.now(self._process.pid)
        os.kill(self._process.pid, signal.SIGSTOP)
        return {**answer, "other_cpu": after.others_since(before) if before and after else 0.0}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self._name}: {answer['error']}")
        return answer

    def _death(self) -> WorkerError:
        self.close()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return WorkerError(f"{self._name} died: see {self._log}, which ends: {said[-1] if said else 'without a word'}")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
