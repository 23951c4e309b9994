"""`kvring heads`: measure which head groups of a model look far, so that key codes are kept of those alone."""

from __future__ import annotations

from typing import Annotated

import typer

from kvring_cli import console
from kvring_cli.commands.gate import GateProgress
from kvring_cli.options import AsJson, Flags, MeasuredModel, Verbose, engine_options


@engine_options
def heads(
    model: MeasuredModel,
    tokens: Annotated[int, typer.Option("--tokens", min=3000, help="Of each of the three documents.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Keep nothing, print it.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Measure which head groups look far; later starts keep key codes of those alone. Minutes, once per model."""
    from engine.errors import ConfigError
    from engine.files import check_folder
    from engine.recall.far_heads import FAR, FarHeads, looks_file, write_looks
    from gates.context import load_context
    from gates.far_heads import measure, origin
    from gates.options import GateOptions
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    if config.model.startswith("random:"):
        raise ConfigError("random weights look nowhere", "a real model; --far-heads 50 takes half of a random one's")
    with GateProgress("heads") as progress:
        context = load_context(config, GateOptions(), progress)
        if not dry_run:
            check_folder(looks_file(context.model.digest).parent, "--dry-run, or a cache folder that can be written")
        looks = measure(context, tokens)
    path = None if dry_run else write_looks(looks, context.model.digest, origin(context, tokens))
    far = FarHeads.above(looks, FAR, "measured now")
    if as_json:
        looking = {"looks": looks.round(4).tolist(), "least": FAR, "far": far.by_layer, "groups": far.groups}
        console.write_json({"model": context.model.name, **looking, "stored": None if path is None else str(path)})
        return
    console.write("| layer | the farthest page's share, by KV head | look far |\n| --- | --- | --- |\n")
    for layer, (row, kept) in enumerate(zip(looks, far.by_layer, strict=True)):
        console.write(f"| {layer} | {' '.join(f'{share:.2f}' for share in row)} | {' '.join(map(str, kept))} |\n")
    console.write(f"\nkey codes of {far}: a page gets {FAR:.0%} of the group's attention, or it is its layer's best\n")
    console.write(f"stored in {path}\n" if path else "not stored (--dry-run)\n")
