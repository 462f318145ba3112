"""`bitdraft doctor` and `bitdraft bench` as a user runs them, with and without the compiled kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Run
from model_files import config, write_folder

from bitdraft.ops import native


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", config())


def test_the_doctor_says_what_is_in_use(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    library, why = native.load()
    assert found["well"] == (library is not None)
    assert code == (0 if library else 1), why
    assert found["library_fault"] == why
    assert found["isa"] == (found["library_runs"][-1] if library else "reference")
    assert found["threads"] == found["usable_cores"] <= found["cores"]


def test_the_reference_is_a_problem_that_is_said_aloud() -> None:
    """In a process of its own, as it is installed."""
    done = subprocess.run(
        [sys.executable, "-c", "from bitdraft.cli import main; main()", "doctor"],
        env=os.environ | {"BITDRAFT_ISA": "reference"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "problem: BITDRAFT_ISA=reference switches the compiled kernels off" in done.stdout
    assert "FP32" in done.stdout
    assert "Unset BITDRAFT_ISA." in done.stdout


def test_the_reference_is_a_problem_for_programs_too(run: Run) -> None:
    code, out, _ = run("doctor", "--json", BITDRAFT_ISA="reference")
    found = json.loads(out)
    assert code == 1
    assert (found["well"], found["isa"], found["isa_asked"]) == (False, "reference", "reference")
    assert found["findings"][0].keys() == {"what", "costs", "remedy", "grave"}


@pytest.mark.parametrize(
    ("name", "value"), [("BITDRAFT_ISA", "sse9"), ("BITDRAFT_THREADS", "many"), ("BITDRAFT_THREADS", "0")]
)
def test_the_doctor_explains_an_environment_that_nothing_runs_in(run: Run, name: str, value: str) -> None:
    code, out, err = run("doctor", **{name: value})
    assert code == 1
    assert f"{name}={value}" in out
    assert "Traceback" not in err


def test_forced_instruction_sets_and_threads_are_used_and_noted(run: Run) -> None:
    code, out, _ = run("doctor", "--json", BITDRAFT_ISA="scalar", BITDRAFT_THREADS="1")
    found = json.loads(out)
    assert code == 0
    assert (found["isa"], found["threads"]) == ("scalar", 1)


@pytest.mark.parametrize("isa", ["", "reference"])
def test_bench_step_prints_the_curve(run: Run, tiny: Path, isa: str) -> None:
    given = "bench", "step", tiny, "--format", "w4a8", "--seconds", 0.2
    code, out, err = run(*given, "--json", BITDRAFT_ISA=isa, BITDRAFT_THREADS="1")
    assert code == 0, err
    assert len(out.splitlines()) == 1, "one object on standard output, and nothing else"
    result = json.loads(out)
    assert result["format"] == "w4a8"
    assert (result["isa"] == "reference") == (isa == "reference" or native.load()[0] is None)
    assert result["steps"]
    for step in result["steps"]:
        assert step.keys() == {"rows", "context", "batch", "ms"}
        assert step["rows"] in (*range(1, 9), 16)
        assert step["context"] == 112, "what 16 rows leave of the model's 128"
        assert step["ms"] > 0
    code, out, _ = run(*given, BITDRAFT_ISA=isa, BITDRAFT_THREADS="1")
    assert code == 0
    assert "1 x 112 tokens" in out
    assert "(1.00)" in out


def test_bench_kernels_needs_kernels(run: Run) -> None:
    code, out, err = run("bench", "kernels", BITDRAFT_ISA="reference")
    assert code == 2
    assert out == ""
    assert "there are no compiled kernels to measure" in err
    assert "bitdraft doctor" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("bench", "step", "no/such-model/at-all"), "no/such-model/at-all"),
        (("bench", "step", "smollm2-135m", "--format", "w9a9"), "no format 'w9a9'"),
        (("bench", "step", "smollm2-135m", "--seconds", "-1"), "--seconds"),
        (("bench",), "step"),
        (("bench", "nothing"), "nothing"),
    ],
)
def test_what_cannot_be_used_is_one_message(run: Run, given: tuple[str, ...], said: str) -> None:
    code, out, err = run(*given, HF_HUB_OFFLINE="1")
    assert code == 2
    assert said in out + err
    assert "Traceback" not in err
