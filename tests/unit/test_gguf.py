"""The GGUF reader: what it reads, and that a cut or damaged file gives one clear message."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import model_files
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.errors import ModelFileError
from bitdraft.models.gguf import GGUFFile
from bitdraft.models.gguf_model import GGUFCheckpoint


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model with its tokenizer, in several tensor types."""
    config = model_files.config("llama", hidden_size=32)
    types = {
        "model.embed_tokens.weight": Kind.Q8_0,
        "model.layers.0.mlp.gate_proj.weight": Kind.Q4_0,
        "model.layers.1.mlp.gate_proj.weight": Kind.F16,
    }
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return model_files.write_gguf(path, config, types=types).read_bytes()


def use(path: Path) -> None:
    """Do with a file all that is ever done with one."""
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.config.linear_shapes():
        checkpoint.tensor(f"{name}.weight")
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("hello world"))


class TestMetadata:
    def test_every_kind_of_value(self, tmp_path: Path) -> None:
        values = {
            "uint8": 255,
            "int8": -128,
            "uint16": 65535,
            "int16": -32768,
            "uint32": 2**32 - 1,
            "int32": -(2**31),
            "uint64": 2**64 - 1,
            "int64": -(2**63),
            "float32": 0.5,
            "float64": 0.1,
            "bool": True,
            "string": "naïve 猫 🙂",
        }
        file = GGUFFile(
            write(tmp_path / "f", lambda w: [getattr(w, f"add_{k}")(f"k.{k}", v) for k, v in values.items()] and None)
        )
        assert {k.removeprefix("k."): v for k, v in file.metadata.items() if k.startswith("k.")} == values
        assert all(type(file.metadata[f"k.{k}"]) is type(v) for k, v in values.items())

    @pytest.mark.parametrize(
        "values", [[1, -2, 3], [0.5, -1.5], [True, False, True], ["a", "", "猫"], [[1, 2], [3]], [["a"], ["b", "c"]]]
    )
    def test_arrays(self, tmp_path: Path, values: list[object]) -> None:
        assert GGUFFile(write(tmp_path / "f", lambda w: w.add_array("k", values))).metadata["k"] == values

    def test_typed_access(self, tmp_path: Path) -> None:
        def fill(w: gguf.GGUFWriter) -> None:
            w.add_uint32("int", 3)
            w.add_string("text", "x")
            w.add_array("words", ["a", "b"])

        file = GGUFFile(write(tmp_path / "f", fill))
        assert (file.number("int", int), file.number("int", float), file.number("absent", int, 7)) == (3, 3.0, 7)
        assert (file.strings("words"), file.strings("absent")) == (["a", "b"], None)
        with pytest.raises(ModelFileError, match=r"'text' is 'x'. Expected an integer"):
            file.number("text", int)
        with pytest.raises(ModelFileError, match=r"'absent' is missing. Expected a text"):
            file.number("absent", str)
        with pytest.raises(ModelFileError, match=r"'words' is no list of int values"):
            file.integers("words")


class TestTensors:
    @pytest.mark.parametrize("alignment", [8, 32, 128])
    def test_shape_order_alignment_and_values(self, tmp_path: Path, alignment: int) -> None:
        values = np.arange(30, dtype=np.float32).reshape(2, 3, 5)

        def fill(w: gguf.GGUFWriter) -> None:
            w.add_custom_alignment(alignment)
            w.add_tensor("first", np.ones(3, dtype=np.float32))
            w.add_tensor("second", values)

        file = GGUFFile(write(tmp_path / "f", fill))
        assert file.tensors["second"].shape == (2, 3, 5)
        assert np.array_equal(file.tensor("second").numpy(), values)
        with pytest.raises(KeyError):
            file.tensor("third")

    def test_a_tensor_is_fresh(self, tmp_path: Path) -> None:
        file = GGUFFile(write(tmp_path / "f", lambda w: w.add_tensor("t", np.ones(4, dtype=np.float32))))
        file.tensor("t").zero_()
        assert file.tensor("t").tolist() == [1.0] * 4

    def test_a_type_that_is_not_read_is_named(self, tmp_path: Path) -> None:
        raw = np.zeros((1, 18), dtype=np.uint8)
        path = write(tmp_path / "f", lambda w: w.add_tensor("blk.0.x", raw, raw_dtype=Kind.IQ4_NL))
        with pytest.raises(ModelFileError, match=r"tensor 'blk.0.x' is stored as IQ4_NL. bitdraft reads F32, .*Q6_K"):
            GGUFFile(path)

    def test_a_type_that_nobody_knows_is_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f", lambda w: w.add_tensor("t", np.zeros(4, dtype=np.float32)))
        raw = path.read_bytes()
        entry = raw.index(b"\x01\x00\x00\x00\x00\x00\x00\x00t") + 9 + 4 + 8
        path.write_bytes(raw[:entry] + struct.pack("<I", 99) + raw[entry + 4 :])
        with pytest.raises(ModelFileError, match=r"tensor 't' is stored as type 99, which is not known"):
            GGUFFile(path)


