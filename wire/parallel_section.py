"""`[parallel]`: how one site spreads its training over processes. A site may set another table in its settings.

The layout is the site's own matter: what it sends has the same names and shapes under every one. A combination that no
test compares with one process is refused here, so before a process is started. Loads no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from atoll.wire.errors import ConfigError
from atoll.wire.strict import Strict

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Names of the mesh's axes, outermost first: neighbouring ranks, which share a node, talk most along the last."""

_LAYOUTS: dict[frozenset[str], str] = {
    frozenset(): "one process",
    frozenset({"dp_replicate"}): "data parallel (zero = 0 or 1)",
    frozenset({"dp_shard"}): "sharded data parallel (zero = 2 or 3)",
    frozenset({"dp_replicate", "dp_shard"}): "sharded in groups that replicate (zero = 2 or 3)",
    frozenset({"tp"}): "tensor parallel",
    frozenset({"pp"}): "pipeline",
    frozenset({"dp_shard", "tp"}): "sharded data parallel with tensor parallel",
    frozenset({"dp_shard", "pp"}): "sharded data parallel with pipeline",
}

Degree = Annotated[int, Field(ge=-1, le=65536)]
Style = Literal["colwise", "rowwise", "replicate"]


class PipelineSection(Strict):
    """`parallel.pipeline`: how a batch passes through the stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    microbatches: int | None = Field(default=None, ge=1, le=4096)  # a batch's; absent: two for each stage
    split_points: Literal["auto"] | tuple[str, ...] = "auto"  # modules that a stage begins with, such as "layers.4"
    stages_per_rank: int | None = Field(default=None, ge=1, le=64)  # interleaved: 2 where absent; else 1


class PrecisionSection(Strict):
    """`parallel.precision`: dtypes of the computation. Parameters and optimizer state keep the model's own."""

    param: Literal["model", "bf16"] = "model"  # of matrix products and activations; fp16 would need loss scaling
    reduce: Literal["model", "bf16"] = "model"  # of gradients while they are averaged


