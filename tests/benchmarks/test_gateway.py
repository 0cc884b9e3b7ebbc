"""The measurement of the gateway's cost runs from end to end."""

from __future__ import annotations

from benchmarks import gateway


def test_every_case_is_measured_on_both_sides():
    rows = gateway.run(rounds=2, ref=None)
    assert [(row["path"], row["case"]) for row in rows] == [(c.path, c.name) for c in gateway.cases()]
    for row in rows:
        assert set(row["p50_ms"]) == {"now", "echo"}
        assert all(value > 0 for value in row["p50_ms"].values())
        assert row["reply_bytes"] > 1000
    assert "| /embed: 100 x 512 ids" in gateway.markdown(rows, None, 2)


def test_a_loss_is_shown_beside_the_revision():
    p50 = {"now": 2.0, "before": 1.6, "echo": 0.5}
    row = {"case": "c", "path": "/embed", "reply_bytes": 9, "p50_ms": p50, "loss": 0.25}
    page = gateway.markdown([row], "abc1234", 5)
    assert "gateway at abc1234, ms" in page
    assert "+25.0 %" in page
