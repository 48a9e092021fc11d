"""`atoll simulate`: a job with all its sites on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from atoll.simulations.results import Result
    from atoll.wire.runs_pb2 import RunSnapshot

DEFAULT_OUT = Path("simulation-out")

KeyValues = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="KEY=VALUE",
        show_default="[data.NAME] of user.toml",
        help="What the app finds its data by, as in [data.NAME] of a site. With {site} in a value each site has its own.",
    ),
]


def simulate(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")],
    sites: Annotated[
        int | None, typer.Option("--sites", min=1, show_default="those that the job names, or 10", help="How many.")
    ] = None,
    data: KeyValues = None,
    server_data: Annotated[
        list[str] | None,
        typer.Option("--server-data", metavar="KEY=VALUE", help="The same for evaluation at the server, with {site}."),
    ] = None,
    partition: Annotated[
        str,
        typer.Option(
            "--partition",
            help="How the data is spread over the sites: iid, dirichlet, shards, classes, quantity or natural.",
        ),
    ] = "iid",
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha", help="Of dirichlet: 0.1 few classes at each site, 100 all alike. Of quantity: the same of sizes."
        ),
    ] = 0.5,
    shards: Annotated[int, typer.Option("--shards", help="Of shards: how many each site has.")] = 2,
    classes: Annotated[int, typer.Option("--classes", help="Of classes: exactly how many each site has.")] = 2,
    partition_seed: Annotated[int, typer.Option("--partition-seed", min=0, help="Another seed is another split.")] = 0,
    step_seconds: Annotated[
        float, typer.Option("--step-seconds", help="Simulated time of an optimizer step; 0: no time passes.")
    ] = 0.0,
    spread: Annotated[
        float, typer.Option("--spread", help="How much sites differ in speed: deviation of a log-normal distribution.")
    ] = 0.0,
    stragglers: Annotated[float, typer.Option("--stragglers", help="Share of the sites that is slower.")] = 0.0,
    slowdown: Annotated[float, typer.Option("--slowdown", help="How many times slower they are.")] = 10.0,
    network: Annotated[
        list[str] | None,
        typer.Option(
            "--network",
            metavar="KEY=VALUE",
            help="The sites' lines: up_mbit_s, down_mbit_s, latency_s, spread. Without it bytes take no simulated time.",
        ),
    ] = None,
    available: Annotated[
        list[str] | None,
        typer.Option(
            "--available",
            metavar="KEY=VALUE",
            help="When sites are there each day: hours, peak (the hour at which they begin), deviation.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="CSV or JSON of devices: site, step_s, up_mbit_s, down_mbit_s, latency_s, ...",
        ),
    ] = None,
    dropout: Annotated[
        float, typer.Option("--dropout", help="How likely a site brings nothing each time that it is asked: 0 to 1.")
    ] = 0.0,
    faults: Annotated[
        Path | None,
        typer.Option("--faults", metavar="FILE", help="Which sites fail, are slow or lie, and when (TOML, [[fault]])."),
    ] = None,
    session_dropout: Annotated[
        float,
        typer.Option(
            "--session-dropout", help="How likely a site drops out of a session of secure aggregation: 0 to 1."
        ),
    ] = 0.0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A value in place of the job's, such as strategy.optimizer.lr=0.1."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUES",
            help="A label of the sites: its values, with commas between, are dealt to them in turn.",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option("--engine", help="auto, sequential or processes: who does the sites' work. Results are the same."),
    ] = "auto",
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, show_default="one for each core", help="How many there are.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            show_default="simulation-out",
            help="Folder for rounds.jsonl and model.safetensors.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="DIR", help="Go on with the run that was interrupted there, with the same options."
        ),
    ] = None,
    resumable: Annotated[
        bool,
        typer.Option("--resumable/--no-resumable", help="Keep in --out what a run that is interrupted can go on from."),
    ] = True,
    preview: Annotated[
        bool,
        typer.Option("--preview", help="Show how the data would lie over the sites, draw it into --out, and end."),
    ] = False,
    home: options.PersonHome = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a job with simulated sites.

    The same job, app, strategy and server logic as a deployment, without a network: with equal seeds, data and survivors
    the model has the same bytes. Ctrl-C interrupts it; it goes on with --resume DIR in place of --out. With --json the result is one
    line on stdout.

    \b
    Examples:
      atoll simulate job.toml --sites 100 --data path=central.npz --partition dirichlet --alpha 0.1
      atoll simulate job.toml --sites 20 --data path=central.npz --partition classes --classes 2 --preview
      atoll simulate job.toml --sites 3 --data 'path=data/{site}.npz' --json | jq .metrics
      atoll simulate job.toml --sites 50 --step-seconds 0.01 --stragglers 0.1 --network up_mbit_s=10
      atoll simulate job.toml --sites 100 --data path=central.npz --resume simulation-out
      atoll simulate job.toml --sites 20 --label region=north,south --dropout 0.1
    """
    from atoll.cli import pairs
    from atoll.cli.live import open_view
    from atoll.cli.output import note, print_json
    from atoll.cli.preview import show_preview
    from atoll.client.people import default_home, load_settings
    from atoll.simulations.clock import Speeds
    from atoll.simulations.devices import Availability, Network
    from atoll.simulations.dropouts import Dropouts
    from atoll.simulations.keeping import is_kept
    from atoll.simulations.opening import job_with
    from atoll.simulations.preview import preview as draw
    from atoll.simulations.simulate import simulate as run
    from atoll.simulations.sites import Partition
    from atoll.transport.callbacks import Callbacks
    from atoll.transport.news import SnapshotReader

    source = pairs.table(data, "--data")
    spread_by = Partition(kind=partition, alpha=alpha, shards_each=shards, classes_each=classes, seed=partition_seed)  # type: ignore[arg-type]  # it says what it takes
    given = job_with(job, changed) if (changed := pairs.table(changes, "--set")) else job
    if preview:
        drawn = draw(given, sites=sites, source=source, partition=spread_by, home=home)
        show_preview(drawn, out or DEFAULT_OUT, as_json=as_json)
        return
    folder = resume or out or DEFAULT_OUT
    callbacks, reader = Callbacks(load_settings(home or default_home()).callbacks), SnapshotReader()
    view = open_view()

    def show(snapshot: RunSnapshot) -> None:
        view.show(snapshot)
        for news in reader.read(snapshot):
            callbacks.tell(news)

    try:
        result = run(
            given,
            sites=sites,
            source=source,
            server_source=pairs.table(server_data, "--server-data"),
            partition=spread_by,
            speeds=Speeds(
                step_s=step_seconds, spread=spread, stragglers=stragglers, slowdown=slowdown, seed=partition_seed
            ),
            network=pairs.options(Network, network, "--network", seed=partition_seed),
            availability=pairs.options(Availability, available, "--available", seed=partition_seed),
            trace=trace,
            labels=lambda names: pairs.labels(label, names),
            dropouts=Dropouts(share=dropout, seed=partition_seed),
            faults=faults or (),
            engine=engine,  # type: ignore[arg-type]  # as partition
            processes=processes,
            session_dropouts=Dropouts(share=session_dropout, seed=partition_seed),
            out=out or (DEFAULT_OUT if resume is None else None),
            resumable=resumable,
            resume=resume,
            show=show,
            home=home,
        )
    except KeyboardInterrupt:
        view.close()
        note(f"interrupted; the rounds that were committed are in {folder}/rounds.jsonl, the last model beside it")
        if is_kept(folder):
            note(f"go on with the same command and --resume {folder} in place of --out")
        raise
    finally:
        view.close()
        callbacks.close()
    if as_json:
        print_json({**result.record(), "out": str(folder)})
    else:
        print("\n".join(_lines(result, folder)))
    if result.status != "finished":
        note(f"atoll: the run is {result.status}: {result.reason}")
        raise typer.Exit(ExitCode.NOT_FINISHED)


def _lines(result: Result, out: Path) -> list[str]:
    """What a simulation came to, for people."""
    from atoll.cli.output import age
    from atoll.cli.snapshots import headline_metric

    words = [f"{len(result.rounds)} rounds of {len(result.sites)} sites in {age(result.wall_s)}"]
    if result.simulated_s:
        words.append(f"{age(result.simulated_s)} of simulated time")
    if result.rounds and (found := headline_metric({**result.rounds[-1].evaluate, **result.rounds[-1].server})):
        words.append(f"{found[0]} {found[1]:.4f}")
    return [", ".join(words), f"rounds and model: {out}"]
