"""A tiny random pair behind a real socket."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from running import Running, start

from bitdraft.serve.settings import Settings
from bitdraft.serve.start import ServeConfig, load_service, open_and_plan

CONTEXT = 512


def serve_config(target: Path, draft: str | None, **changes: object) -> ServeConfig:
    """What the tests serve unless they say otherwise."""
    values: dict[str, object] = {
        "target": str(target),
        "draft": draft,
        "target_format": "auto",
        "draft_format": "auto",
        "kv": None,
        "draft_kv": None,
        "draft_length": 3,
        "confidence": 0.0,
        "max_batch": 4,
        "max_rows": 128,
        "max_model_len": CONTEXT,
        "kv_memory": 8 << 20,
        "prefix_cache": True,
        "generation_config": True,
    }
    limits: dict[str, object] = {
        "names": ("tiny",),
        "max_queue": 64,
        "max_body": 1 << 20,
        "timeout": 60.0,
        "drain": 2.0,
    }
    ours = {field.name for field in fields(Settings)}
    settings = Settings(**limits | {name: changes[name] for name in ours & set(changes)})  # type: ignore[arg-type]
    others = {name: value for name, value in changes.items() if name not in ours}
    return ServeConfig(settings=settings, **values | others)  # type: ignore[arg-type]


def start_tiny(folders: Path, draft: str | None, calibration: Sequence[str] = (), **changes: object) -> Running:
    """A running server of the tiny pair."""
    wanted = serve_config(folders / "target", draft, **changes)
    opened, plan = open_and_plan(wanted)
    return start(load_service(wanted, opened, plan, calibration))
