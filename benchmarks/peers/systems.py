"""What is compared with what: systems as they are written on the command line, and the peers of bitdraft's formats.

llama-cpp:q4_0              a peer and one of its formats, decoding plainly
openvino:int8+int4@5        with a draft in a format of its own, 5 tokens a step
transformers:bf16+bf16      with a draft, as many tokens as the peer itself chooses
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from files import GGUF_FORMATS, IR_FORMATS

SCRIPTS = {
    "bitdraft": "bitdraft_worker.py",
    "llama-cpp": "llama_cpp_worker.py",
    "openvino": "openvino_worker.py",
    "transformers": "transformers_worker.py",
}
"""The worker of each system; a peer's environment has the peer's name."""

STEPS = ("bitdraft", "llama-cpp")
"""Systems that can say what a step of several rows costs."""

CHOOSES_LENGTH = ("openvino", "transformers")
"""Systems that choose a draft length where none is given."""

_FORMATS = {"llama-cpp": (*GGUF_FORMATS, "stored"), "openvino": IR_FORMATS, "transformers": ("bf16", "f32")}

_PEERS = {
    "w4": ("llama-cpp:q4_0", "openvino:int4"),
    "w8": ("llama-cpp:q8_0", "openvino:int8"),
    "fp8": ("llama-cpp:q8_0", "openvino:int8"),
    "bf16": ("llama-cpp:bf16", "openvino:fp16", "transformers:bf16"),
}
"""How a format of bitdraft begins -> what it is compared with: weights of the same width."""

_DRAFTING_PEERS = {
    "w4": ("llama-cpp:q4_0+q4_0@2", "llama-cpp:q4_0+q4_0@4", "openvino:int4+int4@5"),
    "w8": ("llama-cpp:q8_0+q4_0@3", "openvino:int8+int8@4", "openvino:int8+int4@5"),
    "fp8": ("llama-cpp:q8_0+q4_0@3", "openvino:int8+int8@4", "openvino:int8+int4@5"),
    "bf16": ("llama-cpp:bf16+q4_0@4", "openvino:fp16+int8@5", "transformers:bf16+bf16"),
}
"""The same, with the drafts and lengths that were the peers' best on the 1.5B and the 0.5B model when lengths 2 to 8
were tried."""

_WRITTEN = re.compile(r"([a-z-]+):([\w-]+?)(?:\+([\w-]+?)(?:@(\d+))?)?")


@dataclass(frozen=True)
class System:
    """One system in one format.

    Attributes:
        name: 'bitdraft' or a peer. format: of the target, in the system's own words.
        draft_format: of the draft; None decodes plainly. draft_tokens: a step; None lets the peer choose.
    """

    name: str
    format: str
    draft_format: str | None = None
    draft_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> "System":
        """Read 'llama-cpp:q4_0' or 'llama-cpp:q4_0+q4_0@4'.

        Raises:
            ValueError: it is not written like this, or names no system or no format of it.
        """
        match = _WRITTEN.fullmatch(text)
        if not match or match[1] not in SCRIPTS:
            raise ValueError(f"{text!r} is no system. Expected one of {', '.join(SCRIPTS)} as in llama-cpp:q4_0+q4_0@4")
        name, form, draft_format, draft_tokens = match.groups()
        known = _FORMATS.get(name)
        for given in filter(None, (form, draft_format)):
            if known and given not in known:
                raise ValueError(f"{text!r}: {name} has no format {given!r} here. Expected one of {', '.join(known)}")
        if draft_format and not draft_tokens and name not in CHOOSES_LENGTH:
            raise ValueError(f"{text!r}: {name} chooses no draft length by itself. Give one, as in {text}@4")
        return cls(name, form, draft_format, int(draft_tokens) if draft_tokens else None)

    def __str__(self) -> str:
        draft = f"+{self.draft_format}" if self.draft_format else ""
        length = f"@{self.draft_tokens}" if self.draft_tokens else ""
        return f"{self.name}:{self.format}{draft}{length}"

    @property
    def plain(self) -> "System":
        """The same without a draft."""
        return System(self.name, self.format)

    @property
    def loaded(self) -> "System":
        """What a worker loads: the draft length is part of a request."""
        return System(self.name, self.format, self.draft_format)

    @property
    def script(self) -> Path:
        """The worker's file."""
        return Path(__file__).with_name(SCRIPTS[self.name])


def peers_of(form: str, drafting: bool, chosen: Sequence[str] | None) -> list[System]:
    """What a format of bitdraft is compared with.

    Args:
        form: the format of bitdraft's (target) weights.
        drafting: peers with drafts too.
        chosen: systems as they are written, or names of peers, which mean all of theirs; None means all peers.

    Raises:
        ValueError: one of `chosen` does not exist, or nothing of the format's width is known.
    """
    width = next((known for known in _PEERS if form.startswith(known)), None)
    table = [*_PEERS[width], *(_DRAFTING_PEERS[width] if drafting else ())] if width else []
    found = []
    for text in table if chosen is None else chosen:
        found += [text] if ":" in text else [peer for peer in table if peer.startswith(f"{text}:")]
    if not found and (chosen is None or chosen):
        raise ValueError(f"{form}: no peers of the same width are known. Name some, as in llama-cpp:q4_0")
    return [System.parse(text) for text in found]
