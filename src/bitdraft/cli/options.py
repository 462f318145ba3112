"""Options that several verbs take."""

from typing import Annotated

import typer

Target = Annotated[
    str, typer.Option("--target", help="Model whose answers count: a name, a folder, a .gguf or a hub id.")
]
TargetFormat = Annotated[
    str, typer.Option(help="Format of the target; auto keeps a quantised folder as it is, else is bf16.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead of text.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 keeps every token.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps every token.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest; 0 drops none.")]
Seed = Annotated[int, typer.Option(help="Names the random streams: the same seed gives the same output.")]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor keep repacked weights on disk, beside the model.")
]
MinConfidence = Annotated[
    float, typer.Option(min=0, max=1, help="End a block after a token that the draft finds less likely than this.")
]
KV = Annotated[
    str | None,
    typer.Option("--kv", help="Format of keys and values: f32, bf16, int8, fp8, int8-kc or int4. Default: bf16."),
]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
