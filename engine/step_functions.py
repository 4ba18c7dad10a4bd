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
from ..pallas_kernels.paged_attention import Segments, paged_batch
from . import packing
from .device_state import DeviceState, Slots, apply_upload, gather_slots, write_progress
from .packing import UploadLayout
from .sampler import SamplingRows, chosen_logprobs, sample

HEAD_BLOCK = 32  # positions whose logits exist at once when prompt log-probabilities are asked for


def run_step(
    layout: UploadLayout, decoder: Decoder, state: DeviceState, packed: Int32[Array, " words"]
) -> tuple[DeviceState, Int32[Array, " result_words"]]:
    """Runs one step of the shape that the layout's key names. Donates state.

    Returns the state after it and the packed result that packing.unpack reads.
    """
    key, upload = layout.key, layout.split(packed)
    slots = apply_upload(state.slots, upload["slot_rows"], upload["page_entries"])

    segments = upload["segments"]
    segment_lens = segments[:, packing.SEGMENT_LENGTH]
    segment_ends = segments[:, packing.SEGMENT_START] + segment_lens
    # Decode rows first, then one row per segment.
    index = jnp.concatenate([upload["decode_slots"], segments[:, packing.SEGMENT_SLOT]])
    current = gather_slots(slots, index)
    is_live = current.column(packing.ACTIVE)[: key.rows] == 1
    row_kv_lens = jnp.where(is_live, current.column(packing.KV_LEN)[: key.rows] + 1, 0)
    batch = paged_batch(
        current.page_table[: key.rows],
        row_kv_lens,
        Segments(current.page_table[key.rows :], segment_ends, segment_lens) if key.chunk else None,
        chunk=key.chunk,
        page_size=layout.page_size,
        num_pages=state.kv[0].num_pages,
    )
    row_tokens = current.column(packing.TOKEN)[: key.rows]
    tokens = jnp.concatenate([row_tokens, upload["chunk_tokens"]])
    hidden, kv = decoder(tokens, state.kv, batch)

    last_of_segment = jnp.maximum(jnp.cumsum(segment_lens) - 1, 0)
    sampled_from = jnp.concatenate([jnp.arange(key.rows), key.rows + last_of_segment])
    with jax.named_scope("sample"):
        slots, samples = _sample(
            slots,
            index,
            current,
            decoder.logits(hidden[sampled_from]),
            jnp.concatenate([is_live, segments[:, packing.SEGMENT_IS_LAST] == 1]),
            kv_lens=jnp.concatenate([row_kv_lens, segment_ends]),
        )
    chunk_logprobs = _target_logprobs(decoder, hidden[key.rows :], upload["chunk_targets"])
    result = jnp.concatenate([samples.reshape(-1), _bits(chunk_logprobs)])
    return DeviceState(kv, slots), result


def _sample(
    slots: Slots,
    index: Int32[Array, " rows"],
    current: Slots,
    logits: Float[Array, "rows vocab"],
    is_valid: Bool[Array, " rows"],
    *,
    kv_lens: Int32[Array, " rows"],
) -> tuple[Slots, Int32[Array, "rows columns"]]:
    """Samples a token per row, ends those that are done, and writes their slots.

    A row that is not valid (padding, stopped, or a chunk that does not end its prompt) samples
    greedily, which costs nothing, and only its kv_len changes.
    """
    position, remaining = current.column(packing.POSITION), current.column(packing.REMAINING)
    token = sample(
        logits,
        SamplingRows(
            temperature=jnp.where(is_valid, current.float_column(packing.TEMPERATURE), 0),
            top_k=current.column(packing.TOP_K),
            top_p=current.float_column(packing.TOP_P),
            min_p=current.float_column(packing.MIN_P),
            seed=current.seed,
            position=position,
        ),
    )
    wants_logprob = is_valid & (current.column(packing.LOGPROBS) == 1)
    logprob = lax.cond(
        wants_logprob.any(),
        lambda: chosen_logprobs(logits, token),
        lambda: jnp.zeros(token.shape, jnp.float32),
    )
    is_stopped = (token[:, None] == current.stop_ids).any(-1)
    is_exhausted = remaining <= 1
    slots = write_progress(
        slots,
        index,
        token=token,  # of no meaning where it is not valid: no such row is active
        kv_len=kv_lens,
        active=jnp.where(is_valid & ~is_stopped & ~is_exhausted, 1, 0),
        remaining=jnp.where(is_valid, remaining - 1, remaining),
        position=jnp.where(is_valid, position + 1, position),
    )
    status = packing.VALID + packing.STOPPED * is_stopped + packing.EXHAUSTED * is_exhausted
    status = jnp.where(is_valid, status, 0)
    return slots, jnp.stack([token, status, _bits(logprob)], axis=-1)


def _target_logprobs(
    decoder: Decoder, hidden: Float[Array, "chunk hidden"], targets: Int32[Array, " chunk"]
) -> Float[Array, " chunk"]:
    """Log-probability of each chunk token's target; nothing is computed where nobody asks.

    The head runs in blocks of positions: there is never an array of [chunk, vocabulary].
    """
    chunk = hidden.shape[0]
    if chunk == 0:
        return jnp.zeros(0, jnp.float32)
    block = min(HEAD_BLOCK, chunk)

    def score_block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return chosen_logprobs(decoder.logits(part[0]), part[1])

    def score() -> jax.Array:
        padding = -chunk % block
        blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        wanted = jnp.pad(jnp.maximum(targets, 0), (0, padding)).reshape(-1, block)
        return lax.map(score_block, (blocks, wanted)).reshape(-1)[:chunk]

    return lax.cond((targets >= 0).any(), score, lambda: jnp.zeros(chunk, jnp.float32))


def _bits(x: Float[Array, " n"]) -> Int32[Array, " n"]:
    return lax.bitcast_convert_type(x, jnp.int32)
