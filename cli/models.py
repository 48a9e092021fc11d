"""`atoll model`: fetch a model version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options


def model(
    run: options.RunId,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write, in the safetensors format.")],
    version: Annotated[
        int | None, typer.Option("--version", min=0, show_default="newest", help="Model version to fetch.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best version, by the metric that the job's [control.best] names.")
    ] = False,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Fetch a run's model as safetensors.

    It loads with `safetensors.torch.load_file` and the app's `model()`.

    \b
    Examples:
      atoll model latest --out model.safetensors
      atoll model latest --best --out best.safetensors
    """
    import asyncio

    from atoll.cli.output import note, print_json, size
    from atoll.client.people import Person, load_person
    from atoll.client.researcher import FetchedModel, fetch_model, find_run

    if best and version is not None:
        raise typer.BadParameter("give --best or --version, not both")

    async def fetch(person: Person) -> FetchedModel:
        return await fetch_model(person, await find_run(person, run), out, version=version, best=best)

    found = asyncio.run(fetch(load_person(home)))
    if as_json:
        print_json({"run": found.run, "version": found.version, "path": str(found.path), "bytes": found.num_bytes})
        return
    note(f"{found.path}: version {found.version}, {found.num_tensors} tensors, {size(found.num_bytes)}")
