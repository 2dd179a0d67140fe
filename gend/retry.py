"""`gend retry`: makes the rows of a run with some verdicts again, as a new round.

A round is a run of its own: its prompt set is the subset of the run's prompts whose best row so far, over the run and
its earlier rounds, has one of the verdicts. The prompts' lines are the same bytes, so that `BestRows` finds them again.
It has another seed, or else the same replies could come again; else it has the run's sampling, verdicts and alarm, but
for what is changed with --set.
"""

from collections.abc import Iterator, Sequence

import msgspec

from gend import sets
from gend.config import Settings, changed
from gend.errors import SettingsError
from gend.ledger import Control
from gend.records import PromptSet, Row, Run
from gend.runs import BestRows, listed_parts, read_parts, sound_rows
from gend.store import Store


class Round(msgspec.Struct, frozen=True):
    """What is to be registered as the next round of a run. `settings` hold what is the run's too."""

    number: int
    name: str
    set: PromptSet
    settings: Settings


def next_round(
    settings: Settings, store: Store, run: Run, rounds: Sequence[Run], verdicts: Sequence[str], changes: list[str]
) -> Round:
    """The next round, its prompt set made on this box. `changes` are KEY=VALUE.

    Raises SettingsError where there is nothing to do again, or where an earlier round is still at it.
    """
    if run.round_of:
        raise SettingsError(f"run {run.id} is round {run.round} of {run.round_of}: retry that one, rounds do not nest")
    if run.model != settings.model.path:
        raise SettingsError(f"run {run.id} was made with {run.model}; the config file has {settings.model.path}")
    for again in rounds:
        missing = again.batches - len(listed_parts(store, again)[0])
        if missing and _control(store, again).state != "cancelled":
            raise SettingsError(
                f"round {again.round} of run {run.id} is not finished, {missing:,} of {again.batches:,} parts are to "
                f"come: wait for it, or `gend cancel {again.id}`"
            )
    number = 1 + max((again.round for again in rounds), default=0)
    as_before = msgspec.structs.replace(
        settings,
        sampling=msgspec.structs.replace(run.sampling, seed=run.sampling.seed + number),
        verdicts=run.verdicts,
        alarm=_control(store, run).alarm or settings.alarm,
    )
    as_changed = changed(as_before, changes)
    best = BestRows()
    for source, again in enumerate(rounds, 1):
        for prompt, row in _rows(store, again):
            best.offer(prompt, row.verdict, source)
    with sets.SetWriter(settings.folder, f"{', '.join(verdicts)} of {run.id}") as writer:
        for prompt, row in _rows(store, run):
            if best.best(prompt, row.verdict, 0)[0] in verdicts:
                writer.accept(prompt)
        if not writer.accepted:
            raise SettingsError(f"run {run.id}: no prompt's best row is {' or '.join(verdicts)}; see `gend verify`")
        return Round(number, f"{run.name}-round-{number}", writer.finish(), as_changed)


def _rows(store: Store, run: Run) -> Iterator[tuple[bytes, Row]]:
    for part in read_parts(store, run, listed_parts(store, run)[0]):
        yield from sound_rows(part)


def _control(store: Store, run: Run) -> Control:
    raw = store.get(f"runs/{run.id}/control.json")
    return msgspec.json.decode(raw, type=Control) if raw else Control()
