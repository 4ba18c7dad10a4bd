"""What a request may ask of sampling: the bounds of every field of SamplingParams. No JAX."""

from .checks import check_token_ids, is_int, is_number, require
from .refusals import InvalidRequest
from .sampling_params import Guide, GuideKind, SamplingParams

MIN_TEMPERATURE = 1e-6  # below it, differences of logits overflow float32
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 300
"""Ids with a bias, per request: a slot on the device has room for so many."""
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_N = 128
MAX_GUIDE_CHARACTERS = 1 << 18
MAX_GUIDE_CHOICES = 1000
"""Texts of which an output is one."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Checks everything that depends on neither prompt nor engine but its vocabulary.

    Raises:
      InvalidRequest: Names the first field at fault.
    """
    _check_distribution(sampling)
    _check_logit_rules(sampling, vocab_size)
    _check_reports(sampling, vocab_size)
    if sampling.seed is not None:
        require("seed", sampling.seed, is_int(sampling.seed, 0, 2**64 - 1), "in [0, 2**64)")
    require("n", sampling.n, is_int(sampling.n, 1, MAX_N), f"in [1, {MAX_N}]")
    require("ignore_eos", sampling.ignore_eos, type(sampling.ignore_eos) is bool, "a bool")
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.guide is not None:
        _check_guide(sampling.guide, sampling)


def _check_distribution(sampling: SamplingParams) -> None:
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    require(
        "temperature",
        temperature,
        is_number(temperature, 0.0, 0.0)
        or is_number(temperature, MIN_TEMPERATURE, MAX_TEMPERATURE),
        f"0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]",
    )
    require("top_k", sampling.top_k, is_int(sampling.top_k, -1, 2**31 - 1), "in [-1, 2**31)")
    require("top_p", top_p, is_number(top_p, 0.0, 1.0) and top_p > 0, "in (0, 1]")
    require("min_p", min_p, is_number(min_p, 0.0, 1.0), "in [0, 1]")


def _check_logit_rules(sampling: SamplingParams, vocab_size: int) -> None:
    repetition = sampling.repetition_penalty
    require(
        "repetition_penalty",
        repetition,
        is_number(repetition, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        f"in [{MIN_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY}]",
    )
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        require(
            name,
            penalty,
            is_number(penalty, -MAX_PENALTY, MAX_PENALTY),
            f"in [{-MAX_PENALTY}, {MAX_PENALTY}]",
        )
    biased = [token_id for token_id, _ in sampling.logit_bias]
    require(
        "logit_bias", len(biased), len(biased) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} ids"
    )
    for token_id in biased:
        is_id = is_int(token_id, 0, vocab_size - 1)
        require("logit_bias", token_id, is_id, f"of token ids in [0, {vocab_size})")
    require("logit_bias", biased, len(set(biased)) == len(biased), "of different ids")
    for token_id, bias in sampling.logit_bias:
        require(
            f"logit_bias[{token_id}]",
            bias,
            is_number(bias, -MAX_BIAS, MAX_BIAS),
            f"in [{-MAX_BIAS}, {MAX_BIAS}]",
        )
    check_token_ids("banned_token_ids", sampling.banned_token_ids, vocab_size)
    if sampling.allowed_token_ids is not None:
        check_token_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
        left = set(sampling.allowed_token_ids) - set(sampling.banned_token_ids)
        require(
            "allowed_token_ids",
            sampling.allowed_token_ids,
            bool(left),
            "at least one id that is not in banned_token_ids",
        )
    elif len(sampling.banned_token_ids) >= vocab_size:
        require(
            "banned_token_ids",
            len(sampling.banned_token_ids),
            len(set(sampling.banned_token_ids)) < vocab_size,
            f"fewer ids than the vocabulary's {vocab_size}",
        )


def _check_reports(sampling: SamplingParams, vocab_size: int) -> None:
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    for name, top_name in (
        ("logprobs", "top_logprobs"),
        ("prompt_logprobs", "prompt_top_logprobs"),
    ):
        wanted, num_top = getattr(sampling, name), getattr(sampling, top_name)
        require(name, wanted, type(wanted) is bool, "a bool")
        require(top_name, num_top, is_int(num_top, 0, most), f"in [0, {most}]")
        require(top_name, num_top, wanted or not num_top, f"0 without {name}")


def _check_guide(guide: Guide, sampling: SamplingParams) -> None:
    require("guide", guide.kind, isinstance(guide.kind, GuideKind), "of a known kind")
    require(
        "guide",
        len(guide.text) if type(guide.text) is str else guide.text,
        type(guide.text) is str and len(guide.text) <= MAX_GUIDE_CHARACTERS,
        f"at most {MAX_GUIDE_CHARACTERS} characters long",
    )
    if sampling.ignore_eos:
        raise InvalidRequest("ignore_eos", True, "False with a guide, which ends where it must")
