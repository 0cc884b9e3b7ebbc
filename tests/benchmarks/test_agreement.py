import pytest

from benchmarks import agreement


def test_sides_take_turns_change_who_begins_and_the_first_round_does_not_count():
    asked = []

    def side(name, offset):
        def ask(number):
            asked.append((number, name))
            return {128: 1.0 * number + offset}

        return ask

    taken = agreement.take_turns({"theirs": side("theirs", 0), "ours": side("ours", 0.5)}, rounds=3)
    first_of = [dict(reversed(asked)).get(number) for number in range(4)]
    assert first_of == ["ours", "theirs", "ours", "theirs"]
    assert taken == {"theirs": {128: [1.0, 2.0, 3.0]}, "ours": {128: [1.5, 2.5, 3.5]}}
    assert agreement.compared(taken) == [(128, 2.0, 2.5, 1.25)]


def test_lines_of_the_other_client_are_read_by_tokens(tmp_path):
    script = tmp_path / "client.py"
    script.write_text(
        'print(\'{"x T1 embed bs1 L128": {"p50": 2.5}}\')\n'
        "print('noise')\n"
        'print(\'{"x T1 embed bs1 L4096": {"p50": 11}, "x T5 query L24 c1": {"p50": 9}}\')\n'
    )
    assert agreement.ask_theirs(script, "http://127.0.0.1:1", tmp_path / "t.json") == {128: 2.5, 4096: 11}


@pytest.mark.parametrize(("ours", "code"), [(1.04, 0), (1.06, 1)])
def test_medians_apart_by_more_than_a_twentieth_end_with_one(monkeypatch, ours, code, tmp_path):
    monkeypatch.setattr(agreement, "ask_theirs", lambda *_: {128: 1.0})
    monkeypatch.setattr(agreement, "ask_ours", lambda *_: {128: ours})
    monkeypatch.setattr(agreement.report, "write_json", lambda *_: None)
    command = ["agreement", str(tmp_path / "c.py"), "--url", "http://127.0.0.1:1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    assert agreement.main() == code
