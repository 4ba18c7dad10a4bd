"""How many pages the KV pool gets. Arithmetic only; whoever measures passes the numbers in."""

from collections.abc import Callable

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig

HOST_SHARE = 4  # of the host memory that is free the pool takes at most one part in this many
# Device code numbers the places of the pool with int32, and behind them those of a step's padding.
MAX_POOL_TOKENS = 2**31 - 2**20
LEAST_PAGES = 2  # page 0 stays zero


def longest_context(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of one request, however many the pages hold.

    Raises:
      ValueError: max_model_len is more than the model was trained for.
    """
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; it must be at most {model.max_position}, "
            "the tokens that the model was trained for"
        )
    return config.max_model_len


def num_pages(
    config: EngineConfig, model: ModelConfig, *, bytes_per_page: int, free_bytes: Callable[[], int]
) -> int:
    """Pages of the pool, page 0 included.

    Args:
      config: num_pages or kv_cache_bytes decide where they are given.
      model: Its longest context bounds what the slots can use.
      bytes_per_page: Over all layers.
      free_bytes: Memory that the pool may take; asked only where the config does not say.

    Raises:
      ValueError: The pool would be too small for one page of use, or too large to be numbered.
    """
    source = "num_pages"
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.kv_cache_bytes is not None:
        source = f"kv_cache_bytes is {config.kv_cache_bytes}, which"
        pages = config.kv_cache_bytes // bytes_per_page
    else:
        free = free_bytes()
        missing = LEAST_PAGES * bytes_per_page - free
        if config.device_memory_bytes is not None and missing > 0:
            raise ValueError(
                f"device_memory_bytes is {config.device_memory_bytes}; it must be at least "
                f"{config.device_memory_bytes + missing}: what model and programs take, and "
                f"{LEAST_PAGES} KV pages of {bytes_per_page} bytes"
            )
        # Begins with a field of the config, as all errors about it do.
        source = "num_pages is not given, and the memory that is free for the KV pool"
        usable = config.max_num_seqs * -(-longest_context(config, model) // config.page_size)
        most = MAX_POOL_TOKENS // config.page_size
        pages = min(max(free, 0) // bytes_per_page, usable + 1, most)
    if pages < LEAST_PAGES:
        raise ValueError(
            f"{source} gives {pages} pages of {bytes_per_page} bytes; it must give at least "
            f"{LEAST_PAGES}: page 0 stays zero"
        )
    if pages * config.page_size > MAX_POOL_TOKENS:
        raise ValueError(
            f"{source} gives {pages} pages of {config.page_size} tokens; "
            f"they must hold at most {MAX_POOL_TOKENS} tokens"
        )
    return pages


def pool_bytes(
    limit_bytes: int,
    *,
    parameter_bytes: int,
    slot_bytes: int,
    temporary_bytes: int,
    program_bytes: int,
) -> int:
    """Memory that is left for the KV pool; negative where there is not even enough for the rest.

    Args:
      limit_bytes: What the engine may take of a device.
      parameter_bytes: Weights.
      slot_bytes: Slots, and the tables of their rules.
      temporary_bytes: The most that an executable's own arrays take at once.
      program_bytes: Code of all executables; they all stay on the device.
    """
    return limit_bytes - parameter_bytes - slot_bytes - temporary_bytes - program_bytes


def grown(measured_bytes: int) -> int:
    """What an executable's temporaries or program may take, from those with the least pool.

    Compilers unroll and address a pool of thousands of pages in another way: on TPUs programs were
    up to 2 % larger. Times thirteen of them that is several pages, which would not fit any more.
    """
    return measured_bytes + measured_bytes // 16


def host_pages(config: EngineConfig, bytes_per_page: int) -> int:
    """Pages that host memory keeps for those that had to leave the device; 0: it keeps none.

    Args:
      config: host_kv_bytes decides. The host keeps what each of the devices has of a page.
      bytes_per_page: Over all layers, on one device.

    Raises:
      ValueError: host_kv_bytes is not zero and less than one page.
    """
    page_bytes = bytes_per_page * config.tensor_parallel_size
    if 0 < config.host_kv_bytes < page_bytes:
        raise ValueError(
            f"host_kv_bytes is {config.host_kv_bytes}; it must be 0 or at least {page_bytes}, "
            "the bytes of one page"
        )
    return config.host_kv_bytes // page_bytes


def host_pool_bytes(available_bytes: int, num_devices: int) -> int:
    """What the pool of each device may take of host memory when this much is free for all of them.

    In all a power of two: the number of pages is part of the compiled shapes, and a start that
    finds a little more or less memory free than the one before must find its programs in the cache.
    Example: from 16 up to 32 GiB free it is 4 GiB for one device, and 512 MiB for each of eight.
    """
    share = available_bytes // HOST_SHARE
    return (1 << share.bit_length() - 1 if share else 0) // num_devices
