"""Ids, names and seeds: the same for the same thing, everywhere and always."""

import msgspec
import pytest

from gend.config import Settings, changed
from gend.records import PART_NAME, PromptSet, Run, Sampling, Verdicts, part_key, row_seed, run_id, run_identity


def a_run(accepted: int, batch_size: int) -> Run:
    prompt_set = PromptSet(
        fingerprint="f" * 64, source="x.jsonl", read=accepted, accepted=accepted, rejected=0, bytes=1
    )
    return Run(
        id="x-0", name="x", set=prompt_set, model="m", sampling=Sampling(), batch_size=batch_size, created="2026-01-01",
        gend_version="0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accepted", "size", "counts"),
    [(1, 1, [1]), (1, 8, [1]), (8, 8, [8]), (9, 8, [8, 1]), (24, 8, [8, 8, 8]), (5, 2, [2, 2, 1])],
)
def test_batches_cut_a_run_into_consecutive_slices(accepted: int, size: int, counts: list[int]) -> None:
    run = a_run(accepted, size)
    batches = [run.batch(number) for number in range(run.batches)]
    assert [batch.count for batch in batches] == counts
    covered = [index for batch in batches for index in range(batch.first, batch.first + batch.count)]
    assert covered == list(range(accepted))
    for beyond in (-1, run.batches):
        with pytest.raises(IndexError):
            run.batch(beyond)


def test_identity_changes_with_everything_that_changes_the_rows_and_nothing_else() -> None:
    sampling = Sampling()
    others = [
        run_identity("b", "m", sampling),
        run_identity("a", "n", sampling),
        *(
            run_identity("a", "m", msgspec.structs.replace(sampling, **{field.name: value}))
            for field in msgspec.structs.fields(Sampling)
            for value in ([False, None] if field.name == "thinking" else [0.5 if field.name == "top_p" else 1])
            if value != getattr(sampling, field.name)
        ),
    ]
    identities = [run_identity("a", "m", sampling), *others]
    assert len(set(identities)) == len(identities) >= 9
    assert run_identity("a", "m", changed(Settings(), ["temperature=1"]).sampling) == identities[0]


def test_identity_is_what_it_was_when_runs_were_stored() -> None:
    """Another value would make every run that is in somebody's store a new one."""
    assert run_identity("0" * 64, "Qwen/Qwen3.6-27B", Sampling(max_tokens=16384)) == "3b46a65991ed"
    assert row_seed(7, "p0000042", 1) == 472597777


def test_a_run_that_was_stored_before_runs_had_verdicts_has_the_defaults() -> None:
    stored = msgspec.to_builtins(a_run(9, 8))
    del stored["verdicts"]
    assert msgspec.json.decode(msgspec.json.encode(stored), type=Run) == a_run(9, 8)
    stored["verdicts"] = msgspec.to_builtins(Verdicts(loop={"retries": 1, "top_k": None, "temperature": 1.2}))
    assert msgspec.convert(stored, Run).verdicts.loop == {"retries": 1, "top_k": None, "temperature": 1.2}
    stored["verdicts"]["loop"]["whim"] = 1
    with pytest.raises(msgspec.ValidationError, match="loop: whim: unknown key"):
        msgspec.convert(stored, Run)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("My prompts (v2).final", "my-prompts-v2-final"),
        ("überprüfung", "berpr-fung"),
        ("../../etc/passwd", "etc-passwd"),
        ("数学", "run"),
        ("", "run"),
        ("-" * 50, "run"),
        ("a" * 39 + "-b", "a" * 39),  # cut at 40 characters, and never with a dash at its end
    ],
)
def test_run_ids_are_safe_as_file_names_object_keys_and_job_ids(name: str, slug: str) -> None:
    assert run_id(name, "0123456789ab") == f"{slug}-0123456789ab"


def test_seeds_differ_by_run_prompt_and_attempt_and_fit_everywhere() -> None:
    seeds = [row_seed(s, p, a) for s in (0, 7, 2**40) for p in ("1", "11", "é", "\ud800") for a in (0, 1, 11)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_part_keys_sort_by_number_and_are_known_again() -> None:
    keys = [part_key("r", number) for number in (0, 9, 10, 99_999_999)]
    assert keys == sorted(keys)
    matches = [PART_NAME.match(key.rpartition("/")[2]) for key in keys]
    assert [match and int(match[1]) for match in matches] == [0, 9, 10, 99_999_999]
