"""The status as Prometheus metrics: base units, `_total` on what only grows (and begins anew with a worker)."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from gend import __version__
from gend.status import Status

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

SERVER_STATES = ("down", "starting", "ready", "stopping", "backoff", "blocked")
RUN_STATES = ("active", "paused", "cancelled", "finished")


def exposition(status: Status) -> bytes:
    """What /metrics answers for this status."""
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, status: Status):
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield _gauge("gend_info", "The version of gend; always 1.", {(__version__,): 1}, "version")
        yield _gauge("gend_daemon_up", "1 while the daemon runs.", {(): status.daemon})
        yield _gauge("gend_warnings", "How many warnings gend status shows.", {(): len(status.warnings)})
        yield from self.servers(status)
        yield from self.runs(status)
        yield from self.time_and_money(status)
        away = {outage.what: status.at - outage.since for outage in status.outages}
        yield _gauge(
            "gend_outage_seconds", "For how long the store, Redis or the disk has been away; 0 when it is there.",
            {(what,): away.get(what, 0.0) for what in ("store", "redis", "disk")}, "what",
        )  # fmt: skip
        store, redis = status.store, status.redis
        yield _gauge(
            "gend_store_last_part_timestamp_seconds", "When a part last arrived in the store.",
            {(): store.last_part_at} if store.last_part_at else {},
        )  # fmt: skip
        yield _gauge(
            "gend_spool_bytes", "Rows that wait on this box for the end of their batch.", {(): store.spool_bytes}
        )
        yield _gauge("gend_spool_batches", "Batches with rows in the spool.", {(): store.spool_batches})
        yield _gauge("gend_redis_memory_bytes", "Memory that Redis uses.", {(): redis.memory_bytes})
        yield _gauge("gend_redis_answer_seconds", "How long Redis took for one answer.", {(): redis.answer_seconds})

    def servers(self, status: Status) -> Iterable[Metric]:
        servers = {(str(server.number),): server for server in status.servers}
        yield _gauge(
            "gend_server_state", "1 for the state that a server is in.",
            {(*key, state): server.state == state for key, server in servers.items() for state in SERVER_STATES},
            "server", "state",
        )  # fmt: skip
        for name, text, field in (
            ("gend_server_in_flight_requests", "Requests at the server.", "in_flight"),
            ("gend_server_limit_requests", "Requests that may be at the server.", "limit"),
            ("gend_server_waiting_prompts", "Prompts at hand that wait for a slot.", "waiting"),
            ("gend_server_idle_ratio", "Share of slots empty in the last ten minutes.", "idle_share"),
            ("gend_server_gpu_memory_used_bytes", "GPU memory in use.", "memory_used_bytes"),
            ("gend_server_gpu_memory_total_bytes", "GPU memory that there is.", "memory_total_bytes"),
            ("gend_server_gpu_temperature_celsius", "Temperature of the hottest of its GPUs.", "celsius"),
        ):
            yield _gauge(name, text, {key: getattr(server, field) for key, server in servers.items()}, "server")
        for name, text, field in (
            ("gend_server_rows", "Rows made, since the worker began.", "rows"),
            ("gend_server_prompt_tokens", "Tokens of prompts, since the worker began.", "prompt_tokens"),
            ("gend_server_completion_tokens", "Tokens made, since the worker began.", "completion_tokens"),
            ("gend_server_restarts", "Starts of the server after the first, since the daemon began.", "restarts"),
        ):
            yield _counter(name, text, {key: getattr(server, field) for key, server in servers.items()}, "server")

    def runs(self, status: Status) -> Iterable[Metric]:
        runs = {(run.id,): run for run in status.runs}
        yield _gauge(
            "gend_run_state", "1 for the state that a run is in.",
            {(*key, state): run.state == state for key, run in runs.items() for state in RUN_STATES}, "run", "state",
        )  # fmt: skip
        yield _gauge("gend_run_prompts", "Prompts of the run.", {key: run.prompts for key, run in runs.items()}, "run")
        yield _gauge(
            "gend_run_done_rows", "Rows whose part is in the store.",
            {key: run.rows_done for key, run in runs.items()}, "run",
        )  # fmt: skip
        yield _gauge(
            "gend_run_leased_batches", "Batches that a worker holds.",
            {key: run.batches_leased for key, run in runs.items()}, "run",
        )  # fmt: skip
        yield _counter(
            "gend_run_rows", "Rows in parts, by verdict.",
            {(*key, word): count for key, run in runs.items() for word, count in run.verdicts.items()},
            "run", "verdict",
        )  # fmt: skip
        yield _counter(
            "gend_run_completion_tokens", "Tokens made, of the rows in parts.",
            {key: run.completion_tokens for key, run in runs.items()}, "run",
        )  # fmt: skip

    def time_and_money(self, status: Status) -> Iterable[Metric]:
        estimate, cost = status.estimate, status.cost
        yield _gauge(
            "gend_left_seconds", "Time until all active runs are finished, as the last ten minutes went.",
            {(): estimate.seconds} if estimate else {},
        )  # fmt: skip
        yield _counter(
            "gend_spent_dollars", "What the box cost while the daemon was up.", {(): cost.spent} if cost else {}
        )
        yield _gauge(
            "gend_to_go_dollars", "What the box will cost until all active runs are finished.",
            {(): cost.to_go} if cost else {},
        )  # fmt: skip


def _gauge(name: str, text: str, values: dict[tuple[str, ...], float | bool | None], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, values: dict[tuple[str, ...], float | None], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: dict[tuple[str, ...], float | bool | None]
) -> Metric:
    for key, value in values.items():
        if value is not None:  # not known: left out rather than told as 0
            family.add_metric(list(key), float(value))
    return family
