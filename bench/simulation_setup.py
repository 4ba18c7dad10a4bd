"""What is simulated: planned costs of steps, sizes of an engine, and how long it can keep up."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..configs.engine_config import EngineConfig
from ..configs.scheduling_config import SchedulingConfig
from ..engine.simulated_replica import Deployment
from ..engine.simulated_traffic import Arrival, Stream, arrivals
from ..engine.simulator import Fleet, Simulator
from ..engine.step_costs import StepCosts
from ..engine.step_shapes import StepShapes

MAX_MODEL_LEN = 8192
WARM_UP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PlannedCosts:
    """How long a step takes: a base, and what each row, prompt token and token of KV adds.

    Attributes:
      name: For flags and tables.
      most_rows: Slots that such an engine is given at most.
      base_ms: Of any step.
      row_us: Of a decode row.
      chunk_token_us: Of a prompt token.
      decode_kv_token_ns: Of a token of KV that a decode row reads.
      chunk_kv_token_ns: Of a token of KV that a prompt token reads.
      import_page_us: Of a page that comes back from host memory.
    """

    name: str
    most_rows: int
    base_ms: float
    row_us: float
    chunk_token_us: float
    decode_kv_token_ns: float
    chunk_kv_token_ns: float
    import_page_us: float

    def for_engine(self, config: EngineConfig) -> StepCosts:
        """The costs of an engine's executables; rows and tokens of padding cost as others do."""
        keys = StepShapes.from_config(config).all_keys()
        return StepCosts(
            base_s={
                key: (
                    self.base_ms * 1e-3
                    + key.rows * self.row_us * 1e-6
                    + key.chunk * self.chunk_token_us * 1e-6
                )
                for key in keys
            },
            decode_kv_token_s=self.decode_kv_token_ns * 1e-9,
            chunk_kv_token_s=self.chunk_kv_token_ns * 1e-9,
            import_page_s=self.import_page_us * 1e-6,
        )

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.name}: a step takes {self.base_ms:g} ms, {self.row_us:g} us a row, "
            f"{self.chunk_token_us:g} us a prompt token, {self.decode_kv_token_ns:g} ns a token "
            f"of KV that a row reads, {self.chunk_kv_token_ns:g} ns one that a prompt token reads"
        )


COSTS = {
    # 16 GB of weights at some 2.5 TB/s and overheads; 33 thousand prompt tokens a second; 131 kB
    # of KV a token at 3 TB/s: about what an 8B model in bfloat16 takes on one large accelerator.
    "accelerator": PlannedCosts(
        name="accelerator",
        most_rows=256,
        base_ms=8.0,
        row_us=4.0,
        chunk_token_us=30.0,
        decode_kv_token_ns=44.0,
        chunk_kv_token_ns=1.0,
        import_page_us=100.0,
    ),
    # SmolLM2-135M on two CPU cores, from BUILD_NOTES.md section 6: 21.5 ms at 2 rows, 66.7 at 32,
    # 930 prompt tokens a second.
    "cpu": PlannedCosts(
        name="cpu",
        most_rows=32,
        base_ms=18.5,
        row_us=1500.0,
        chunk_token_us=1075.0,
        decode_kv_token_ns=1000.0,
        chunk_kv_token_ns=200.0,
        import_page_us=500.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Sizes of one engine.

    Attributes:
      costs: Of its steps.
      max_num_seqs: Slots.
      prefill_chunk_tokens: Most prompt tokens of a step.
      page_size: Tokens per page.
      tokens_per_slot: Size of the KV pool over the slots.
    """

    costs: PlannedCosts
    max_num_seqs: int
    prefill_chunk_tokens: int
    page_size: int = 64
    tokens_per_slot: int = 2048

    def deployment(self, scheduling: SchedulingConfig, *, has_ledger: bool = False) -> Deployment:
        """The engine under these rules."""
        config = EngineConfig(
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            page_size=self.page_size,
            max_model_len=MAX_MODEL_LEN,
            scheduling=scheduling,
        )
        return Deployment(
            config=config,
            num_pages=1 + self.max_num_seqs * self.tokens_per_slot // self.page_size,
            costs=self.costs.for_engine(config),
            has_ledger=has_ledger,
        )

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.max_num_seqs} slots, {self.prefill_chunk_tokens} prompt tokens a step, "
            f"{self.max_num_seqs * self.tokens_per_slot} tokens of KV in pages of {self.page_size}"
        )


def requests(streams: Sequence[Stream], seed: int) -> Iterator[Arrival]:
    """What the streams send."""
    return arrivals(streams, seed, MAX_MODEL_LEN)


def capacity_per_s(engine: Engine, streams: Sequence[Stream], seed: int, seconds: float) -> float:
    """Requests of this mixture that one engine serves in a second when it is never idle.

    Measured first come, first served, with more coming than could be served if steps cost nothing
    but their base.
    """
    deployment = engine.deployment(SchedulingConfig())
    total = sum(stream.rate_per_s for stream in streams)
    mean = sum(stream.rate_per_s * stream.output_tokens for stream in streams) / total
    flood_per_s = engine.max_num_seqs / (engine.costs.base_ms * 1e-3 * mean)
    flood = [
        dataclasses.replace(stream, rate_per_s=stream.rate_per_s * flood_per_s / total)
        for stream in streams
    ]
    simulator = Simulator(Fleet(deployment=deployment), requests(flood, seed))
    simulator.run(WARM_UP_S)
    before = simulator.replicas[0].output_tokens_total
    simulator.run(WARM_UP_S + seconds)
    tokens = simulator.replicas[0].output_tokens_total - before
    return tokens / seconds / mean