class TestNotAGgufFile:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"absent.gguf: cannot be read \(No such file"):
            GGUFFile(tmp_path / "absent.gguf")

    @pytest.mark.parametrize("raw", [b"", b"GG", b"<html>not found</html>"])
    def test_other_contents(self, tmp_path: Path, raw: bytes) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(raw)
        with pytest.raises(ModelFileError, match=r"not a GGUF file"):
            GGUFFile(path)

    @pytest.mark.parametrize(
        ("version", "said"), [(1, "version 1"), (4, "version 4"), (3 << 24, "a big-endian file"), (0, "version 0")]
    )
    def test_other_versions(self, tmp_path: Path, whole: bytes, version: int, said: str) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(ModelFileError, match=said):
            GGUFFile(path)

    def test_version_2_reads_as_version_3(self, tmp_path: Path, whole: bytes) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(whole[:4] + struct.pack("<I", 2) + whole[8:])
        use(path)

    def test_one_part_of_a_split_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f", lambda w: w.add_uint16("split.count", 3))
        with pytest.raises(ModelFileError, match=r"one part of a GGUF that is split into 3 files.*--merge"):
            GGUFFile(path)


class TestDamage:
    """Wherever a file is cut or changed, it loads or there is a ModelFileError that names the file."""

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_cut_anywhere(self, tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject) -> None:
        path = tmp_path_factory.getbasetemp() / "cut.gguf"
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 32))])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            use(path)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_bytes_changed_anywhere(
        self, tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
    ) -> None:
        header = whole.index(b"token_embd.weight") + 4000
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(whole) - 1)))
            damaged[place] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.getbasetemp() / "changed.gguf"
        path.write_bytes(damaged)
        with suppress(ModelFileError):
            use(path)

    @pytest.mark.parametrize("place", [8, 16], ids=["tensors", "metadata"])
    @pytest.mark.parametrize("count", [10**6, 2**32, 2**64 - 1])
    def test_absurd_counts(self, tmp_path: Path, whole: bytes, place: int, count: int) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(whole[:place] + struct.pack("<Q", count) + whole[place + 8 :])
        with pytest.raises(ModelFileError, match=r"truncated or damaged"):
            GGUFFile(path)

    @pytest.mark.parametrize("length", [0, 19, 2**31, 2**63, 2**64 - 1])
    def test_wrong_length_of_a_key(self, tmp_path: Path, whole: bytes, length: int) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(whole[:24] + struct.pack("<Q", length) + whole[32:])
        with pytest.raises(ModelFileError, match=r"truncated or damaged"):
            GGUFFile(path)

    @pytest.mark.parametrize("length", [2**20, 2**40, 2**64 - 1])
    def test_absurd_array_length(self, tmp_path: Path, length: int) -> None:
        path = write(tmp_path / "f", lambda w: w.add_array("list", ["abc"] * 6))
        raw = path.read_bytes()
        place = raw.index(struct.pack("<IQ", 8, 6)) + 4
        path.write_bytes(raw[:place] + struct.pack("<Q", length) + raw[place + 8 :])
        with pytest.raises(ModelFileError, match=r"'list'.*truncated or damaged"):
            GGUFFile(path)

    def test_arrays_in_arrays_without_end(self, tmp_path: Path) -> None:
        nest = struct.pack("<IQ", 9, 1) * 2000
        raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nest
        path = tmp_path / "f.gguf"
        path.write_bytes(raw + bytes(64))
        with pytest.raises(ModelFileError, match=r"a value of type 9"):
            GGUFFile(path)

    def test_the_tensor_that_goes_past_the_end_is_named(self, tmp_path: Path, whole: bytes) -> None:
        path = tmp_path / "f.gguf"
        path.write_bytes(whole[:-1000])
        with pytest.raises(ModelFileError, match=r"tensor 'output_norm.weight'|tensor 'blk.1.*' needs bytes"):
            GGUFFile(path)

    def test_a_key_and_a_tensor_that_appear_twice(self, tmp_path: Path) -> None:
        def fill(w: gguf.GGUFWriter) -> None:
            w.add_uint32("key.a", 1)
            w.add_uint32("key.b", 1)
            w.add_tensor("ten.a", np.zeros(8, dtype=np.float32))
            w.add_tensor("ten.b", np.zeros(8, dtype=np.float32))

        raw = write(tmp_path / "f", fill).read_bytes()
        (tmp_path / "f").write_bytes(raw.replace(b"key.b", b"key.a"))
        with pytest.raises(ModelFileError, match=r"the key appears twice \(in the metadata key 'key.a'"):
            GGUFFile(tmp_path / "f")
        (tmp_path / "f").write_bytes(raw.replace(b"ten.b", b"ten.a"))
        with pytest.raises(ModelFileError, match=r"the tensor appears twice \(in tensor 'ten.a'"):
            GGUFFile(tmp_path / "f")

    @pytest.mark.parametrize("alignment", [0, 3, 48])
    def test_an_alignment_that_is_no_power_of_two(self, tmp_path: Path, alignment: int) -> None:
        path = write(tmp_path / "f", lambda w: w.add_uint32("general.alignment", alignment))
        with pytest.raises(ModelFileError, match=r"general.alignment is .*power of two"):
            GGUFFile(path)

    def test_rows_that_are_no_whole_number_of_blocks(self, tmp_path: Path) -> None:
        raw = np.zeros((2, 18), dtype=np.uint8)
        path = write(tmp_path / "f", lambda w: w.add_tensor("t", raw, raw_dtype=Kind.Q4_0))
        data = path.read_bytes()
        place = data.index(struct.pack("<IQQI", 2, 32, 2, 2)) + 4
        path.write_bytes(data[:place] + struct.pack("<Q", 33) + data[place + 8 :])
        with pytest.raises(ModelFileError, match=r"shape \[2, 33\] does not go into Q4_0 blocks \(in tensor 't'"):
            GGUFFile(path)
