from .fakes import Answer, collect, fake_engine, request, run_alone


def test_one():
    engine, executor = fake_engine()
    r = request("a", max_tokens=5)
    engine.add_request(r)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        engine.check()
        if engine.failure: raise engine.failure
    assert answers["a"] == run_alone(r, engine.config, engine.limits)
    print(executor.log)
