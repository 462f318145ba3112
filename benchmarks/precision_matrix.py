"""Which draft precision and length for the reference pair, on code and on chat? The first matrix of docs/log.md.

Runs `bitdraft measure` on 50 prompts of each workload and keeps its report and its trace under benchmarks/results,
named by date and machine. Under an hour on two cores; an interrupted run goes on where it stopped.

    python benchmarks/precision_matrix.py
"""

import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

from bitdraft.measure.machine import this_machine

ASKED = (
    "measure --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --formats bf16,fp8,w8a8,w4a16-awq,w4a16 "
    "--workload code,chat --prompts 50 --max-tokens 32 --k 1..6 --batch 16 --confirm 2 --confirm-prompts 3 --rounds 1 "
    "--resume -o"
)
RESULTS = Path(__file__).parent / "results"
WORK = Path("build/precision-matrix")


def main() -> int:
    status = subprocess.run([str(Path(sys.executable).with_name("bitdraft")), *ASKED.split(), str(WORK)]).returncode
    if status == 0:
        machine = re.sub(r"[^a-z0-9]+", "-", this_machine().fingerprint.lower()).strip("-")
        name = f"{date.today().isoformat()}-{machine}-precision-matrix"
        shutil.copy(WORK / "report.md", RESULTS / f"{name}.md")
        shutil.copy(WORK / "report.json", RESULTS / f"{name}.json")
    return status


if __name__ == "__main__":
    sys.exit(main())
