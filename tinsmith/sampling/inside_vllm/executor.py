"""vLLM's executor for a model that is divided over several workers, with a repair. It runs in vLLM's engine process.

All workers answer a call, and vLLM reads the answers up to the first error. The others stay in their queues and are
taken for the answers to the next call: an error is told one call late, or an adapter taken for compared. Here all
answers are read before the error is raised.
"""

from collections.abc import Iterator
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc


class HearAllExecutor(MultiprocExecutor):
    """The `--distributed-executor-backend` of servers with several workers."""

    response_mqs: list[Any]

    def _init_executor(self) -> None:
        super()._init_executor()
        self.response_mqs = _AllQueues(self.response_mqs)


class _AllQueues(list[Any]):
    """The workers' queues of answers, the last of which tells of an error in any."""

    def __iter__(self) -> Iterator[Any]:
        errors: list[Any] = []
        for index, queue in enumerate(super().__iter__()):
            yield _Queue(queue, errors, is_last=index == len(self) - 1)


class _Queue:
    def __init__(self, queue: Any, errors: list[Any], is_last: bool) -> None:
        self.queue = queue
        self.errors = errors
        """Errors of the queues so far."""
        self.is_last = is_last

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> tuple[Any, Any]:
        """Return the next answer: status and result.

        An error is kept for the last queue, which answers with the first of all.
        """
        status, result = self.queue.dequeue(timeout=timeout, indefinite=indefinite)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            self.errors.append((status, result))
        if self.is_last and self.errors:
            first: tuple[Any, Any] = self.errors[0]
            return first
        return WorkerProc.ResponseStatus.SUCCESS, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)
