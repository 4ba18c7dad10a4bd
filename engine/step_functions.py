"""The step: one pure function from (parameters, state, upload) to (state, download).

A decode step runs one token for each of `rows` slots. A mixed step runs `chunk` prompt tokens as
well, through the same dense layers, so that weights are read once; the last token of a prompt
samples the request's first token, and the slot is a decode row from then on without the host.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ..models.decoder import Decoder
from ..pallas_kernels.backend import AttentionBackend
from ..pallas_kernels.chunk_tokens import Segments
from ..pallas_kernels.paged_attention import paged_batch
from . import packing
from .device_state import (
    DeviceState,
    Slots,
    apply_rule_upload,
    apply_upload,
    count_tokens,
    gather_slots,
    write_progress,
)
from .logit_rules import LogitRules, RuleTables
from .logprobs import chosen_logprobs, top_logprobs
from .packing import UploadLayout
from .row_groups import for_groups, read_wide_rows
from .sampler import sample
from .sampling_checks import MAX_TOP_LOGPROBS
from .sampling_rows import SamplingRows

TOP_GROUP = 4  # rows whose most likely ids are found at once
HEAD_BLOCK = 32  # positions whose logits exist at once when prompt log-probabilities are asked for


def run_step(
    layout: UploadLayout,
    backend: AttentionBackend,
    decoder: Decoder,
    state: DeviceState,
    packed: Int32[Array, " words"],
    mask_rows: Int32[Array, "masks mask_words"],
) -> tuple[DeviceState, Int32[Array, " result_words"]]:
    """Runs one step of the shape that the layout's key names. Donates state.

    It is what one device does with its share of parameters and pages (`models.dealing`); all do the
    same with slots and tables, and get the same result.

    Returns the state after it and the packed result that packing.unpack reads.
    """
    key, upload = layout.key, layout.split(packed)
    slots = apply_upload(state.slots, upload["slot_rows"], upload["page_entries"])
    tables = apply_rule_upload(state.tables, upload["slot_rows"], upload["rule_entries"], mask_rows)

    segments = upload["segments"]
    segment_lens = segments[:, packing.SEGMENT_LENGTH]
    segment_ends = segments[:, packing.SEGMENT_START] + segment_lens
    # Decode rows first, then one row per segment.
    index = jnp.concatenate([upload["decode_slots"], segments[:, packing.SEGMENT_SLOT]])
    current = gather_slots(slots, index)
    is_live = current.column(packing.ACTIVE)[: key.rows] == 1
    row_kv_lens = jnp.where(is_live, current.column(packing.KV_LEN)[: key.rows] + 1, 0)
    batch = paged_batch(
        backend,
        current.page_table[: key.rows],
        row_kv_lens,
        Segments(current.page_table[key.rows :], segment_ends, segment_lens) if key.chunk else None,
        chunk=key.chunk,
        page_size=layout.page_size,
        num_pages=jax.tree.leaves(state.kv)[0].shape[0],
    )
    row_tokens = current.column(packing.TOKEN)[: key.rows]
    tokens = jnp.concatenate([row_tokens, upload["chunk_tokens"]])
    hidden, kv = decoder(tokens, state.kv, batch)

    scores = _score_targets(
        decoder,
        hidden[key.rows :],
        upload["chunk_targets"],
        wants_top=current.has(packing.PROMPT_TOP_LOGPROBS)[key.rows :].any(),
    )
    chunk_ends = jnp.cumsum(segment_lens)
    is_spoiled = _is_spoiled(scores, chunk_ends - segment_lens, chunk_ends)
    last_of_segment = jnp.maximum(chunk_ends - 1, 0)
    sampled_from = jnp.concatenate([jnp.arange(key.rows), key.rows + last_of_segment])
    with jax.named_scope("sample"):
        slots, tables, samples = _sample(
            slots,
            tables,
            index,
            current,
            decoder.logits(hidden[sampled_from]),
            jnp.concatenate([is_live, segments[:, packing.SEGMENT_IS_LAST] == 1]),
            is_spoiled=jnp.concatenate([jnp.zeros_like(is_live), is_spoiled]),
            kv_lens=jnp.concatenate([row_kv_lens, segment_ends]),
        )
    result = jnp.concatenate([samples.reshape(-1), scores.reshape(-1)])
    return DeviceState(kv, slots, tables), result


def _sample(
    slots: Slots,
    tables: RuleTables,
    index: Int32[Array, " rows"],
    current: Slots,
    logits: Float[Array, "rows vocab"],
    is_valid: Bool[Array, " rows"],
    *,
    is_spoiled: Bool[Array, " rows"],
    kv_lens: Int32[Array, " rows"],
) -> tuple[Slots, RuleTables, Int32[Array, "rows columns"]]:
    """Samples a token per row, ends those that are done, and writes their slots and histories.

    A row that is not valid (padding, stopped, or a chunk that does not end its prompt) samples
    greedily and without rules, which costs nothing, and only its kv_len changes. One that is
    spoiled is broken, valid or not, whatever it samples.
    """
    position, remaining = current.column(packing.POSITION), current.column(packing.REMAINING)
    has_penalties = is_valid & current.has(packing.HAS_PENALTIES)
    is_early = is_valid & (position < current.column(packing.MIN_TOKENS))
    token, is_broken = sample(
        logits,
        SamplingRows(
            temperature=jnp.where(is_valid, current.float_column(packing.TEMPERATURE), 0),
            top_k=current.column(packing.TOP_K),
            top_p=current.float_column(packing.TOP_P),
            min_p=current.float_column(packing.MIN_P),
            seed=current.seed,
            position=position,
            choice=current.column(packing.CHOICE),
        ),
        LogitRules(
            slot=index,
            repetition_penalty=jnp.where(
                has_penalties, current.float_column(packing.REPETITION_PENALTY), 1
            ),
            frequency_penalty=jnp.where(
                has_penalties, current.float_column(packing.FREQUENCY_PENALTY), 0
            ),
            presence_penalty=jnp.where(
                has_penalties, current.float_column(packing.PRESENCE_PENALTY), 0
            ),
            num_biased=jnp.where(is_valid, current.column(packing.NUM_BIASED), 0),
            is_masked=is_valid & current.has(packing.IS_MASKED),
            not_yet=jnp.where(is_early[:, None], current.stop_ids, packing.NO_TOKEN),
        ),
        tables,
    )
    is_broken |= is_spoiled
    tables = count_tokens(tables, index, has_penalties & ~is_broken, token)
    wants_logprob = is_valid & current.has(packing.LOGPROBS)
    logprob = lax.cond(
        wants_logprob.any(),
        lambda: chosen_logprobs(logits, token),
        lambda: jnp.zeros(token.shape, jnp.float32),
    )
    top = _top_logprobs(logits, is_valid & current.has(packing.TOP_LOGPROBS))
    is_stopped = (token[:, None] == current.stop_ids).any(-1)
    is_exhausted = remaining <= 1
    goes_on = is_valid & ~is_stopped & ~is_exhausted & ~is_broken
    slots = write_progress(
        slots,
        index,
        token=token,  # of no meaning where it is not valid: no such row is active
        kv_len=kv_lens,
        active=jnp.where(goes_on, 1, 0),
        remaining=jnp.where(is_valid, remaining - 1, remaining),
        position=jnp.where(is_valid, position + 1, position),
    )
    status = packing.VALID + packing.STOPPED * is_stopped + packing.EXHAUSTED * is_exhausted
    status = jnp.where(is_broken, packing.BROKEN, status)
    status = jnp.where(is_valid | is_spoiled, status, 0)
    return slots, tables, jnp.concatenate([jnp.stack([token, status, _bits(logprob)], -1), top], -1)


def _top_logprobs(
    logits: Float[Array, "rows vocab"], is_wanted: Bool[Array, " rows"]
) -> Int32[Array, "rows top_columns"]:
    """The most likely ids of the rows that want them, then the bits of their log-probabilities."""

    def find(rows: Int32[Array, " group"], found: jax.Array) -> jax.Array:
        token_ids, logprobs = top_logprobs(read_wide_rows(logits, rows), MAX_TOP_LOGPROBS)
        columns = jnp.concatenate([token_ids, _bits(logprobs)], -1)
        return found.at[rows].set(columns, mode="drop", unique_indices=True)

    nothing = jnp.zeros((logits.shape[0], 2 * MAX_TOP_LOGPROBS), jnp.int32)
    return for_groups(is_wanted, TOP_GROUP, find, nothing)


def _score_targets(
    decoder: Decoder,
    hidden: Float[Array, "chunk hidden"],
    targets: Int32[Array, " chunk"],
    *,
    wants_top: Bool[Array, ""],
) -> Int32[Array, "chunk score_columns"]:
    """Each chunk token's target and the most likely ids; nothing is computed where nobody asks.

    A log-probability is NaN where the logits mean nothing, and 0 where there is no target. The
    head runs in blocks of positions: there is never an array of [chunk, vocabulary].
    """
    chunk = hidden.shape[0]
    nothing = jnp.zeros((chunk, packing.SCORE_COLUMNS), jnp.int32)
    if chunk == 0:
        return nothing
    block = min(HEAD_BLOCK, chunk)

    def score_block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, wanted = part
        logits = lax.optimization_barrier(decoder.logits(hidden))
        top = _top_logprobs(logits, (wanted >= 0) & wants_top)
        logprob = jnp.where(wanted >= 0, chosen_logprobs(logits, jnp.maximum(wanted, 0)), 0)
        return jnp.concatenate([_bits(logprob)[:, None], top], -1)

    def score() -> jax.Array:
        padding = -chunk % block
        blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        wanted = jnp.pad(targets, (0, padding), constant_values=packing.NO_TOKEN)
        scores = lax.map(score_block, (blocks, wanted.reshape(-1, block)))
        return scores.reshape(-1, packing.SCORE_COLUMNS)[:chunk]

    return lax.cond((targets >= 0).any(), score, lambda: nothing)


def _is_spoiled(
    scores: Int32[Array, "chunk score_columns"],
    starts: Int32[Array, " segments"],
    ends: Int32[Array, " segments"],
) -> Bool[Array, " segments"]:
    """Segments with a log-probability that is none; [start, end) are their places in the chunk."""
    logprob = lax.bitcast_convert_type(scores[:, packing.SCORE_LOGPROB], jnp.float32)
    place = jnp.arange(scores.shape[0])
    is_inside = (place >= starts[:, None]) & (place < ends[:, None])
    return (is_inside & jnp.isnan(logprob)).any(-1)


def _bits(x: Float[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)
