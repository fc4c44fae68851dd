"""Steps as the engine sees them: submitted, later collected as tokens.

An executor that samples on its device gives steps itself; one that gives logits is wrapped here,
and sampled on the CPU. In: a `StepBatch` and the sampler's rows. Out: a token or an error a row.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from sitsc.core.errors import SamplingError
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.sampler import Sampler, SamplerRow

Sampled = list[int | SamplingError]


class LogitsExecutor(Protocol):
    """Computes one step of the model."""

    def execute(self, batch: StepBatch) -> torch.Tensor:
        """Logits [sampled rows, width] on the CPU, in the order of the True of `batch.sample`."""
        ...


@runtime_checkable
class StepExecutor(Protocol):
    """Computes steps and samples; `num_ahead` steps may be submitted before the first is read."""

    num_ahead: int

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> Any:
        """Start a step, `rows` as in `batch.sampled_ids`; what `collect` wants to finish it."""
        ...

    def collect(self, step: Any) -> Sampled:
        """A token or an error for each sampled row; waits for the step."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        ...


class HostSteps:
    """Steps of an executor that gives logits: computed at once, sampled on the CPU."""

    num_ahead = 0

    def __init__(self, executor: LogitsExecutor, sampler: Sampler) -> None:
        self.executor, self.sampler = executor, sampler

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> Sampled:
        """Compute and sample."""
        return self.sampler.sample(self.executor.execute(batch), rows)

    def collect(self, step: Sampled) -> Sampled:
        """The tokens that were sampled."""
        return step

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""
