"""Traces with chosen times, and an interpreter that only pretends to have torch."""

import sys
from pathlib import Path

from octavo.bench.closed_loop import Trace

FAKE_PYTHON = """\
#!{python}
import json, sys
if sys.argv[1] == "-c":
    print(json.dumps({{"python": "3.11.7", "torch": "2", "transformers": "5"}}))
    sys.exit()
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[3:])
assert sys.argv[1] == "-P" and sys.argv[2].endswith("transformers_peer.py"), sys.argv
assert flags.keys() == {{"model", "dtype", "num_threads"}}, flags
print(json.dumps({{"ready": {{"dtype": flags["dtype"], "num_threads": flags["num_threads"]}}}}),
      flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    prompts, n = asked["prompts"], asked["output_tokens"]
    {answer}
"""

# As the fake engine: each output repeats its prompt. So many seconds that speeds are round numbers.
REPEATS = """print(json.dumps({"token_ids": [(prompt * n)[:n] for prompt in prompts],
                      "prefill_s": 0.5, "decode_s": 1.5}), flush=True)"""


def fake_python(folder: Path, answer: str = REPEATS) -> str:
    """The path of one whose peer does this with each question."""
    path = folder / "fake-python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable, answer=answer))
    path.chmod(0o755)
    return str(path)


def trace(sent_s: float, *deltas: tuple[float, int]) -> Trace:
    ids = list(range(sum(num_tokens for _, num_tokens in deltas)))
    return Trace(
        sent_s=float(sent_s),
        token_ids=ids,
        deltas=[(float(now_s), num_tokens) for now_s, num_tokens in deltas],
    )
