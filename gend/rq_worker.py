"""The RQ side of a worker: one registered RQ worker that holds many jobs at once.

Built on rq 3's BaseWorker and its own methods, so that `rq info` and RQ's registries stay true. It blocks and knows
nothing of prompts: worker.py calls it through a thread, one call at a time.
"""

import logging
from collections.abc import Sequence
from typing import Any

import redis
from rq import Queue
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus

from gend.errors import LedgerUnavailable

for _name in ("rq.worker", "rq.job", "rq.queue"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # a line for each job would say what our own log says better


class Delivery:
    """One job in hand: the arguments it carries, and what RQ needs to be told when it ends."""

    def __init__(self, job: Job, queue: Queue, execution: Execution):
        self.job, self.queue, self.execution = job, queue, execution

    @property
    def args(self) -> list[Any]:
        """The job's arguments. Raises ValueError for a job that is not one of ours."""
        args = list(self.job.args)
        if len(args) != 2 or not isinstance(args[0], str) or not isinstance(args[1], int):
            raise ValueError(f"RQ job {self.job.id} does not carry a run and a batch number")
        return args


class RQWorker(BaseWorker):
    """Takes jobs without waiting, keeps them alive, says how they ended. Methods raise LedgerUnavailable."""

    log_result_lifespan = False

    def __init__(self, connection: redis.Redis, name: str):
        """`name` must be new at each start: RQ refuses a name for minutes after a crash."""
        super().__init__(
            [Queue("gend", connection=connection, serializer=JSONSerializer)],
            name=name,
            connection=connection,
            serializer=JSONSerializer,
            log_job_description=False,
        )

    def open(self) -> None:
        """Register with RQ."""
        self._call(self.register_birth)
        self._call(self.set_state, WorkerStatus.IDLE)

    def take(self, queues: Sequence[str]) -> Delivery | None:
        """The next job of the first of `queues` that has one, or None."""
        self.queues = [Queue(name, connection=self.connection, serializer=JSONSerializer) for name in queues]
        return self._call(self._take) if queues else None

    def finished(self, delivery: Delivery) -> None:
        """The job is over. How its batch ended stands in the ledger; to RQ every delivery ended well."""
        self._call(self._finalize_success, delivery.job, delivery.queue, delivery.execution, None)
        if not self.executions:
            self._call(self.set_state, WorkerStatus.IDLE)

    def beat(self) -> None:
        """Tell RQ that this worker and its jobs live; now and then clear what dead workers left in RQ's registries."""
        self._call(self._beat)

    def close(self) -> None:
        """Leave RQ's list of workers."""
        self._call(self.register_death)

    def _take(self) -> Delivery | None:
        got = self.queue_class.dequeue_any(
            self.queues, None, connection=self.connection, job_class=self.job_class, serializer=self.serializer
        )
        if got is None:
            return None
        job, queue = got
        execution = self.prepare_execution(job)
        self.prepare_job_execution(job, remove_from_intermediate_queue=len(self.queues) == 1)
        job.started_at = now()
        return Delivery(job, queue, execution)

    def _beat(self) -> None:
        if not self.connection.exists(self.key):  # Redis was emptied or restarted with old data
            self.register_birth()  # type: ignore[no-untyped-call]
        for execution in list(self.executions.values()):
            self.maintain_heartbeats(execution.job, execution)
        self.heartbeat()
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]

    def procline(self, message: str) -> None:
        """RQ would rename the process at each job; the name set at the start is what `ps` should show."""

    @staticmethod
    def _call(method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except redis.RedisError as error:
            raise LedgerUnavailable(f"Redis, through RQ: {error}") from error
