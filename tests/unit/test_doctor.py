"""What `bitdraft doctor` finds: each shortcoming is named with its cost and a remedy; a sound machine gives none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bitdraft.measure.doctor import Checkup, examine, render_checkup
from bitdraft.measure.machine import this_machine
from bitdraft.ops import hardware, native

SOUND = Checkup(
    processor="Some CPU",
    system="Linux x86_64",
    memory_bytes=16 << 30,
    memory_available_bytes=12 << 30,
    cores=8,
    usable_cores=8,
    threads=8,
    threads_asked=None,
    processor_runs=("avx2", "avx512"),
    library_runs=("scalar", "avx2", "avx512"),
    library_fault=None,
    isa="avx512",
    isa_asked=None,
    fault=None,
    large_pages="madvise",
    compiler=None,
    bitdraft="0.1.0",
    torch="2.13.0",
    python="3.11.7",
    cache="/cache",
    cache_writable=True,
    free_bytes=10**11,
)

CPUINFO = """processor\t: 0
model name\t: Some CPU @ 3 GHz
flags\t\t: fpu avx2 fma f16c {more}

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""


def printed(found: Checkup) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        render_checkup(found, console)
    return capture.get()


def test_a_sound_machine_has_nothing_to_mend():
    assert SOUND.findings == []
    assert SOUND.well
    text = printed(SOUND)
    assert "All is well" in text
    for word in (
        "Some CPU",
        "8 of 8",
        "16.0 GiB",
        "avx512 in use",
        "scalar, avx2, avx512",
        "madvise",
        "0.1.0",
        "/cache",
    ):
        assert word in text
    assert "compiler" not in text, "only of interest where the library is missing"


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"isa": None, "isa_asked": "sse9", "fault": "BITDRAFT_ISA=sse9: no"}, "BITDRAFT_ISA=sse9", "unset"),
        (
            {"threads": None, "isa": None, "fault": "BITDRAFT_THREADS=x. Expected a number"},
            "BITDRAFT_THREADS=x",
            "unset",
        ),
        ({"isa": "reference", "isa_asked": "reference"}, "BITDRAFT_ISA=reference", "Unset BITDRAFT_ISA"),
        (
            {"isa": "reference", "library_runs": (), "library_fault": "no kernels: install a compiler"},
            "no kernels: install a compiler",
            "No compiler is on the PATH",
        ),
        (
            {"isa": "reference", "library_runs": (), "library_fault": "no kernels", "compiler": "/usr/bin/g++"},
            "no kernels",
            "/usr/bin/g++",
        ),
    ],
)
def test_without_the_kernels_it_is_not_well(changes, what, remedy):
    found = replace(SOUND, **changes)
    assert not found.well
    (finding,) = found.findings
    assert what in finding.what
    assert remedy in finding.remedy
    assert finding.costs
    assert "problem:" in printed(found)


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"isa": "scalar", "isa_asked": "scalar"}, "this machine runs avx512", "Unset BITDRAFT_ISA"),
        ({"library_runs": ("scalar", "avx2"), "isa": "avx2"}, "the processor has avx512", "newer g++"),
        ({"library_runs": ("scalar",), "isa": "scalar", "processor_runs": ()}, "no kernels for this", "AVX2"),
        ({"threads": 9, "threads_asked": "9"}, "9 threads on 8 usable cores", "set it to 8"),
        ({"threads": 2, "threads_asked": "2"}, "2 of 8 usable cores compute", "set it to 8"),
        ({"threads": 4, "usable_cores": 4}, "4 of 8 cores may be used", "taskset"),
        ({"large_pages": "never"}, "large pages are switched off", "echo madvise"),
        ({"cache_writable": False}, "/cache cannot be written", "BITDRAFT_CACHE"),
        ({"free_bytes": 10**9}, "1.0 GB free", "BITDRAFT_CACHE"),
    ],
)
def test_what_could_be_better_is_a_note_with_its_cost(changes, what, remedy):
    found = replace(SOUND, **changes)
    assert found.well
    (finding,) = found.findings
    assert what in finding.what
    assert remedy in finding.remedy
    assert finding.costs
    text = " ".join(printed(found).split())
    assert "note:" in text
    assert finding.what in text
    assert finding.costs in text


def test_the_gravest_comes_first():
    found = replace(SOUND, isa="reference", isa_asked="reference", large_pages="never", threads=9)
    assert [finding.grave for finding in found.findings] == [True, False, False]


def test_what_the_system_does_not_say_is_no_finding():
    found = replace(SOUND, large_pages=None, memory_bytes=None, memory_available_bytes=None, processor_runs=())
    assert found.findings == []
    assert "unknown" in printed(found)


def test_brackets_in_names_are_printed_as_they_stand():
    assert "/a[b]/c" in printed(replace(SOUND, cache="/a[b]/c", cache_writable=False))


# The system's files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "proc/cpuinfo": CPUINFO.format(more="avx512f avx512bw avx512dq avx512vl avx512_vnni"),
        "proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n",
        "sys/fs/cgroup/memory.max": "4294967296\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "24M\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_system_s_files_are_read(root, monkeypatch, tmp_path):
    monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path / "not" / "there" / "yet"))
    found = examine({"BITDRAFT_ISA": "", "BITDRAFT_THREADS": ""}, root)
    assert found.processor == "Some CPU @ 3 GHz"
    assert found.processor_runs == ("avx2", "avx512")
    assert (found.memory_bytes, found.memory_available_bytes) == (4 << 30, 8 << 30), "the control group's limit"
    assert found.large_pages == "never"
    assert found.cache_writable
    assert found.free_bytes > 0
    assert (found.isa_asked, found.threads_asked) == (None, None), "empty is not set"
    assert hardware.last_level_cache(root) == 24 << 20


def test_a_system_without_these_files_is_no_error(tmp_path):
    found = examine({}, tmp_path)
    assert found.processor
    assert found.memory_bytes is found.large_pages is None
    assert found.processor_runs == ()
    assert hardware.last_level_cache(tmp_path) is None


def test_no_limit_of_memory_is_no_limit(root):
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert examine({}, root).memory_bytes == 16 << 30
    (root / "proc/cpuinfo").write_text(CPUINFO.format(more="avx512f"))
    assert examine({}, root).processor_runs == ("avx2",), "part of AVX-512 is not enough"


def test_a_report_names_the_threads_that_compute_and_not_torchs_own() -> None:
    """Beside the kernels torch runs on one thread; a measurement made on all cores must not say that it had one."""
    kernels = native.default()
    assert kernels is not None
    torch.set_num_threads(1)
    assert this_machine().cores == kernels.threads
