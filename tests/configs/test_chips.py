"""Chips: what `--chips` may say, and that the numbers are of one device.

Breaks when a name or a count that no compiler knows gets through to one.
"""

import re

import pytest

from octavo.configs.chips import CHIPS, Chip, parse_chips


def test_a_list_keeps_its_order() -> None:
    text = "v5e-8,v6e-1,v6e-8,tpu7x-8,a100-1,h100-1,h100-8,h200-1,b200-1,cpu-1,cpu-8"
    assert ",".join(map(str, parse_chips(text))) == text
    (devices,) = parse_chips(" h100-8 ")
    assert (devices.chip, devices.count) == (CHIPS["h100"], 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' must be NAME-COUNT"),
        ("h100", "'h100' must be NAME-COUNT"),
        ("h100-0", "'h100-0' must be NAME-COUNT"),
        ("h100-08", "'h100-08' must be NAME-COUNT"),
        ("h100-1,", "'' must be NAME-COUNT"),
        ("h100--1", "'h100--1' must be NAME-COUNT"),
        ("h110-1", "no chip is called 'h110': did you mean 'h100'?"),
        ("abacus-1", "no chip is called 'abacus': it must be one of v5e, "),
        ("h100-3", "the number of h100 devices must be one of 1, 2, 4, 8"),
        ("tpu7x-1", "the number of tpu7x devices must be one of 2, 8, 16"),
        ("cpu-65", "the number of cpu devices must be one of 1 to 64"),
        ("h100-1,v5e-8,h100-1", "h100-1 must be there once"),
    ],
)
def test_what_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_chips(text)
    assert str(caught.value).startswith("chips is ")  # as the flag is called


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.platform != "cpu"])
def test_numbers_are_of_one_device_in_bytes_and_seconds(chip: Chip) -> None:
    """A number in GB or Gb, or of eight devices, would be far out of these bounds."""
    assert chip.memory_bytes is not None
    assert 15 * 2**30 < chip.memory_bytes < 300 * 2**30
    assert chip.bytes_per_s is not None
    assert 8e11 < chip.bytes_per_s < 2e13
    assert chip.bf16_flops is not None
    assert 1e14 < chip.bf16_flops < 3e15
    # A device reads all of its memory in 16 to 55 ms, and links are slower than memory.
    assert 0.01 < chip.memory_bytes / chip.bytes_per_s < 0.06
    assert chip.link_bytes_per_s is not None
    assert 1e11 < chip.link_bytes_per_s < chip.bytes_per_s / 2
