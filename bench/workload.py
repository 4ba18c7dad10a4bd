"""What the benchmarks ask for: prompts of one exact length, and the two ways of choosing tokens."""

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..server import octavo_pb2 as pb


class Mode(enum.Enum):
    """How output tokens are chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every request of a run looks like.

    Attributes:
      prompt_tokens: Tokens of each prompt, exactly.
      output_tokens: Tokens that each request brings, exactly: end-of-sequence ids do not stop.
      temperature: Of Mode.SAMPLED, above 0.
      top_p: Of Mode.SAMPLED, in (0, 1].
      seed: Where prompts and the requests' own seeds come from.
    """

    prompt_tokens: int = 32
    output_tokens: int = 64
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and the bound."""
        for name in ("prompt_tokens", "output_tokens"):
            # Two outputs are the least that have a time between tokens.
            low = {"prompt_tokens": 1, "output_tokens": 2}[name]
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")


def random_prompts(workload: Workload, vocab_size: int) -> Iterator[list[int]]:
    """Prompts without end, every id drawn uniformly from the vocabulary.

    No two share a beginning, so that a cache of prefixes would not help. What a model makes of them
    is no sensible text, and its distributions are flatter than on text.
    """
    draw = random.Random(workload.seed)
    while True:
        yield [draw.randrange(vocab_size) for _ in range(workload.prompt_tokens)]


def text_prompts(workload: Workload, text_ids: Sequence[int]) -> Iterator[list[int]]:
    """Prompts without end, each cut from a text at a random place.

    Raises:
      ValueError: The text is shorter than a prompt; names the field prompt_text.
    """
    num_places = len(text_ids) - workload.prompt_tokens + 1
    if num_places < 1:
        raise ValueError(
            f"prompt_text has {len(text_ids)} tokens; it must have at least prompt_tokens, "
            f"{workload.prompt_tokens}"
        )
    return _cuts(workload, text_ids, num_places)


def _cuts(workload: Workload, text_ids: Sequence[int], num_places: int) -> Iterator[list[int]]:
    draw = random.Random(workload.seed)
    while True:
        start = draw.randrange(num_places)
        yield list(text_ids[start : start + workload.prompt_tokens])


def sampling_seeds(workload: Workload) -> Iterator[int]:
    """The seeds of sampled requests, without end; apart from the stream that makes prompts."""
    draw = random.Random(f"sampling {workload.seed}")
    while True:
        yield draw.getrandbits(64)


def request(workload: Workload, mode: Mode, prompt: Sequence[int], seed: int) -> pb.GenerateRequest:
    """One request; `seed` decides what Mode.SAMPLED draws."""
    sampling = pb.Sampling(max_tokens=workload.output_tokens, ignore_eos=True, temperature=0)
    if mode is Mode.SAMPLED:
        sampling.temperature = workload.temperature
        sampling.top_p = workload.top_p
        sampling.seed = seed
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
