"""The RQ side of a worker: one registered RQ worker that holds many jobs at once.

Built on rq 3's BaseWorker and its own methods, so that `rq info` and RQ's registries stay true. It blocks and knows
nothing of prompts: worker.py calls it through a thread, one call at a time.
"""

import logging
from collections.abc import Sequence
from typing import Any

import redis
from rq import Queue
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus

from gend.errors import LedgerUnavailable

log = logging.getLogger("gend.rq_worker")
for _name in ("rq.worker", "rq.job", "rq.queue"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # a line for each job would say what our own log says better


class Hint(Job):
    """A job as gend takes it: two arguments. What else a job in Redis may name is neither imported nor called."""

    success_callback = failure_callback = stopped_callback = None

    def send_webhooks(self, *args: Any, **kwargs: Any) -> None:
        """None are sent."""


class Delivery:
    """One job in hand: the run and the batch number that it hints at, and what RQ needs to be told when it ends."""

    def __init__(self, job: Job, queue: Queue, execution: Execution, args: tuple[str, int]):
        self.job, self.queue, self.execution, self.args = job, queue, execution, args


class RQWorker(BaseWorker):
    """Takes jobs without waiting, keeps them alive, says how they ended. Methods raise LedgerUnavailable."""

    log_result_lifespan = False

    def __init__(self, connection: redis.Redis, name: str):
        """`name` must be new at each start: RQ refuses a name for minutes after a crash."""
        super().__init__(
            [_queue("gend", connection)],
            name=name,
            connection=connection,
            job_class=Hint,
            serializer=JSONSerializer,
            log_job_description=False,
        )

    def open(self) -> None:
        """Register with RQ; as often as it takes, since an answer may be lost."""
        self._call(super()._set_ip_address, self.connection)
        self._call(self._register)
        self._call(self.set_state, WorkerStatus.IDLE)

    def take(self, queues: Sequence[str]) -> Delivery | None:
        """The next job of the first of `queues` that has one, or None."""
        self.queues = [_queue(name, self.connection) for name in queues]
        return self._call(self._take) if queues else None

    def finished(self, delivery: Delivery) -> None:
        """The job is over. How its batch ended stands in the ledger; to RQ every delivery ended well."""
        try:
            self._call(self._finalize_success, delivery.job, delivery.queue, delivery.execution, None)
        except LedgerUnavailable:
            raise
        except Exception as error:  # Redis was emptied, or somebody removed the job: nothing is left to tidy up
            log.info("RQ job %s: %s", delivery.job.id, error)
        finally:  # it is over, whether RQ could be told or not: no more heartbeats for it
            self.executions.pop(delivery.execution.id, None)
        if not self.executions:
            self._call(self.set_state, WorkerStatus.IDLE)

    def beat(self) -> None:
        """Tell RQ that this worker and its jobs live; now and then clear what dead workers left in RQ's registries."""
        self._call(self._beat)

    def close(self) -> None:
        """Leave RQ's list of workers."""
        self._call(self.register_death)

    def _take(self) -> Delivery | None:
        while True:
            try:
                got = self.queue_class.dequeue_any(
                    self.queues, None, connection=self.connection, job_class=self.job_class, serializer=self.serializer
                )
            except redis.RedisError:
                raise
            except Exception as error:  # a stranger's job can be wrong in any way; RQ has taken it off the queue
                log.warning(
                    "RQ job %s cannot be read (%s): dropped", getattr(error, "job_id", ""), type(error).__name__
                )
                continue
            if got is None:
                return None
            job, queue = got
            if (hint := _hint(job)) is None:
                log.warning("RQ job %s does not carry a run and a batch number: dropped", job.id)
                self.connection.lrem(queue.intermediate_queue_key, 1, job.id)
                continue
            execution = self.prepare_execution(job)
            self.prepare_job_execution(job, remove_from_intermediate_queue=len(self.queues) == 1)
            job.started_at = now()
            return Delivery(job, queue, execution, hint)

    def _register(self) -> None:
        if not self.connection.exists(self.key):
            self.register_birth()  # type: ignore[no-untyped-call]

    def _beat(self) -> None:
        self._register()  # anew, where Redis was emptied or restarted with old data
        for execution in list(self.executions.values()):
            self.maintain_heartbeats(execution.job, execution)
        self.heartbeat()
        if self.should_run_maintenance_tasks:
            try:
                self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
            except redis.RedisError:
                raise
            except Exception as error:  # a stranger's job in RQ's registries; nothing of ours depends on them
                self.last_cleaned_at = now()  # type: ignore[assignment]
                log.warning("RQ's own clean-up failed (%s: %s): left for the next time", type(error).__name__, error)

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """RQ would raise the socket's timeout to 415 s, for a blocking pop that we never make: a Redis that has gone
        silent would then hold up leases and marks for as long."""
        return connection

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """RQ's constructor asks Redis here, so that a worker could not start while Redis is away: `open` asks."""
        self.ip_address = "unknown"

    def procline(self, message: str) -> None:
        """RQ would rename the process at each job; the name set at the start is what `ps` should show."""

    @staticmethod
    def _call(method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except redis.RedisError as error:
            raise LedgerUnavailable(f"Redis, through RQ: {error}") from error


def _queue(name: str, connection: redis.Redis) -> Queue:
    return Queue(name, connection=connection, serializer=JSONSerializer, job_class=Hint)


def _hint(job: Job) -> tuple[str, int] | None:
    """The run and batch number that a job of ours carries, else None."""
    try:
        function, args = job.func_name, list(job.args)
    except (DeserializationError, TypeError, ValueError):  # not JSON (a pickle, say), or not the four values of RQ
        return None
    match [function, *args]:
        case [str(), str(run), int(number)] if number >= 0 and not isinstance(number, bool):
            return run, number
    return None
