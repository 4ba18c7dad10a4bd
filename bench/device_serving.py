"""Whole requests through the engine: the platform's kernels beside the reference. Part "serving".

A tiny random model in bfloat16, prompts of many lengths in chunks, prefixes that are shared, and a
pool so small that requests are preempted. Two right backends round differently, so an id may differ
where the two best were close; what comes after it is of another text, and is not compared.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..engine.admission import admit
from ..engine.build import BuiltEngine, build_engine
from ..engine.compilation import compile_events
from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.sampling_params import SamplingParams
from ..pallas_kernels.backend import AttentionBackend
from ..pallas_kernels.reference_backend import ReferenceBackend
from .device_parts import Findings, Tasks
from .random_checkpoint import random_checkpoint

CLEAR_GAP = 0.05  # log-probability between the two best, beyond what bfloat16 rounds away
LEAST_COMPARED = 0.5  # of all ids; close calls must not end most comparisons


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is served.

    Attributes:
      model: The architecture.
      config: The engine.
      prompts: How many.
      longest_prompt: Tokens.
      max_tokens: Of each output.
    """

    model: ModelConfig
    config: EngineConfig
    prompts: int
    longest_prompt: int
    max_tokens: int


def _sizes(is_dry_run: bool) -> Sizes:
    model = ModelConfig(
        vocab_size=320,
        hidden_size=64 if is_dry_run else 512,
        intermediate_size=96 if is_dry_run else 1024,
        num_layers=2 if is_dry_run else 4,
        num_q_heads=4 if is_dry_run else 16,
        num_kv_heads=2 if is_dry_run else 4,
        head_dim=16 if is_dry_run else 64,
        max_position=1024,
    )
    if is_dry_run:
        config = EngineConfig(
            max_num_seqs=2,
            prefill_chunk_tokens=16,
            page_size=8,
            num_pages=8,
            max_model_len=56,
        )
        return Sizes(model=model, config=config, prompts=4, longest_prompt=40, max_tokens=12)
    config = EngineConfig(
        max_num_seqs=16,
        prefill_chunk_tokens=64,
        page_size=16,
        num_pages=80,
        max_model_len=512,
    )
    return Sizes(model=model, config=config, prompts=48, longest_prompt=300, max_tokens=64)


def tasks(is_dry_run: bool) -> Tasks:
    """One task: both engines."""
    sizes = _sizes(is_dry_run)
    return {"requests": lambda: serve(sizes)}


@dataclass
class Answer:
    """What a greedy request brought.

    Attributes:
      token_ids: The output.
      gaps: For each, how far apart the two best were, as log-probabilities; none if not asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def serve(sizes: Sizes) -> Findings:
    """Serves the same requests with both backends, then more of them for speed."""
    built = _build(sizes, None)
    ready = compile_events()
    prompts = _prompts(sizes, seed=0)
    found = greedy_answers(built.engine, prompts, sizes.max_tokens, has_gaps=True)
    load = built.engine.load()
    others = _prompts(sizes, seed=1)
    began_s = time.perf_counter()
    fast = greedy_answers(built.engine, others, sizes.max_tokens)
    seconds = time.perf_counter() - began_s
    num_compilations = compile_events() - ready

    reference = _build(sizes, ReferenceBackend())
    wanted = greedy_answers(reference.engine, prompts, sizes.max_tokens, has_gaps=True)
    num_equal, faults = compare(found, wanted, sizes.max_tokens)
    total = sizes.prompts * sizes.max_tokens
    if num_equal < LEAST_COMPARED * total:
        faults.append(f"only {num_equal} of {total} ids came before a close call or a difference")
    if num_compilations:
        faults.append(f"{num_compilations} compile events after ready")
    if built.attention_reason:
        faults.append(f"the kernels do not run: {built.attention_reason}")
    if not load.preemptions_total or not load.cached_tokens_total:
        faults.append("nobody was preempted, or nobody hit the prefix cache: too easy")
    return {
        "attention": built.attention,
        "equal_ids": num_equal,
        "all_ids": total,
        "compile_events_after_ready": num_compilations,
        "preemptions": load.preemptions_total,
        "cached_tokens": load.cached_tokens_total,
        "tokens_per_s": sum(len(answer.token_ids) for answer in fast) / seconds,
        "num_executables": built.num_executables,
        "compile_s": built.compile_s,
        "reference_compile_s": reference.compile_s,
        "failures": faults,
    }


def compare(
    found: Sequence[Answer], wanted: Sequence[Answer], max_tokens: int
) -> tuple[int, list[str]]:
    """How many ids are equal before the first that differs, and where that was no close call.

    Args:
      found: Of the backend in question, one for each request.
      wanted: Of the reference, with its gaps.
      max_tokens: What each of them must have brought.
    """
    num_equal = 0
    faults: list[str] = []
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        lengths = len(one.token_ids), len(other.token_ids)
        if lengths != (max_tokens, max_tokens):
            faults.append(f"request {number} brought {lengths} ids; both are {max_tokens}")
            continue
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same = next((i for i, (left, right) in enumerate(pairs) if left != right), max_tokens)
        num_equal += same
        if same < max_tokens and not other.gaps[same] <= CLEAR_GAP:
            faults.append(
                f"request {number}, output {same}: id {one.token_ids[same]}, with the reference "
                f"{other.token_ids[same]}, which is ahead by {other.gaps[same]:.3f}"
            )
    return num_equal, faults


def _build(sizes: Sizes, backend: AttentionBackend | None) -> BuiltEngine:
    return build_engine(
        random_checkpoint(sizes.model),
        sizes.config,
        eos_token_ids=frozenset(),
        clock=time.monotonic,
        on_progress=lambda stage, done, total: None,
        backend=backend,
    )


def _prompts(sizes: Sizes, seed: int) -> list[list[int]]:
    """Random ids; every third prompt begins with what the others of these begin with."""
    rng = np.random.default_rng(seed)
    most, vocab_size = sizes.longest_prompt, sizes.model.vocab_size
    shared = rng.integers(0, vocab_size, most // 2).tolist()
    prompts: list[list[int]] = []
    for number in range(sizes.prompts):
        own = rng.integers(0, vocab_size, rng.integers(1, most // 2)).tolist()
        prompts.append([*shared, *own] if number % 3 == 0 else own)
    return prompts


def greedy_answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    has_gaps: bool = False,
) -> list[Answer]:
    """Sends all prompts at once and waits for every answer; raises what broke the engine."""
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=has_gaps,
        top_logprobs=2 if has_gaps else 0,
    )
    for number, prompt in enumerate(prompts):
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        engine.add(admit(request, engine.config, engine.limits))
    answers = [Answer() for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            answer = answers[int(output.request_id)]
            answer.token_ids += output.token_ids
            best = output.top_logprobs[0::2]
            second = output.top_logprobs[1::2]
            answer.gaps += [one - other for one, other in zip(best, second, strict=True)]
        if engine.failure is not None:
            raise engine.failure
    return answers
