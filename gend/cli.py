"""The command line: options, logging, and errors to exit codes. The work is in the flows."""

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gend import __version__
from gend.config import Settings, find_config, load_settings
from gend.errors import GendError, SettingsError

if TYPE_CHECKING:
    from gend.ledger import Ledger
    from gend.loader import Registered
    from gend.records import Prompt, Run
    from gend.store import Store

# Flows are imported where they are used: `gend status` over SSH shall not wait for boto3, aiohttp or pyarrow.


class Context:
    """What every command needs: the config file, read when it is first wanted."""

    def __init__(self, config: str | None):
        self._config = config

    @property
    def path(self) -> Path:
        return find_config(self._config)

    @property
    def settings(self) -> Settings:
        from gend.valkey import shared_with_group

        settings = load_settings(self.path)
        if shared_with_group(settings.folder):  # what we write there, other members must be able to write too
            os.umask(os.umask(0o077) & ~0o070)
        return settings

    @property
    def optional_settings(self) -> Settings | None:
        """The settings, or None where there is no config file and nobody asked for one."""
        if not self._config and not os.environ.get("GEND_CONFIG"):
            try:
                find_config(None)
            except SettingsError:
                return None
        return self.settings

    @contextlib.contextmanager
    def redis_url(self, settings: Settings) -> Iterator[str]:
        """Where the ledger is; gend's own Valkey is started for as long as it is wanted."""
        if settings.redis.url:
            yield settings.redis.url
            return
        from gend import valkey

        with valkey.hold(settings.folder) as url:
            yield url

    @contextlib.contextmanager
    def ledger(self, settings: Settings) -> Iterator["Ledger"]:
        from gend.ledger import Ledger

        with self.redis_url(settings) as url:
            ledger = Ledger(url)
            ledger.check()
            yield ledger

    def store(self, settings: Settings) -> "Store":
        from gend.store import open_store

        return open_store(settings.store)


class Group(click.Group):
    """Ends with the exit code that the error names, and one clear line on stderr."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except GendError as error:
            click.secho(f"gend: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("gend: interrupted", err=True)
            context.exit(128 + signal.SIGINT)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", metavar="FILE", help="Settings; else $GEND_CONFIG, ./config.toml, /etc/gend/config.toml.")
@click.version_option(__version__, prog_name="gend")
@click.pass_context
def main(context: click.Context, config: str | None) -> None:
    """Turn a file of prompts into finished training data on a GPU box.

    \b
    gend demo                     see it work, on this machine alone
    gend enqueue prompts.jsonl    register a prompt set; the daemon may be up or down
    gend up                       the daemon: servers, workers, loader
    gend status                   how it stands
    gend verify RUN               read every part: is the run whole and sound?

    Exit codes: 0 done, 1 the work is not sound, 2 wrong use or settings, 3 something needed is not reachable.
    """
    context.obj = Context(config)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # what nohup has ignored stays so
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    """Leave in order: whoever holds gend's own Valkey or half a prompt set must let go of it."""
    sys.exit(128 + number)


@main.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--name", help="What to call the run; the file's name if not given.")
@click.option("--prompt-field", metavar="FIELD", help="The field that holds the prompt's text; a.b goes deeper.")
@click.option("--template", metavar="FILE", help="A Jinja template that makes the user message out of a line's fields.")
@click.option("--keep-last", is_flag=True, help="Continue a last assistant turn instead of making it again.")
@click.option("--duplicates", type=click.Choice(["reject", "keep"]), default="reject", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--strict", is_flag=True, help="Refuse the whole set at the first line that is wrong.")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal", show_default=True)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE",
              help="Sampling: temperature=0.6. Or verdicts.loop=1, alarm.bad=0.1: see config.toml.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was registered as JSON.")
