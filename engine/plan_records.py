"""What is planned, and what compiling it told. Plain records that travel between processes. No JAX.

All bytes are of one device.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from ..configs.chips import Devices
from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from .plan_hlo import Collective
from .plan_ptxas import Kernel

ANSWER_FILE = "answer.json"
"""What the process that compiles leaves in its scratch folder."""
REFUSAL_FILE = "refusal.txt"
"""What it leaves there instead, when the job asks for what cannot be."""


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """One model on some devices. What the compiler tells depends on nothing else here.

    Attributes:
      model: The model.
      config: The engine's sizes; tensor_parallel_size is the number of devices.
      devices: What it shall run on.
      host_bytes: Memory of the host, which is that of devices without any of their own.
      host_free_bytes: What of it is free before weights are loaded.
      compiles_all: Compile every step, not just the largest and the smallest.
      max_layers: Of a model with more layers, one and two are compiled and the rest extrapolated.
    """

    model: ModelConfig
    config: EngineConfig
    devices: Devices
    host_bytes: int
    host_free_bytes: int
    compiles_all: bool
    max_layers: int

    @property
    def is_extrapolated(self) -> bool:
        """Whether the model is too deep to be compiled whole."""
        return self.model.num_layers > self.max_layers

    @property
    def compiled_layers(self) -> int:
        """The most that are compiled at once."""
        return 2 if self.is_extrapolated else self.model.num_layers

    @property
    def limit_bytes(self) -> int:
        """Memory of one device."""
        return self._own_bytes or self.host_bytes // self.devices.count

    @property
    def is_on_host(self) -> bool:
        """Whether the devices have no memory of their own, nor a limit."""
        return not self._own_bytes

    @property
    def _own_bytes(self) -> int | None:
        """Memory of one device, or the limit that the config sets instead."""
        return self.config.device_memory_bytes or self.devices.chip.memory_bytes


@dataclass(frozen=True, kw_only=True)
class PlannedExecutable:
    """What compiling one executable told.

    Attributes:
      kind: A step, or what moves pages to host memory or back.
      rows: Decode rows; 0 where it is no step.
      chunk: Prompt tokens; 0: a decode step, or none.
      compile_s: Seconds it took, tracing included.
      temporary_bytes: The most that its own arrays take at once.
      program_bytes: Size of its code, where the compiler says.
      collectives: What devices exchange.
      cache_copies: Instructions that make an array as large as one layer's pages; there must be
        none.
    """

    kind: Literal["step", "export", "import"] = "step"
    rows: int = 0
    chunk: int = 0
    compile_s: float
    temporary_bytes: int
    program_bytes: int
    collectives: tuple[Collective, ...]
    cache_copies: tuple[str, ...]

    def __str__(self) -> str:
        """As a sentence calls it."""
        if self.kind == "step":
            return f"the step of {self.rows} rows and {self.chunk} prompt tokens"
        return f"the {self.kind} of pages"


@dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """What the compiler told about one job.

    Attributes:
      reason: Why the model cannot be served so; empty: it can.
      failed: The reason is that a compiler gave up. Asked again, it may not.
      missing_bytes: By how much it does not fit; 0 where that is not the reason.
      attention: The backend that attends.
      attention_reason: Why it is not the platform's kernels; empty where it is, or there are none.
      parameter_bytes: Weights.
      slot_bytes: Slots, and the tables of their rules.
      page_bytes: One KV page, over all layers.
      num_pages: Pages of the pool, page 0 included. None: it was not got that far.
      max_model_len: Most tokens of one request.
      num_executables: That the engine will have.
      executables: Those that were compiled here: steps, the largest first, then all transfers.
      kernels: Of GPUs: what each kernel takes.
    """

    reason: str = ""
    failed: bool = False
    missing_bytes: int = 0
    attention: str
    attention_reason: str = ""
    parameter_bytes: int
    slot_bytes: int
    page_bytes: int
    num_pages: int | None = None
    max_model_len: int
    num_executables: int
    executables: tuple[PlannedExecutable, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    @property
    def temporary_bytes(self) -> int:
        """The most that an executable's own arrays take at once; 0 where none was compiled."""
        return max((each.temporary_bytes for each in self.executables), default=0)

    @property
    def program_bytes(self) -> int:
        """Code of all executables, as if each step were the largest that was compiled."""
        sizes = [each.program_bytes for each in self.executables if each.kind == "step"]
        transfers = [each.program_bytes for each in self.executables if each.kind != "step"]
        num_steps = self.num_executables - len(transfers)
        return num_steps * max(sizes, default=0) + sum(transfers)


def plan_to_json(plan: CompiledPlan) -> str:
    """One line that plan_from_json reads."""
    return json.dumps(dataclasses.asdict(plan))


def plan_from_json(text: str) -> CompiledPlan:
    """The plan that was written.

    Raises:
      ValueError: It was written by another version, or is no plan.
    """
    try:
        values = json.loads(text)
        values["executables"] = tuple(map(_executable, values["executables"]))
        values["kernels"] = tuple(Kernel(**kernel) for kernel in values["kernels"])
        return CompiledPlan(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"no plan: {error!r}") from error


def _executable(values: dict[str, Any]) -> PlannedExecutable:
    found = tuple(Collective(**collective) for collective in values["collectives"])
    copies = tuple(values["cache_copies"])
    return PlannedExecutable(**values | {"collectives": found, "cache_copies": copies})
