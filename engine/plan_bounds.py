"""Lower bounds for the time of steps, from bytes and flops. Arithmetic only; no JAX.

A roofline: a step takes at least as long as its bytes take through the memory, as its flops take at
the chip's peak, and as what devices exchange takes over their links, whichever is longest. Bytes
are those that no implementation can save: each weight once a step, each page of each row once.
Nothing here was measured, and no step runs as fast. Source: https://doi.org/10.1145/1498765.1498785.
"""

from dataclasses import dataclass

from ..configs.chips import Chip
from ..configs.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What steps of one model cost on one of the devices that share it.

    Attributes:
      model: The model.
      chip: The kind of device.
      num_devices: How many share it.
      page_size: Tokens per page.
      page_bytes: One page over all layers, on one device.
      parameter_bytes: Weights on one device.
      weight_size: Bytes of one weight.
    """

    model: ModelConfig
    chip: Chip
    num_devices: int
    page_size: int
    page_bytes: int
    parameter_bytes: int
    weight_size: int


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A time that cannot be gone below.

    Attributes:
      seconds: The bound.
      limited_by: "memory", "flops" or "links": what most of it comes from.
    """

    seconds: float
    limited_by: str


def decode_bound(costs: Costs, *, rows: int, context_tokens: int) -> Bound | None:
    """One decode step of rows that each see so many tokens; None: the chip is not known.

    This is the least time between two tokens of a stream, while so many run.
    """
    return _longest([_step_times(costs, [context_tokens] * rows, [1] * rows, sampled=rows)])


def prefill_bound(costs: Costs, *, prompt_tokens: int, chunk: int) -> Bound | None:
    """All steps of a prompt that is computed alone, in chunks; None: the chip is not known.

    This is the least time to a first token.
    """
    ends = [*range(chunk, prompt_tokens, chunk), prompt_tokens]
    steps = []
    for begin, end in zip([0, *ends], ends, strict=False):
        steps.append(_step_times(costs, [end], [end - begin], sampled=int(end == prompt_tokens)))
    return _longest(steps)


def _longest(steps: list[dict[str, float] | None]) -> Bound | None:
    """Steps run one after the other; in each one, memory, flops and links may overlap in full."""
    seconds: dict[str, float] = {}
    for times in steps:
        if times is None:
            return None
        slowest = max(times, key=lambda name: times[name])
        seconds[slowest] = seconds.get(slowest, 0.0) + times[slowest]
    return Bound(
        seconds=sum(seconds.values()), limited_by=max(seconds, key=lambda name: seconds[name])
    )


def _step_times(
    costs: Costs, contexts: list[int], tokens: list[int], *, sampled: int
) -> dict[str, float] | None:
    """Seconds of one step by what they are spent on.

    Args:
      costs: Of the model.
      contexts: Tokens that each row or prompt sees, its own of this step included.
      tokens: Of these, how many are computed.
      sampled: Tokens that need logits.
    """
    chip, model = costs.chip, costs.model
    if chip.bytes_per_s is None or chip.bf16_flops is None:
        return None
    pages = sum(-(-context // costs.page_size) for context in contexts)
    memory_bytes = _weight_bytes_read(costs, sampled) + pages * costs.page_bytes
    # Query i of n sees context - n + 1 + i tokens; each costs a product with its key and value.
    seen = sum(n * context - n * (n - 1) // 2 for context, n in zip(contexts, tokens, strict=True))
    attention = 4 * model.num_layers * model.num_q_heads * model.head_dim * seen
    products = 2 * (_layer_weights(model) * sum(tokens) + _head_weights(model) * sampled)
    times = {
        "memory": memory_bytes / chip.bytes_per_s,
        "flops": (attention + products) / costs.num_devices / chip.bf16_flops,
    }
    if costs.num_devices > 1:
        if chip.link_bytes_per_s is None:
            return None
        share = _all_reduce_share(costs)
        summed = 2 * model.num_layers * sum(tokens) * model.hidden_size * costs.weight_size
        times["links"] = share * summed / chip.link_bytes_per_s
    return times


def _all_reduce_share(costs: Costs) -> float:
    """How often a device sends each number of an all-reduce, at least."""
    # The others' sums depend on all of a device's numbers, so it sends each of them once whatever
    # lies in between; a switch that sums and sends to all takes no more than that.
    if costs.chip.switch_sums:
        return 1.0
    # Else sums are made on a device and sent on, which is twice, but for each device's own part.
    # Source: https://doi.org/10.1016/j.jpdc.2008.09.002.
    return 2 * (costs.num_devices - 1) / costs.num_devices


def _weight_bytes_read(costs: Costs, sampled: int) -> int:
    """All weights but those of the embedding, of which a step takes a few rows, and the head."""
    model = costs.model
    table = model.vocab_size * model.hidden_size * costs.weight_size // costs.num_devices
    unread = 0 if model.tie_word_embeddings else table
    return costs.parameter_bytes - unread - (0 if sampled else table)


def _layer_weights(model: ModelConfig) -> int:
    """Weights that every token is multiplied with."""
    heads = 2 * model.num_q_heads + 2 * model.num_kv_heads
    each = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    return model.num_layers * each


def _head_weights(model: ModelConfig) -> int:
    return model.vocab_size * model.hidden_size