@click.pass_obj
def enqueue(
    context: Context,
    sources: tuple[str, ...],
    name: str | None,
    prompt_field: str | None,
    template: str | None,
    keep_last: bool,
    duplicates: Any,
    limit: int | None,
    strict: bool,
    priority: Any,
    changes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Register a prompt set and its run, and enqueue what is missing.

    SOURCE is a file (JSONL, JSON array, Parquet, .gz, .zst), a glob, a saved dataset folder, s3://..., or - for stdin.
    The same prompts with the same model and sampling are the same run: enqueueing them again adds nothing.
    """
    from gend import loader
    from gend.config import changed
    from gend.prompts import ReadOptions
    from gend.store import open_object

    settings = changed(context.settings, changes)
    options = ReadOptions(
        prompt_field=prompt_field,
        template=_template(template),
        keep_last=keep_last,
        duplicates=duplicates,
        limit=limit,
        strict=strict,
    )
    store = context.store(settings)
    store.check()
    try:
        budget, why_not = loader.token_budget(settings), ""
    except SettingsError as error:  # no harm: a prompt that is too long becomes a row that the server refused
        budget, why_not = None, str(error)
    with context.ledger(settings) as ledger:
        with _counter("prompts read", as_json) as progress:
            remote = open_object(settings.store.endpoint, settings.store.region)
            prompt_set = loader.read_set(settings.folder, sources, options, remote, progress, budget)
        name = name or Path(sources[0].rstrip("/")).name.split(".")[0] or "stdin"
        done = loader.register(settings, ledger, store, prompt_set, name, priority)
    if as_json:
        click.echo(msgspec.json.encode(done).decode())
        return
    if done.new:
        click.echo(f"run {done.run}: {done.prompts:,} prompts in {done.batches:,} batches")
    else:
        click.echo(f"run {done.run} is there already with these {done.prompts:,} prompts: nothing was added")
    _say_what_it_keeps(done)
    if done.rejected:
        click.echo(f"{done.rejected:,} of {done.read:,} lines were rejected, each with its reason: {done.rejects_file}")
    if why_not:
        click.echo(f"prompts too long for the context are left to the server to refuse: {why_not}")
    click.echo("next: gend status" if done.new else f"next: gend verify {done.run}")


@main.command()
@click.option("--until-idle", is_flag=True, help="End when every run is finished.")
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
@click.pass_obj
def up(context: Context, until_idle: bool, log_json: bool) -> None:
    """The daemon in the foreground: servers, one worker for each, the loader. Stop it with Ctrl-C or SIGTERM.

    It outlives the terminal it was started in: then its log goes on in the folder's logs/daemon.log.
    """
    import asyncio

    from gend.processes import log_path
    from gend.server_command import visible_gpus
    from gend.supervisor import only_daemon, supervise

    settings = context.settings
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # an SSH connection that breaks must not end two days of work
    _log_to_stderr(log_json, log_path(settings.folder, "daemon"))
    with only_daemon(settings.folder), context.redis_url(settings) as url:
        context.store(settings).check()
        code = asyncio.run(supervise(settings, context.path.absolute(), url, until_idle, visible_gpus()))
    sys.exit(code)


@main.command()
@click.option("--watch", is_flag=True, help="Again and again, until q or Ctrl-C.")
@click.option("--every", type=click.FloatRange(min=0.2), default=2.0, metavar="SECONDS", help="For --watch; 2 s.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with a stable schema: gend/status.py describes it.")
@click.pass_obj
def status(context: Context, watch: bool, every: float, as_json: bool) -> None:
    """How everything stands: servers, runs, rates, time left, dollars. Works with the daemon down."""
    from gend import screen
    from gend.status import read_status

    settings = context.settings
    with context.ledger(settings) as ledger:
        if watch and not as_json:
            return screen.watch(lambda: read_status(ledger, settings), every)
        now = read_status(ledger, settings)
    click.echo(msgspec.json.encode(now).decode() if as_json else screen.render(now), nl=as_json)


@main.command()
@click.argument("run")
@click.option("--html", "page", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write the report with plots and sample rows as one HTML file.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The whole report as JSON.")
@click.pass_obj
def verify(context: Context, run: str, page: Path | None, as_json: bool) -> None:
    """Read every part of RUN in the store: exit 0 only if every prompt has exactly one sound row.

    RUN is a run's id, its name, or a beginning of the id that fits only one. Its rounds (gend retry) are read too.
    """
    from gend.report import Samples, render
    from gend.report import verify as read_everything
    from gend.runs import stored_rounds

    settings = context.settings
    store = context.store(settings)
    found = _find_run(store, run)
    rounds = stored_rounds(store, found)
    samples = Samples(8, found.id) if page else None
    with _counter("batches read", as_json) as progress:
        report = read_everything(store, found, rounds, samples, progress)
    if page and samples:
        from gend.report_page import write_page

        write_page(page, found, rounds, report, samples)
    click.echo(msgspec.json.encode(report).decode() if as_json else render(report))
    sys.exit(0 if report.sound else 1)


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", "folder", required=True, metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path),
              help="A new or empty folder for the shards and manifest.json.")  # fmt: skip
@click.option("--form", type=click.Choice(["messages", "specforge", "tokens"]), default="messages", show_default=True,
              help="What a row looks like: OpenAI messages, SpecForge's, or input_ids and loss_mask.")  # fmt: skip
@click.option("--format", "file_format", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--verdict", "verdicts", default="ok", show_default=True, metavar="V,...", help="Rows to export.")
@click.option("--shard-rows", type=click.IntRange(min=1), default=50_000, show_default=True, metavar="N")
@click.option("--tokenizer", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="A model folder, for token ids of rows that came without.")  # fmt: skip
@click.option("--min-loss-tokens", type=click.IntRange(min=1), default=16, show_default=True, metavar="N",
              help="A loss mask with a smaller sum is refused; over 1 % of them, and the export fails.")  # fmt: skip
@click.option("--partial", is_flag=True, help="Export a run that is not finished.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
@click.pass_obj
def export(
    context: Context,
    runs: tuple[str, ...],
    folder: Path,
    form: Any,
    file_format: Any,
    verdicts: str,
    shard_rows: int,
    tokenizer: Path | None,
    min_loss_tokens: int,
    partial: bool,
    as_json: bool,
) -> None:
    """Write training files out of RUNs and their rounds: the best row of each prompt, if its verdict is chosen.

    Name the largest run first: it is read once, the others twice. A folder without manifest.json is not finished.
    """
    from gend.export import ExportOptions
    from gend.export import export as write_shards

    settings = context.settings
    store = context.store(settings)
    options = ExportOptions(
        format=file_format,
        form=form,
        verdicts=_verdicts(verdicts),
        shard_rows=shard_rows,
        tokenizer=tokenizer,
        min_loss_tokens=min_loss_tokens,
        partial=partial,
    )
    found = [_find_run(store, run) for run in runs]
    with _counter("batches read", as_json) as progress:
        manifest = write_shards(store, found, folder, options, progress)
    if as_json:
        click.echo(msgspec.json.encode(manifest).decode())
        return
    click.echo(f"{manifest.rows:,} rows of {manifest.prompts:,} prompts in {len(manifest.shards):,} files: {folder}")
    for source in manifest.sources:
        lacking = f", {source.missing_batches:,} parts missing" if source.missing_batches else ""
        click.echo(f"  {source.rows:,} from {source.run} ({source.model}){lacking}")
    for what, counts in (("other verdict", manifest.other_verdicts), ("left out", manifest.left_out)):
        for reason, count in counts.items():
            click.echo(f"  {what}: {count:,} {reason}")
    if manifest.validator_flags:
        click.echo(f"  passes SpecForge's validate_regenerated_data.py {' '.join(manifest.validator_flags)}")


@main.command()
@click.argument("run")
@click.option("--verdict", "verdicts", required=True, metavar="V,...", help="Make the rows with these again.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE",
              help="Sampling: max_tokens=65536. Or verdicts.loop=1, alarm.length=1.0: see config.toml.")  # fmt: skip
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print what was registered as JSON.")
@click.pass_obj
def retry(context: Context, run: str, verdicts: str, changes: tuple[str, ...], priority: Any, as_json: bool) -> None:
    """Make the rows of RUN with these verdicts again: a new round, with another seed.

    A round is a run of its own; verify and export of RUN take the best row of each prompt over all its rounds.
    """
    from gend import loader
    from gend.retry import next_round
    from gend.runs import stored_rounds

    settings = context.settings
    store = context.store(settings)
    store.check()
    found = _find_run(store, run)
    rounds = stored_rounds(store, found)
    again = next_round(settings, store, found, rounds, _verdicts(verdicts), list(changes))
    with context.ledger(settings) as ledger:
        done = loader.register(again.settings, ledger, store, again.set, again.name, priority, found.id, again.number)
    if as_json:
        click.echo(msgspec.json.encode(done).decode())
        return
    click.echo(
        f"run {done.run}: round {again.number} of {found.id}, {done.prompts:,} prompts in {done.batches:,} batches"
    )
    _say_what_it_keeps(done)
    click.echo("next: gend status")


def _say_what_it_keeps(done: "Registered") -> None:
    if done.verdicts_kept:
        click.echo(
            f"it was registered with other verdicts and keeps {', '.join(done.verdicts_kept)}; its bad rows are made "
            f"again with other settings by: gend retry {done.run} --verdict V --set KEY=VALUE"
        )
    if done.alarm_kept:
        click.echo(
            f"it has another alarm and keeps {', '.join(done.alarm_kept)}; to change it: "
            f"gend resume {done.run} --set alarm.KEY=VALUE"
        )


@main.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-run"))
def demo(folder: Path) -> None:
    """The whole job, small, on this machine alone: own Valkey, own store, a real small model on the CPU."""
    from gend.demo import demo as run_demo

    run_demo(folder)


@main.command()
@click.option("--generate", is_flag=True, help="Also ask each running server for one real thinking reply.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def doctor(context: Context, generate: bool, as_json: bool) -> None:
    """Is this box fit, before the meter runs: GPUs, software, model, disk, limits, ports, Redis, store.

    Starts no server and changes nothing that stays. Exit 1 if anything fails. About 10 s; with --generate minutes.
    """
    from gend.doctor import examine, lines

    findings = examine(context.settings, generate)
    failed = sum(finding.state == "fail" for finding in findings)
    if as_json:
        click.echo(msgspec.json.encode({"fit": not failed, "findings": findings}).decode())
    else:
        colours = {"ok": "green", "warning": "yellow", "fail": "red", "skipped": "bright_black"}
        for state, line in lines(findings):
            click.secho(line, fg=colours[state] if sys.stdout.isatty() else None)
        warned = sum(finding.state == "warning" for finding in findings)
        click.echo(f"NOT FIT: {failed} of {len(findings)} fail" if failed else f"fit, with {warned} warnings")
    sys.exit(1 if failed else 0)


def _workload_options(command: Any) -> Any:
    """What plan and tune both want to know."""
    for option in (
        click.option("--radix/--no-radix", default=None, help="Force the radix cache on or off."),
        click.option("--mtp/--no-mtp", default=None, help="Force speculative decoding with the model's own head."),
        click.option("--reply-tokens", type=click.FloatRange(min=1), default=2500.0, show_default=True),
        click.option("--prompt-tokens", type=click.FloatRange(min=1), help="Mean length of a prompt."),
        click.option("--card", help="H200, B200, ...; else the one in this box."),
    ):
        command = option(command)
    return command


@main.command()
@click.option("--model", metavar="MODEL", help="A folder with a config.json, or a known name; else the config's.")
@_workload_options
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of the box; else those of this one, or 8.")
@click.option("--gpus-per-server", type=click.IntRange(min=1), help="Else as few as fit.")
@click.option("--rows", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option("--run", metavar="RUN", help="Take rows and prompt lengths from this run.")
@click.option("--offers", multiple=True, metavar="8xB200@44", help="Boxes to compare, with $/h; else all known cards.")
@click.option("--dollars-per-hour", type=click.FloatRange(min=0), help="Of the whole box.")
@click.option("--tokens-per-second", type=click.FloatRange(min=0), default=0.0, help="As measured; else estimated.")
@click.option("--write", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Put the flags into this config.toml.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def plan(
    context: Context,
    model: str | None,
    card: str | None,
    prompt_tokens: float | None,
    reply_tokens: float,
    mtp: bool | None,
    radix: bool | None,
    gpus: int | None,
    gpus_per_server: int | None,
    rows: int,
    run: str | None,
    offers: tuple[str, ...],
    dollars_per_hour: float | None,
    tokens_per_second: float,
    write: Path | None,
    as_json: bool,
) -> None:
    """Flags, concurrency, time and cost of a model on a box: by arithmetic, in a second, without a GPU.

    The flags that are in the config are judged beside the suggested ones.
    """
    from rich.console import Console

    from gend.plan import Workload, render, write_config
    from gend.plan import plan as make_plan

    settings = context.optional_settings
    flags = _planned_flags(settings) if settings else None
    model = model or (settings.model.path if settings else None)
    if model is None:
        raise SettingsError("which model? give --model, or a config.toml with model.path")
    kind, count = _cards(card, settings)
    if run is not None:
        if settings is None:
            raise SettingsError("--run needs a config.toml that names the store")
        found = _find_run(context.store(settings), run)
        # JSON and what people write come to about four bytes a token.
        rows, prompt_tokens = found.set.accepted, prompt_tokens or found.set.bytes / found.set.accepted / 4
    made = make_plan(
        model=_described(model, settings),
        card=kind,
        workload=Workload(
            rows=rows,
            prompt_tokens=prompt_tokens or 200.0,
            reply_tokens=reply_tokens,
            max_tokens=settings.sampling.max_tokens if settings else 0,
        ),
        gpus=gpus or count,
        gpus_per_server=gpus_per_server or 0,
        flags=flags,
        flags_gpus_per_server=settings.servers.gpus_per_server if settings else 1,
        in_flight=settings.work.in_flight if settings else 0,
        mtp=mtp,
        radix=radix,
        offers=[offer for text in offers for offer in text.split(",")],
        # What the config says a box costs is this box, not one of another card.
        dollars_per_hour=dollars_per_hour or (settings.cost.dollars_per_hour if settings and not card else 0.0),
        tokens_per_second=tokens_per_second,
    )
    if as_json:
        click.echo(msgspec.json.encode(made).decode())
    else:
        console = Console()
        Console(width=None if console.is_terminal else 200).print(render(made))
    if write:
        write_config(write, made.suggested.flags, made.suggested.gpus_per_server)
        click.echo(f"{write} has these flags now; gend tune proves them on the box", err=True)


@main.command()
@click.argument("prompts", metavar="PROMPTS")
@_workload_options
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="For everything.")
@click.option("--ramp-seconds", type=click.FloatRange(min=0), default=120.0, show_default=True, help="At most.")
@click.option("--window-seconds", type=click.FloatRange(min=0.1), default=60.0, show_default=True)
@click.option("--limit", type=click.IntRange(min=1), default=2000, show_default=True, help="Prompts to take.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Sampling, e.g. --set max_tokens=1024.")
@click.option("--write/--no-write", default=True, show_default=True, help="Put the winner into the config.")
@click.option("--json", "as_json", is_flag=True, help="Print the trials as JSON at the end.")
@click.pass_obj
def tune(
    context: Context,
    prompts: str,
    card: str | None,
    prompt_tokens: float | None,
    reply_tokens: float,
    mtp: bool | None,
    radix: bool | None,
    minutes: float,
    ramp_seconds: float,
    window_seconds: float,
    limit: int,
    changes: tuple[str, ...],
    write: bool,
    as_json: bool,
) -> None:
    """Find the flags with the most tokens/s on this box, with real servers and real prompts. The daemon must be down.

    PROMPTS is a prompt file, or a run. The config's own flags are measured first, then the plan's, then neighbours of
    the best, on all GPUs at once. Ctrl-C keeps what was found so far.
    """
    import asyncio

    from gend.config import changed
    from gend.plan import Forecast, Workload, write_config
    from gend.server_command import seats, visible_gpus
    from gend.supervisor import only_daemon
    from gend.tune import HEAD, Candidate, Pace, row
    from gend.tune import tune as try_flags

    settings = context.settings
    sampling = changed(settings, changes, ["sampling"]).sampling
    sample = _sample(context, settings, prompts, limit)
    places = seats(settings, visible_gpus())
    own, size = _planned_flags(settings), settings.servers.gpus_per_server
    letters = sum(len(str(message.get("content"))) for prompt in sample for message in prompt.messages)
    workload = Workload(
        rows=1_000_000,
        prompt_tokens=prompt_tokens or letters / len(sample) / 4,
        reply_tokens=min(reply_tokens, sampling.max_tokens),
        reply_spread=0.0 if reply_tokens >= sampling.max_tokens else 0.8,
        max_tokens=sampling.max_tokens,
    )

    def show(line: str) -> None:
        click.echo(line, err=as_json)

    starts, others = [Candidate(name="config", flags=own)], []
    predict: Any = lambda flags: 0.0  # noqa: E731
    try:
        forecast = Forecast(_described(settings.model.path, settings), _cards(card, settings)[0], workload, size)
        predict = forecast.rate
        made = [Candidate(name=n, flags=f, promise=predict(f)) for n, f in forecast.layouts(own, mtp, radix)]
        starts = [Candidate(name="config", flags=own, promise=predict(own)), made[0]]
        others = made[1:]
    except SettingsError as error:
        show(f"no plan, so only the config's flags and their neighbours: {error}")
    show(HEAD)
    with only_daemon(settings.folder):
        pace = Pace(minutes=minutes, ramp_seconds=ramp_seconds, window_seconds=window_seconds)
        done = asyncio.run(try_flags(settings, places, sample, sampling, starts, others, predict, pace, show))
    if as_json:
        click.echo(msgspec.json.encode(done).decode())
    if done.stopped:
        show(f"ended before everything was tried: {done.stopped}")
    if done.best is None:
        raise SettingsError("no candidate made a token; each line above says why")
    show(f"best: {row(done.best)}")
    show(f"{done.best.tokens_per_second * len(places):,.0f} tokens/s with {len(places)} servers")
    if done.best.flags == own:
        show("these are the config's own flags: nothing to write")
    elif write:
        write_config(context.path, done.best.flags, size)
        show(f"{context.path} has these flags now; next: gend up")


def _planned_flags(settings: Settings) -> dict[str, Any]:
    """The config's flags over those of gend's own that a plan may change."""
    from gend.plan import PLANNED, plain_names
    from gend.server_command import sglang_defaults
    from gend.sglang_flags import is_sglang

    own = sglang_defaults(settings.model.path) if is_sglang(settings.servers.command) else {}
    return {name: value for name, value in own.items() if name in PLANNED} | plain_names(settings.servers.flags)


def _described(model: str, settings: Settings | None) -> str:
    """The model, or its folder in Hugging Face's cache where gend ships no shape of that name."""
    from gend.model_files import find_model
    from gend.model_shapes import shape_of

    try:
        shape_of(model)
    except SettingsError:
        folder = find_model(model, {**os.environ, **(settings.servers.environment if settings else {})})
        return str(folder) if folder else model
    return model


def _cards(card: str | None, settings: Settings | None) -> tuple[str, int]:
    """The kind of card, and how many: as asked for, or what is in this box. Raises SettingsError."""
    from gend.gpus import read_driver

    listed = settings.servers.gpus if settings and isinstance(settings.servers.gpus, list) else []
    if card:
        return card, len(listed) or 8  # nobody rents six
    driver = read_driver()
    if driver is None or not driver.gpus:
        raise SettingsError("no GPU here to plan for; say which with --card B200, and --gpus 8")
    return driver.gpus[0].name, len(listed) or len(driver.gpus)


def _sample(context: Context, settings: Settings, source: str, limit: int) -> list["Prompt"]:
    """The first prompts of a file, or of a run."""
    from gend import sets
    from gend.loader import fetch_set
    from gend.prompts import ReadOptions, Rejection, read_prompts
    from gend.records import Prompt

    if Path(source).exists():
        read = read_prompts([source], ReadOptions(limit=limit), None)
        found = [msgspec.json.decode(line, type=Prompt) for line in read if not isinstance(line, Rejection)]
    else:
        store = context.store(settings)
        run = _find_run(store, source)
        fetch_set(settings.folder, store, run.set)
        found = sets.read_prompts(settings.folder, run.set.fingerprint, 0, min(limit, run.set.accepted))
    if not found:
        raise SettingsError(f"{source}: no prompt was accepted")
    return found


def _decide(context: Context, run: str, alarm_changes: tuple[str, ...] = (), **changes: Any) -> None:
    from gend import loader
    from gend.config import changed

    settings = context.settings
    store = context.store(settings)
    found = _find_run(store, run)
    with context.ledger(settings) as ledger:
        before = ledger.controls().get(found.id)
        if before is None:
            raise SettingsError(f"run {found.id} is in the store, but not in the ledger yet: start `gend up` once")
        if alarm_changes:
            as_before = msgspec.structs.replace(settings, alarm=before.alarm or settings.alarm)
            changes["alarm"] = changed(as_before, alarm_changes, ["alarm"]).alarm
        after = msgspec.structs.replace(before, examples=[], **changes)
        loader.control(ledger, store, found.id, after)
    click.echo(f"run {found.id}: {after.state}, priority {after.priority}")


@main.command()
@click.argument("run")
@click.pass_obj
def pause(context: Context, run: str) -> None:
    """Stop sending prompts of RUN; what is in flight ends and is kept."""
    _decide(context, run, state="paused", reason="paused by hand", drop=False)


@main.command()
@click.argument("run")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), help="Give it another priority.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Its alarm, e.g. --set alarm.bad=0.2.")
@click.pass_obj
def resume(context: Context, run: str, priority: str | None, changes: tuple[str, ...]) -> None:
    """Go on with a paused or cancelled RUN."""
    new = {"priority": priority} if priority else {}
    _decide(context, run, changes, state="active", reason="", drop=False, **new)


