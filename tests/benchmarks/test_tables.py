"""The tables' harness: its client, its inputs, what it refuses to report, and a run around a fake engine."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from benchmarks.http_client import encode_request
from benchmarks.processes import command_line, descendants
from benchmarks.tables import __main__ as tables
from benchmarks.tables import checks, closed_loop, crew, fake, reference, tracing
from benchmarks.tables.crew import Target
from benchmarks.tables.dialects import OURS, TEI, TEI_NATIVE, TEXT_ONLY, VLLM
from benchmarks.tables.measure import Figures, Outcome, Run, ServerResult
from benchmarks.tables.servers import ADAPTERS, Adapter, Launch, ServerFailed, running
from benchmarks.tables.summary import markdown
from benchmarks.tables.workloads import CELLS, Cell, InputMaker, load_tokenizer, shortened

EMBED = Cell("T1", 2, 8)
SCORE = Cell("T2", 2, 8, score=True)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    fake.write_folder(folder, "embed", max_length=128)
    return folder / "tokenizer.json"


@pytest.fixture
def server():
    """Answers each request on one connection with the next of `replies`, whole or in the pieces given."""
    listener = socket.create_server(("127.0.0.1", 0))
    replies: list[list[bytes]] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while replies and connection.recv(1 << 20):
                for piece in replies.pop(0):
                    connection.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)

    def start(*given: list[bytes]) -> tuple[str, int]:
        replies.extend(given)
        thread.start()
        return listener.getsockname()

    yield start
    thread.join(5)
    listener.close()


def reply_of(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_the_client_waits_for_the_whole_of_each_reply(server):
    whole = reply_of(b"0123456789")
    address = server([whole], [whole[:10], whole[10:30], whole[30:]], [whole])
    timings = closed_loop.drive(address, [encode_request("POST", "/", b"{}")] * 3, 1)
    assert len(timings.milliseconds) == 3
    assert timings.sent == sorted(timings.sent)
    assert all(sent < received for sent, received in zip(timings.sent, timings.received, strict=True))


def test_a_refusal_ends_the_measurement(server):
    address = server([b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\nno"])
    with pytest.raises(closed_loop.RequestFailed, match="429 no"):
        closed_loop.drive(address, [encode_request("POST", "/", b"{}")], 1)


@pytest.mark.parametrize("num_tokens", [24, 100])
def test_texts_have_exactly_the_wanted_tokens_and_never_repeat(tokenizer_file, num_tokens):
    maker = InputMaker(tokenizer_file, 30_000, 1)
    texts = maker.texts(num_tokens, 600)
    tokenizer = load_tokenizer(tokenizer_file)
    assert {len(tokenizer.encode(text).ids) for text in texts} == {num_tokens}
    assert len(set(texts)) == len(texts)


def test_ids_differ_from_request_to_request_and_from_seed_to_seed(tokenizer_file):
    first, second = (InputMaker(tokenizer_file, 30_000, seed) for seed in (1, 2))
    drawn = [first.ids(32), first.ids(32), second.ids(32)]
    assert len({tuple(ids) for ids in drawn}) == 3
    assert all(100 <= token < 30_000 for ids in drawn for token in ids)


def test_no_run_of_any_cell_repeats_the_inputs_of_another_or_their_beginnings(tokenizer_file):
    """Caches of prefixes would meet them again."""
    target = Target(("127.0.0.1", 1), "m", OURS, tokenizer_file, 30_000)
    texts, ids = (
        [
            json.loads(request.partition(b"\r\n\r\n")[2])["input"]
            for cell in cells
            for seed in ((2, 0), (2, 1), (3, 0))
            for request in crew._prepare(crew.Task(target, cell, 5, 1, seed))
        ]
        for cells in (
            [Cell("T4", 1, 24, concurrency=many, text=True) for many in (1, 2, 4)],
            [Cell("T1", 1, length) for length in (16, 24, 32)],
        )
    )
    assert len(texts) == len(ids) == 45
    assert len(set(texts)) == 45
    assert len({tuple(one[:8]) for one in ids}) == 45


def test_cells_are_those_of_the_published_tables():
    of_table = {
        table: [cell for cell in CELLS if cell.table == table] for table in ("T1", "T2", "T3", "T4", "T5")
    }
    assert [(c.num_inputs, c.num_tokens) for c in of_table["T1"]] == [(1, 128), (1, 512), (1, 4096)]
    assert [(c.num_inputs, c.num_tokens, c.score) for c in of_table["T2"]] == [
        (n, 512, True) for n in (5, 25, 50)
    ]
    assert [(c.num_inputs, c.num_tokens, c.processes) for c in of_table["T3"]] == [
        (100, length, 4) for length in (512, 1024, 4096)
    ]
    assert [c.concurrency for c in of_table["T4"]] == [1, 2, 4, 8, 16]
    assert [(c.num_tokens, c.concurrency) for c in of_table["T5"]] == [(24, 1), (24, 16), (24, 64)]
    assert [c.name for c in shortened(of_table["T1"], 256)] == ["T1 1 x 128", "T1 1 x 256"]


def test_each_dialect_speaks_its_own_words():
    assert json.loads(OURS.body(SCORE, "m", [[1], [2]])) == {"model": "m", "input_ids": [[1], [2]]}
    assert json.loads(OURS.check_body(SCORE, "m", [[1]]))["raw_scores"] is True
    assert json.loads(VLLM.check_body(SCORE, "m", [[1]])) == {"model": "m", "input": [[1]]}
    assert json.loads(OURS.body(Cell("T1", 1, 3), "m", [[7, 8, 9]]))["input"] == [7, 8, 9]
    assert TEXT_ONLY.refusal(EMBED) == "takes no token ids"
    assert TEXT_ONLY.refusal(Cell("T4", 1, 8, text=True)) is None


def test_rows_are_read_in_the_order_of_their_index():
    data = [
        {"index": 1, "embedding": base64.b64encode(np.array([3, 4], "<f4")).decode()},
        {"index": 0, "embedding": [1, 2]},
    ]
    np.testing.assert_array_equal(OURS.rows(EMBED, json.dumps({"data": data}).encode()), [[1, 2], [3, 4]])
    scores = [{"index": 0, "probs": [0.25]}, {"index": 1, "probs": [0.5]}]
    np.testing.assert_array_equal(VLLM.rows(SCORE, json.dumps({"data": scores}).encode()), [[0.25], [0.5]])


def checked(server, tokenizer_file, cell: Cell, answers: list[dict], reference: np.ndarray) -> float:
    target = Target(
        server([reply_of(json.dumps({"data": answers}).encode())]), "m", OURS, tokenizer_file, 30_000
    )
    return checks.Checker([cell], target, lambda ids, task: reference[: len(ids)]).check(target, cell)


def test_vectors_off_by_more_than_a_thousandth_are_refused(server, tokenizer_file):
    close, off = [1.0, 0.04], [1.0, 0.05]  # cosines 0.99920 and 0.99875
    answers = [{"index": i, "embedding": vector} for i, vector in enumerate((close, off))]
    with pytest.raises(checks.Diverged, match=r"0\.9987"):
        checked(server, tokenizer_file, EMBED, answers, np.array([[1, 0], [1, 0]], np.float32))


def test_vectors_within_a_thousandth_pass(server, tokenizer_file):
    answers = [{"index": i, "embedding": [1.0, 0.04]} for i in range(2)]
    least = checked(server, tokenizer_file, EMBED, answers, np.array([[1, 0], [1, 0]], np.float32))
    assert least == pytest.approx(0.9992, abs=1e-4)


def test_scores_in_another_order_are_refused(server, tokenizer_file):
    cell = Cell("T2", 8, 8, score=True)
    wanted = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    answers = [{"index": i, "score": float(value)} for i, value in enumerate(wanted[::-1, 0])]
    with pytest.raises(checks.Diverged, match="scores are 2"):
        checked(server, tokenizer_file, cell, answers, wanted)


def test_a_trace_splits_each_request_among_the_places_it_passed(tmp_path):
    places = [place for place, _ in tracing._WAY[1:-1]]
    starts = [1_000_000, 2_000_000]
    stamps = [(place, start + 1000 * (i + 1)) for start in starts for i, place in enumerate(places)]
    half = len(places) // 2
    (tmp_path / "1.json").write_text(json.dumps([s for s in stamps if s[0] in places[:half]]))
    (tmp_path / "2.json").write_text(json.dumps([s for s in stamps if s[0] in places[half:]]))
    ends = [start + 1000 * (len(places) + 1) for start in starts]
    shown = tracing.table([tracing.Sent(EMBED, closed_loop.Timings(starts, ends))], tmp_path)
    values = [line.split("|")[2].strip() for line in shown.splitlines()[2:]]
    assert values == [*["1"] * (len(places) + 1), *[str(len(places) + 1)] * 2]


def test_what_failed_is_named_and_has_no_figures():
    good = Outcome(EMBED, Figures.of(EMBED, Run([1.0, 2.0, 3.0], 10.0)), 0.9999)
    bad = Outcome(SCORE, reason="RequestFailed: 500")
    text = markdown([ServerResult("ours", [good, bad])], {"model": "m"}, peers=False)
    assert "| T1 2 x 8, ours |   2.00 | 3.00 | 3.00 | 3.00 |       10.0 |     20.0 |   0.99990 |" in text
    assert "* ours, T2 2 x 8: RequestFailed: 500" in text


def test_the_whole_harness_around_a_fake_engine(tmp_path, capsys):
    arguments = ["--fake", "--quick", "--seconds", "0.1", "--tables", "T1,T2", "--out", str(tmp_path)]
    assert tables.main(arguments) == 0
    found = json.loads((tmp_path / "tables.json").read_text())
    cells = {(s["name"], c["name"]): c for s in found["servers"] for c in s["cells"]}
    assert {name for name, _ in cells} == {"echo", "fake"}
    assert {cell for _, cell in cells} == {
        "T1 1 x 128",
        *(f"T2 {n} x 128" for n in (5, 25, 50)),
    }
    assert all(c["figures"]["requests"] > 0 for c in cells.values())
    assert all(c["agreement"] > 0.999 for (name, _), c in cells.items() if name == "fake")
    assert (tmp_path / "tables.png").stat().st_size > 0
    assert "Times the echo server's median" in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_cut_keeps_what_it_has_and_leaves_nothing_behind(tmp_path, number):
    """As `timeout` and Ctrl-C do it: the signal goes to the whole group, SIGTERM twice."""
    arguments = ["--fake", "--quick", "--seconds", "0.2", "--tables", "T1,T3", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.tables", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    with process:
        output = []
        for line in process.stdout:
            output.append(line)
            if "p50" in line:
                break
        family = descendants(process.pid)
        os.killpg(process.pid, number)
        if number == signal.SIGTERM:
            os.killpg(process.pid, number)
        output.append(process.communicate(timeout=60)[0])
    assert process.returncode == 128 + number
    assert len(family) > 5  # four clients and a server
    assert not any(command_line(pid) for pid in family)
    said = "".join(output)
    assert f"cut by {number.name}" in said
    assert "Traceback" not in said
    written = (tmp_path / "tables.md").read_text()
    assert f"cut: by {number.name}" in written
    assert "T1 1 x 128, echo |" in written
    assert "* fake, T1 1 x 128: cut" in written


def test_a_peer_is_started_by_its_own_interpreter(tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    args = tables._parse(["--folder", str(tmp_path), "--python", f"infinity={python}"])
    assert args.python == {"infinity": str(python)}
    launch = Launch(tmp_path, 256, "cpu", args.python["infinity"])
    assert ADAPTERS["infinity"].command(launch)[:2] == [str(python), "-m"]


@pytest.mark.parametrize("given", ["tei={python}", "nobody={python}", "infinity=/nowhere/python", "infinity"])
def test_an_interpreter_for_nobody_is_refused(tmp_path, given, capsys):
    with pytest.raises(SystemExit):
        tables._parse(["--folder", str(tmp_path), "--python", given.format(python=sys.executable)])
    assert "--python" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", [name for name, adapter in ADAPTERS.items() if adapter.command])
def test_servers_listen_on_loopback_and_take_flags(tmp_path, name, device):
    command = ADAPTERS[name].command(Launch(tmp_path, 256, device, extra=["--more"], port=1234))
    assert command[0] == sys.executable
    assert "1234" in command
    if name in ("vllm", "infinity"):  # whose default are all interfaces
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert command[command.index("--dtype") + 1] == ("float32" if device == "cpu" else "bfloat16")
    assert name == "echo" or command[-1] == "--more"


def test_a_server_that_does_not_start_says_why(tmp_path):
    broken = Adapter("broken", OURS, lambda launch: [launch.python, "-c", "raise SystemExit('no luck')"])
    with (
        pytest.raises(ServerFailed, match="no luck"),
        running(broken, Launch(tmp_path, 8, "cpu"), tmp_path / "log"),
    ):
        pass
    nowhere = Launch(tmp_path, 8, "cpu", python=str(tmp_path / "python"))
    with pytest.raises(ServerFailed, match="No such file"), running(broken, nowhere, tmp_path / "log"):
        pass


def test_tei_is_asked_in_its_own_words():
    text = Cell("T4", 1, 8, text=True)
    assert json.loads(TEI_NATIVE.body(text, "m", ["a cat"])) == {"inputs": "a cat"}
    np.testing.assert_array_equal(TEI_NATIVE.rows(text, b"[[1, 2]]"), [[1, 2]])
    assert json.loads(TEI.body(text, "m", ["a cat"])) == {
        "model": "m", "input": "a cat", "encoding_format": "base64",
    }  # fmt: skip
    assert "decodes" in TEI.refusal(EMBED)
    assert "no route" in TEI.refusal(SCORE)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
    ],
)
def test_the_reference_pools_as_the_folder_says(tmp_path, settings, pooling):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert reference._pooling(tmp_path) == pooling


def test_a_pooling_that_the_reference_lacks_is_named(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_max_tokens"):
        reference._pooling(tmp_path)
