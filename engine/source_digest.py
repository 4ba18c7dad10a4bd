"""A digest of the package's own sources: whatever is made by equal ones need not be made again."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def source_digest(folders: Sequence[str], package: Path = _PACKAGE) -> bytes:
    """Of the Python and TOML files in some folders of the package, by name and content."""
    files = [
        path
        for folder in folders
        for path in sorted((package / folder).iterdir())
        if path.suffix in (".py", ".toml")
    ]
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()