class TimeoutsSection(Strict):
    """`parallel.timeouts`: how long the processes of a site wait for each other, in seconds."""

    start: float = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)  # until all are there
    collective: float = Field(default=120.0, gt=0, le=86400, allow_inf_nan=False)  # for the slowest, in one exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many processes there are along each axis of the mesh, all of them known."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def used(self) -> frozenset[str]:
        """Axes along which there is more than one process."""
        return frozenset(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def layout(self) -> str:
        """In words."""
        return _LAYOUTS.get(self.used, " x ".join(sorted(self.used)))


class ParallelSection(Strict):
    """`[parallel]` of a job, or of a site's settings, which stands before the job's."""

    processes: int | None = Field(default=None, ge=1, le=65536)  # absent: the product of the axes; with one at -1, GPUs
    dp_replicate: Degree = 1  # the same model on each; a batch is divided among them
    dp_shard: Degree = 1  # each holds a part of every tensor; a batch is divided among them
    tp: Degree = 1  # each computes a part of every product
    pp: Degree = 1  # each holds some of the layers
    cp: Degree = 1  # each computes a part of every sequence
    zero: Literal[0, 1, 2, 3] | None = None  # what is in parts: nothing, optimizer, + gradients, + parameters
    tp_plan: Literal["auto", "app"] | dict[str, Style] = (
        "auto"  # patterns of names of linear modules, each with a style
    )
    pipeline: PipelineSection = PipelineSection()
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    precision: PrecisionSection = PrecisionSection()
    accumulate: int = Field(default=1, ge=1, le=65536)  # parts in which a process computes its share of a batch
    clip_norm: float | None = Field(default=None, gt=0, le=1e30, allow_inf_nan=False)  # of the whole gradient
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    timeouts: TimeoutsSection = TimeoutsSection()

    @field_validator(*AXES)
    @classmethod
    def _not_zero(cls, degree: int) -> int:
        if degree == 0:
            raise ValueError("an axis has 1 or more processes, or -1 for all that are left; 1 leaves it out")
        return degree

    @model_validator(mode="after")
    def _tested(self) -> ParallelSection:
        open_axes = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(open_axes) > 1:
            raise ValueError(f"{' and '.join(open_axes)} are -1; one axis at most takes the processes that are left")
        used = frozenset(axis for axis in AXES if getattr(self, axis) != 1)
        if used not in _LAYOUTS and "cp" not in used:
            known = "; ".join(" + ".join(sorted(axes)) for axes in _LAYOUTS if axes)
            raise ValueError(
                f"{' + '.join(sorted(used))} is no layout that this version compares with one process; wanted one of: {known}"
            )
        self._check_zero(used)
        self._check_pipeline()
        if self.precision.reduce != "model" and not used & {"dp_replicate", "dp_shard"}:
            raise ValueError("precision.reduce has no effect where no gradients are averaged: remove it")
        if self.tp == 1 and self.tp_plan != "auto":
            raise ValueError("tp_plan has no effect without tp: set tp, or remove it")
        if "cp" in used:
            raise ValueError(
                f"cp = {self.cp}: context parallel is not in this version: torch has no sharding rule for the attention "
                "of a CPU (_scaled_dot_product_flash_attention_for_cpu), and without CUDA nothing was compared with "
                "one process; set cp = 1"
            )
        return self

    def _check_zero(self, used: frozenset[str]) -> None:
        if self.zero in (0, 1) and "dp_shard" in used:
            raise ValueError(f"zero = {self.zero} divides no parameters, so dp_shard must be 1: use dp_replicate")
        if self.zero == 1 and "dp_replicate" not in used:
            raise ValueError("zero = 1 divides the optimizer among dp_replicate processes: set dp_replicate")
        if self.zero in (2, 3) and "dp_shard" not in used:
            raise ValueError(f"zero = {self.zero} divides parameters among dp_shard processes: set dp_shard")

    def _check_pipeline(self) -> None:
        pipeline, num_stages = self.pipeline, self.stages_per_rank
        if self.pp == 1:
            if pipeline != PipelineSection():
                raise ValueError("pipeline has no effect without pp: set pp, or remove it")
            return
        if pipeline.schedule == "interleaved" and num_stages < 2:
            raise ValueError("pipeline.schedule = interleaved needs stages_per_rank of 2 or more")
        if pipeline.schedule != "interleaved" and num_stages != 1:
            raise ValueError(
                f"pipeline.stages_per_rank = {num_stages} is for interleaved; {pipeline.schedule} has one stage a rank"
            )

    @property
    def named_degrees(self) -> dict[str, int]:
        """By axis, as written."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stages_per_rank(self) -> int:
        return self.pipeline.stages_per_rank or (2 if self.pipeline.schedule == "interleaved" else 1)

    def degrees(self, num_processes: int | None = None) -> Degrees:
        """The degrees with `num_processes` at hand, which `processes` overrides; None: as many as the axes say.

        Raises:
            ConfigError: the axes do not multiply to that number, or what follows from them does not fit.
        """
        named = self.named_degrees
        product = math.prod(degree for degree in named.values() if degree != -1)
        world = self.processes or num_processes or product
        if -1 in named.values() and world % product == 0:
            named = {axis: world // product if degree == -1 else degree for axis, degree in named.items()}
        degrees = Degrees(**named)
        if degrees.world_size != world or min(degrees.shape) < 1:
            wanted = " x ".join(f"{axis} {degree}" for axis, degree in named.items() if degree != 1) or "1"
            raise ConfigError(
                f"parallel: {wanted} does not make {world} processes; change parallel.processes or an axis",
                key="parallel.processes",
                value=str(world),
                bound=wanted,
            )
        if degrees.pp > 1:
            self._check_microbatches(degrees.pp)
        return degrees

    def zero_of(self, degrees: Degrees) -> int:
        """The level that counts: 3 where parameters are divided and nothing else is said."""
        if degrees.dp_shard > 1:
            return 3 if self.zero is None else self.zero
        return 1 if self.zero == 1 and degrees.dp_replicate > 1 else 0

    def microbatches(self, pp: int) -> int:
        """In how many parts a share of a batch passes through the stages."""
        return self.pipeline.microbatches or 2 * pp * self.stages_per_rank

    def for_forward_passes(self, pp: int) -> ParallelSection:
        """The same section with one stage for each of `pp` ranks, since interleaving saves nothing without a backward pass."""
        pipeline, count = self.pipeline, self.stages_per_rank
        points = pipeline.split_points if pipeline.split_points == "auto" else pipeline.split_points[count - 1 :: count]
        plain = {
            "schedule": "gpipe",
            "stages_per_rank": 1,
            "split_points": points,
            "microbatches": self.microbatches(pp),
        }
        return self.model_copy(update={"pipeline": pipeline.model_copy(update=plain)})

    def _check_microbatches(self, pp: int) -> None:
        count, least = self.microbatches(pp), pp * self.stages_per_rank
        multiple = pp if self.pipeline.schedule == "interleaved" else 1
        if count < least or count % multiple:
            wanted = f"at least {least}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
            raise ConfigError(
                f"parallel.pipeline.microbatches = {count}: {self.pipeline.schedule} over {pp} ranks wants {wanted}",
                key="parallel.pipeline.microbatches",
                value=str(count),
                bound=wanted,
            )
