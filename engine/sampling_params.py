"""SamplingParams: how a request wants its tokens chosen. A plain picklable record. No JAX."""

import enum
from dataclasses import dataclass

LEAST_LOGPROB = -9999.0
"""A log-probability that stands for all that is less: JSON knows no infinity."""


class GuideKind(enum.Enum):
    """What `Guide.text` is."""

    JSON_SCHEMA = "json_schema"  # a JSON schema
    JSON_OBJECT = "json_object"  # empty: any JSON object
    REGEX = "regex"  # a regular expression, which the whole output matches
    CHOICE = "choice"  # a JSON array of strings, one of which the output is
    GRAMMAR = "grammar"  # a context-free grammar in llguidance's dialect of Lark


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What the output must be: structured output. The engine holds it to that token by token.

    Attributes:
      kind: Which language it is written in.
      text: The schema, expression or grammar.
    """

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; validated by engine.sampling_checks, not here.

    What happens to the model's logits, in this order:
      1. repetition_penalty, on every id that is in the prompt or the output so far,
      2. frequency_penalty and presence_penalty, on every id that is in the output so far,
      3. logit_bias,
      4. ids that must not come are ruled out: allowed_token_ids, banned_token_ids, the guide, and
         stop ids until there are min_tokens,
      5. temperature,
      6. top_k, then top_p on what top_k left, renormalised, then min_p. Ties at a border keep the
         lowest ids: of equal logits (after step 4) for top_k, so a top_k of 1 is greedy; of equal
         likelihoods for the others. The most likely token always stays.
    With temperature 0 the highest logit after step 4 is taken, the lowest id on ties.

    Log-probabilities, of outputs and prompts alike, are those of the model: before step 1, and at
    least LEAST_LOGPROB.

    Attributes:
      max_tokens: Output tokens at most. None: up to the context limit.
      min_tokens: Output tokens before a stop id may come: until then they are ruled out. Under a
        guide an end that is the only way on comes all the same.
      temperature: 0 is greedy.
      top_k: Keep the k most likely tokens. 0 (or -1, or the vocabulary size and more): all.
      top_p: Keep the smallest set of most likely tokens whose mass reaches top_p. 1: all.
      min_p: Keep tokens at least min_p times as likely as the most likely one. 0: all.
      repetition_penalty: A positive logit is divided by it, a negative one multiplied. 1: none.
      frequency_penalty: Taken off a logit for each time that its id is in the output. 0: none.
      presence_penalty: Taken off a logit whose id is in the output. 0: none.
      logit_bias: (id, what is added to its logit).
      allowed_token_ids: The only ids that may come, the stop ids included. None: all.
      banned_token_ids: Ids that must not come.
      seed: 64 unsigned bits. None: the engine picks one.
      n: Choices: independent outputs for the one prompt, whose pages they share.
      stop_token_ids: Ids that end the output. The id itself is the output's last token.
      ignore_eos: The model's own end-of-sequence ids do not stop; stop_token_ids still do.
      guide: What the output must be. It ends where it must, so it can't go with ignore_eos.
      logprobs: Report each output token's log-probability.
      top_logprobs: Report so many of the most likely ids with theirs too, the most likely first,
        the lowest id on ties. Needs logprobs.
      prompt_logprobs: Report the log-probability of every prompt token but the first.
      prompt_top_logprobs: As top_logprobs, for the prompt. Needs prompt_logprobs.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    guide: Guide | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes the logits."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )
