"""Answers that are kept.

Breaks when an answer is taken for one to another question, or gets lost without a word.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.engine import plan_cache
from octavo.engine.plan_cache import job_key, read_answer, write_answer
from octavo.engine.plan_records import PlanJob, plan_to_json

from .plan_examples import PLAN, make_job


def test_an_answer_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert read_answer(folder, "key") is None
    write_answer(folder, "key", PLAN)
    assert read_answer(folder, "key") == PLAN
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_a_torn_answer_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key.json").write_text(plan_to_json(PLAN)[:50])
    assert read_answer(tmp_path, "key") is None
    assert "compiling again" in caplog.text


def test_a_cache_that_cannot_be_written_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    write_answer(tmp_path / "file" / "plan", "key", PLAN)
    assert "the answer is not kept" in caplog.text


CHANGES: dict[str, Callable[[PlanJob], PlanJob]] = {
    "model": lambda job: dataclasses.replace(
        job, model=dataclasses.replace(job.model, rope_theta=1e4)
    ),
    "config": lambda job: dataclasses.replace(
        job, config=dataclasses.replace(job.config, page_size=32)
    ),
    "devices": lambda job: dataclasses.replace(job, devices=make_job("cpu-2").devices),
    "chip": lambda job: dataclasses.replace(
        job,
        devices=dataclasses.replace(
            job.devices, chip=dataclasses.replace(job.devices.chip, topologies={1: "1x1"})
        ),
    ),
    "memory": lambda job: dataclasses.replace(job, host_bytes=1),
    "free memory": lambda job: dataclasses.replace(job, host_free_bytes=1),
    "steps": lambda job: dataclasses.replace(job, compiles_all=True),
    "layers": lambda job: dataclasses.replace(job, max_layers=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_question_has_another_name(change: str) -> None:
    job = make_job()
    assert job_key(job) == job_key(make_job())
    assert job_key(CHANGES[change](job)) != job_key(job)


def test_other_sources_and_versions_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    before = job_key(job)

    def other(folders: Sequence[str]) -> bytes:
        assert {*folders} >= {"configs", "engine", "models", "pallas_kernels"}
        return b"other"

    monkeypatch.setattr(plan_cache, "source_digest", other)
    changed = job_key(job)
    assert changed != before
    monkeypatch.setattr(plan_cache.importlib.metadata, "version", {"jax": "0"}.get)
    assert job_key(job) not in (before, changed)


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64"])
def test_other_settings_of_compilers_have_another_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = set[str]()
    for value in ("", "1", "2"):
        monkeypatch.setenv(name, value)
        keys.add(job_key(make_job()))
    assert len(keys) == 3