@main.command()
@click.argument("run")
@click.pass_obj
def cancel(context: Context, run: str) -> None:
    """Stop RUN for good, also what is in flight. Parts that are in the store stay there."""
    _decide(context, run, state="cancelled", reason="cancelled by hand", drop=True)


@main.command()
@click.pass_obj
def drain(context: Context) -> None:
    """Ask the daemon to send nothing new, finish or give back what is held, and exit."""
    from gend.processes import kept_by_systemd

    settings = context.settings
    with context.ledger(settings) as ledger:
        daemon = ledger.daemon()
    if daemon is None:
        raise SettingsError("no daemon is running here")
    try:
        if kept_by_systemd(daemon["pid"]):
            click.echo("gend.service: draining, then it stays down; watch it with `gend status`")
            sys.stdout.flush()
            os.execvp("systemctl", ["systemctl", "stop", "--no-block", "gend.service"])
        os.kill(daemon["pid"], signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        raise SettingsError(f"the daemon (pid {daemon['pid']}) has just ended") from None
    except PermissionError:
        raise SettingsError(f"the daemon (pid {daemon['pid']}) belongs to another user: stop it as that user") from None
    click.echo(f"daemon pid {daemon['pid']}: draining; watch it with `gend status`")


@main.command()
@click.argument("server", required=False)
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="N", help="So many last lines: 40, of all logs 5.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.pass_obj
def logs(context: Context, server: str | None, lines: int | None, follow: bool) -> None:
    """The last lines of a server's log, or of all logs: servers, workers, loader, page.

    SERVER is a number, or a name: server-3, worker-3, loader, page. The daemon's own log is where it was started:
    your terminal, or journalctl -u gend.
    """
    from gend import logs as log_files

    folder = context.settings.folder
    names = log_files.chosen(folder, server)
    for name in names:
        if len(names) > 1:
            click.secho(f"== {name}", bold=True)
        for line in log_files.last_lines(folder, name, (5 if len(names) > 1 else 40) if lines is None else lines):
            click.echo(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for name, line in log_files.follow(folder, names):
                click.echo(f"{name}: {line}" if len(names) > 1 else line)


@main.command()
@click.argument("run")
@click.option("--verdict", "word", metavar="V", help="Only rows with this verdict: ok, length, loop, empty, ...")
@click.option("--random", "random_count", type=click.IntRange(min=1), metavar="N", help="N rows drawn from all parts.")
@click.option("--id", "prompt", metavar="ID", help="The row of this prompt.")
@click.option("-n", "--number", type=click.IntRange(min=1), default=3, show_default=True, help="The newest N rows.")
@click.option("--full", is_flag=True, help="Long texts whole.")
@click.option("--json", "as_json", is_flag=True, help="The rows as they are in the parts, one JSON object a line.")
@click.pass_obj
def rows(
    context: Context,
    run: str,
    word: str | None,
    random_count: int | None,
    prompt: str | None,
    number: int,
    full: bool,
    as_json: bool,
) -> None:
    """Look at real rows of RUN: the newest ones, random ones, or one by its id. The daemon may be up or down.

    Rows come from the parts in the store, and from the spool of this box: those are there before their batch is whole.
    """
    import itertools
    import random
    import shutil

    from gend import rows as found
    from gend.screen import coloured

    if word:
        _verdicts(word)
    settings = context.settings
    store = context.store(settings)
    of = _find_run(store, run)
    with _counter("parts read", as_json) as looked:
        if prompt is not None:
            chosen = iter([found.row_of_prompt(store, of, settings.folder, prompt)])
        elif random_count:
            chosen = found.random_rows(store, of, random.Random(), looked)
        else:
            chosen = found.newest_rows(store, of, settings.folder, looked)
        fits = (row for row in chosen if word in (None, row.verdict))
        shown = list(itertools.islice(fits, random_count or number))
    if not shown:
        click.echo(f"run {of.id} has no row {f'with verdict {word} ' if word else ''}yet", err=True)
    width = min(shutil.get_terminal_size().columns, 120)
    for row in shown:
        text = msgspec.json.encode(row).decode() if as_json else found.show(row, width, coloured(), full)
        # What UTF-8 does not know (a lone surrogate) is shown, not refused.
        click.echo(text.encode("utf-8", "backslashreplace"))


@main.command(hidden=True)
@click.option("--number", type=int, required=True)
@click.option("--url", required=True)
@click.option("--share", type=float, default=1.0)
@click.option("--peers", type=int, default=1)
@click.pass_obj
def worker(context: Context, number: int, url: str, share: float, peers: int) -> None:
    """One worker, bound to the server at --url. The supervisor starts it."""
    import uvloop

    from gend import valkey
    from gend.processes import box_name, die_with_parent
    from gend.worker import work

    die_with_parent()
    settings = context.settings
    _log_to_stderr(False)
    box = box_name(settings.folder)
    name = f"{box}-worker-{number}.{uuid.uuid4().hex[:8]}"
    redis_url = settings.redis.url or valkey.socket_url(settings.folder)
    code = uvloop.run(work(settings, redis_url, number, url, box, name, share, peers))
    # Not sys.exit, which waits for threads: one that asks a silent store would keep the next worker from its server.
    os._exit(code)


@main.command(hidden=True)
@click.pass_obj
def loader(context: Context) -> None:
    """The loader beside the daemon. The supervisor starts it."""
    import threading

    from gend import valkey
    from gend.ledger import Ledger
    from gend.loader import keep_supplied
    from gend.processes import die_with_parent

    die_with_parent()
    settings = context.settings
    _log_to_stderr(False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ledger = Ledger(settings.redis.url or valkey.socket_url(settings.folder))
    keep_supplied(settings, ledger, context.store(settings), stop.wait)


@main.command(hidden=True)
@click.pass_obj
def page(context: Context) -> None:
    """The page, /metrics and the notices. The supervisor starts it."""
    import asyncio

    from gend import valkey
    from gend.page import show
    from gend.processes import die_with_parent

    die_with_parent()
    settings = context.settings
    _log_to_stderr(False)
    redis_url = settings.redis.url or valkey.socket_url(settings.folder)
    asyncio.run(show(settings, redis_url, context.store(settings)))


def _find_run(store: "Store", wanted: str) -> "Run":
    """The run that `wanted` means, found in the store. Raises SettingsError naming what there is."""
    from gend.runs import stored_run

    names = list(store.folders("runs/"))
    fits = (
        [name for name in names if name == wanted]
        or [name for name in names if name.rpartition("-")[0] == wanted]
        or [name for name in names if name.startswith(wanted)]
    )
    if len(fits) != 1:
        what = "no run" if not fits else f"{len(fits)} runs"
        there = ", ".join((fits or names)[:5]) or "none; see gend enqueue"
        raise SettingsError(f"{what} {wanted!r} in {store.url}; there: {there}")
    return stored_run(store, fits[0])


def _verdicts(given: str) -> tuple[str, ...]:
    from gend.verdict import VERDICTS

    words = tuple(word.strip() for word in given.split(",") if word.strip())
    if not words or (unknown := [word for word in words if word not in VERDICTS]):
        what = f"unknown verdict {unknown[0]!r}" if words else "no verdict given"
        raise SettingsError(f"--verdict {given}: {what}; there are {', '.join(VERDICTS)}")
    return words


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--template {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--template {path}: not UTF-8: {error}") from error


@contextlib.contextmanager
def _counter(what: str, quiet: bool) -> Iterator[Any]:
    """A count that goes on while somebody waits at a terminal; silent elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        yield lambda count: click.echo(f"\r{count:,} {what} ", err=True, nl=False)
    finally:
        click.echo("\r\033[K", err=True, nl=False)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to stderr; when that is gone, as when its SSH session has ended, to a file from then on."""

    def __init__(self, afterwards: Path | None) -> None:
        super().__init__(sys.stderr)
        self._afterwards = afterwards

    def handleError(self, record: logging.LogRecord) -> None:
        if self._afterwards is None or not isinstance(sys.exception(), OSError):
            super().handleError(record)
            return
        self._afterwards.parent.mkdir(parents=True, exist_ok=True)
        # Python itself, too, would fail to flush the old stderr at its end, and exit with 120.
        sys.stderr = self.stream = open(self._afterwards, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._afterwards = None
        self.emit(record)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname.lower(), "from": record.name}
        line["says"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _log_to_stderr(as_json: bool, afterwards: Path | None = None) -> None:
    handler = _Stderr(afterwards)
    plain = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JsonLines() if as_json else plain)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
