"""Compilation, watched and remembered: a count of compilations, and the persistent cache.

After READY the count must stand still: everything that will ever run was compiled before.
"""

import threading
from pathlib import Path

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        # Listeners are process-wide and cannot be taken back, so there is one for good.
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self.count += 1


_counter = _Counter()


def compile_events() -> int:
    """Compilations in this process so far, those that the persistent cache answered included."""
    return _counter.count


def use_persistent_cache(directory: Path) -> None:
    """Keeps compiled programs of any size in a directory, for later processes on this machine."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
