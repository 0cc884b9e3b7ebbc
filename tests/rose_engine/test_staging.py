"""The ring of slots: what a step uploads, when its rows are there, and when its slot is used again."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from rose_engine.arrival import Arrival, EventWatcher
from rose_engine.errors import DeviceLost
from rose_engine.staging import PaddedShape, Stager
from tests.rose_engine.fake_device import FakeDevice, FakeEvent, batch_of


@pytest.fixture
def device():
    return FakeDevice(manual=True)


@pytest.fixture
def stager(device):
    stager = Stager(device, max_tokens=512, max_sequences=16, slots=2)
    yield stager
    for event in device.events:
        event.gate.set()
    stager.close()


def test_upload_packs_a_batch_and_fills_the_rest(stager):
    batch = batch_of(3, 60, 2, segments=True)
    staged = stager.upload(batch, PaddedShape(6, 128, 128))
    inputs = staged.inputs
    np.testing.assert_array_equal(inputs.token_ids_T[:65], batch.token_ids_T)
    np.testing.assert_array_equal(inputs.position_ids_T[:65], batch.position_ids_T)
    np.testing.assert_array_equal(inputs.segment_ids_T[:65], batch.segment_ids_T)
    for spare_T in (inputs.token_ids_T[65:], inputs.position_ids_T[65:], inputs.segment_ids_T[65:]):
        assert len(spare_T) == 63
        assert not spare_T.any()
    assert inputs.layout.cu_lengths.tolist() == [0, 3, 63, 65, 65, 65, 128]
    assert staged.cu_lengths.tolist() == [0, 3, 63, 65, 65, 65, 128]
    assert inputs.layout.lengths is None
    assert staged.eager_inputs().layout.lengths == (3, 60, 2, 0, 0, 63)


def test_a_full_shape_has_nothing_spare(stager):
    staged = stager.upload(batch_of(64, 64), PaddedShape(2, 128, 64))
    assert staged.inputs.layout.cu_lengths.tolist() == [0, 64, 128]
    assert staged.eager_inputs().layout.lengths == (64, 64)
    assert not staged.inputs.segment_ids_T.any()


def test_spare_sequences_without_spare_tokens_are_empty(stager):
    staged = stager.upload(batch_of(60, 4), PaddedShape(4, 64, 64))
    assert staged.inputs.layout.cu_lengths.tolist() == [0, 60, 64, 64, 64]
    assert staged.eager_inputs().layout.lengths == (60, 4, 0, 0)


def test_a_slot_keeps_nothing_of_the_batch_before(device):
    device.manual = False
    stager = Stager(device, 512, 16, slots=1)
    for lengths, shape in (
        ((60, 4), (2, 64, 64)),
        ((5,), (2, 64, 64)),
        ((64,), (1, 64, 64)),
        ((3,), (4, 64, 64)),
    ):
        batch = batch_of(*lengths, segments=True)
        staged = stager.upload(batch, PaddedShape(*shape))
        real = batch.num_tokens
        for values_T, expected_T in (
            (staged.inputs.token_ids_T, batch.token_ids_T),
            (staged.inputs.position_ids_T, batch.position_ids_T),
            (staged.inputs.segment_ids_T, batch.segment_ids_T),
        ):
            np.testing.assert_array_equal(values_T[:real], expected_T)
            assert not values_T[real:].any()
        assert staged.inputs.layout.cu_lengths[0] == 0
        assert staged.inputs.layout.cu_lengths[-1] == 64
        stager.abandon(staged)
    stager.close()


def test_a_slot_takes_any_number_of_rows_again(device):
    device.manual = False
    stager = Stager(device, 64, 4, slots=1)
    shape = PaddedShape(3, 64, 64)
    for number in (1, 2, 1, 2):
        rows = torch.randn(number + 1, 3)  # one of a spare sequence
        arrival = stager.download(stager.upload(batch_of(*[5] * number), shape), rows)
        np.testing.assert_array_equal(arrival.collect(), rows[:number])
    stager.close()


def test_equal_shapes_read_the_same_memory(stager):
    shape = PaddedShape(2, 64, 64)
    first = stager.upload(batch_of(5), shape).inputs
    second = stager.upload(batch_of(7), shape).inputs
    assert first.token_ids_T.data_ptr() == second.token_ids_T.data_ptr()
    assert first.layout.cu_lengths.data_ptr() == second.layout.cu_lengths.data_ptr()


def test_rows_arrive_with_their_event(stager, device):
    staged = stager.upload(batch_of(5, 6), PaddedShape(3, 64, 64))
    arrival = stager.download(staged, torch.arange(6.0).view(3, 2))
    assert not arrival.query()
    device.events[-1].gate.set()
    assert arrival.query()
    np.testing.assert_array_equal(arrival.collect(), [[0, 1], [2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_rows_keep_their_dtype_and_outlive_the_slot(device, dtype):
    device.manual = False
    stager = Stager(device, 64, 4, slots=1)
    shape = PaddedShape(2, 64, 64)
    first = stager.download(stager.upload(batch_of(5), shape), torch.ones(2, 3, dtype=dtype))
    second = stager.download(stager.upload(batch_of(6), shape), torch.zeros(2, 3, dtype=dtype))
    assert first.collect().dtype == torch.empty(0, dtype=dtype).numpy().dtype
    assert (first.collect() == 1).all()
    assert (second.collect() == 0).all()
    stager.close()


def test_a_slot_is_used_again_only_after_its_event(stager, device):
    shape = PaddedShape(2, 64, 64)
    for _ in range(2):
        stager.download(stager.upload(batch_of(5), shape), torch.zeros(2, 3))
    uploaded = threading.Event()

    def third() -> None:
        stager.upload(batch_of(9), shape)
        uploaded.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert device.events[0].waited.wait(10)
    assert not uploaded.is_set()
    device.events[0].gate.set()
    assert uploaded.wait(10)
    thread.join()


def test_a_failed_step_keeps_its_slot_until_its_upload_is_over(stager, device):
    shape = PaddedShape(2, 64, 64)
    stager.abandon(stager.upload(batch_of(5), shape))
    stager.upload(batch_of(5), shape)
    thread = threading.Thread(target=stager.upload, args=(batch_of(5), shape))
    thread.start()
    assert device.events[0].waited.wait(10)
    device.events[0].gate.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_handle_nobody_asks_holds_nothing_up(device):
    device.manual = False
    stager = Stager(device, 64, 4, slots=1)
    for length in range(1, 20):
        stager.download(stager.upload(batch_of(length), PaddedShape(2, 64, 64)), torch.zeros(2, 3))
    gc.collect()
    assert len(device.events) == 19
    stager.close()


def test_callbacks_come_in_order_from_one_thread():
    watcher = EventWatcher()
    events = [FakeEvent(passed=False) for _ in range(3)]
    calls: list[tuple[int, str]] = []
    last = threading.Event()
    for index, event in enumerate(events):
        arrival = Arrival(event, np.zeros((1, 1), np.float32), watcher)
        arrival.add_done_callback(lambda i=index: calls.append((i, threading.current_thread().name)))
    Arrival(events[-1], None, watcher).add_done_callback(last.set)
    for event in reversed(events):
        event.gate.set()
    assert last.wait(10)
    assert [index for index, _ in calls] == [0, 1, 2]
    assert {name for _, name in calls} == {"rose-events"}
    watcher.close()


def test_a_callback_on_rows_that_are_here_is_called_at_once():
    calls = []
    Arrival(FakeEvent(passed=True), None, EventWatcher()).add_done_callback(lambda: calls.append(1))
    assert calls == [1]


def test_a_raising_callback_does_not_silence_the_next(caplog):
    watcher = EventWatcher()
    event, done = FakeEvent(passed=False), threading.Event()
    arrival = Arrival(event, None, watcher)
    arrival.add_done_callback(lambda: 1 / 0)
    arrival.add_done_callback(done.set)
    event.gate.set()
    assert done.wait(10)
    watcher.close()
    assert "ZeroDivisionError" in caplog.text


def test_a_failed_event_ends_the_wait_and_loses_the_device():
    event = FakeEvent(passed=False)
    arrival = Arrival(event, np.zeros((1, 1), np.float32), EventWatcher())
    event.fail("CUDA error: an illegal memory access was encountered")
    assert arrival.query()
    for _ in range(2):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            arrival.collect()
