"""`python -m tests.server.fake_serve`: what `octavo serve` runs, with the fake engine."""

import asyncio
import sys
import threading
import time

from octavo.server.progress import OnProgress, ProgressDisplay
from octavo.server.served_model import ServedModel
from octavo.server.server import ServerConfig
from octavo.server.serving import serve_until_stopped

from .fakes import FakeEngine, OnOutputs, served

STEP_S = 0.02


def main(load_s: float, drain_timeout_s: float, grace_s: float, hangs: bool) -> int:
    def load(on_outputs: OnOutputs, on_progress: OnProgress) -> ServedModel:
        on_progress("compiling", 12, 20)
        time.sleep(load_s)
        engine = FakeEngine(on_outputs)
        engine.hangs = hangs

        def run() -> None:
            while not engine.is_stopped:
                engine.step()
                time.sleep(STEP_S)

        threading.Thread(target=run, daemon=True).start()
        return served(engine)

    def announce(line: str) -> None:
        print(line, flush=True)

    is_drained = asyncio.run(
        serve_until_stopped(
            ServerConfig(port=0, drain_timeout_s=drain_timeout_s, withdrawal_grace_s=grace_s),
            load,
            stall_timeout_s=120.0,
            on_progress=ProgressDisplay(sys.stderr),
            announce=announce,
        )
    )
    return 0 if is_drained else 1


if __name__ == "__main__":
    # What follows are flags of `octavo serve`.
    load_s, drain_timeout_s, grace_s, behaviour = sys.argv[1:5]
    sys.exit(main(float(load_s), float(drain_timeout_s), float(grace_s), behaviour == "hangs"))
