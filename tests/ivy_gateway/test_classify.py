"""Scores of one label and of several: shapes, order, activation, and who is asked in vain."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from ivy_gateway.errors import UnsupportedTask
from ivy_gateway.jobs import ClassifyJob, ScoreJob, TokenIds
from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip

IDS = TokenIds(np.array([101, 7, 8, 102], np.int32))


def label_row(token_ids: np.ndarray) -> np.ndarray:
    return np.array([len(token_ids), token_ids.sum() % 7, 1], np.float32) / 3


def job(*inputs, **changes) -> ClassifyJob:
    deadline = asyncio.get_running_loop().time() + 20
    return ClassifyJob(inputs, "inputs", deadline, **changes)


@pytest.fixture
def classifier() -> FakeTulip:
    tulip = FakeTulip(task=pb.TASK_SCORE, dimensions=3)
    tulip.row = label_row
    return tulip


async def test_texts_pairs_and_ids_come_back_in_order(start_gateway, classifier):
    async with start_gateway(classifier) as gateway:
        inputs = ("tea", ("tea", "a cup"), IDS, "a longer text", ("x", "y"))
        together = await gateway.pipeline.classify(job(*inputs))
        assert together.scores.shape == together.logits.shape == (5, 3)
        for i, item in enumerate(inputs):
            alone = await gateway.pipeline.classify(job(item))
            np.testing.assert_array_equal(alone.logits[0], together.logits[i])
        np.testing.assert_array_equal(together.logits[2], label_row(IDS.token_ids))
        pairs = await gateway.pipeline.classify(job(("tea", "a cup"), raw_scores=True))
        np.testing.assert_array_equal(pairs.scores, pairs.logits)


async def test_labels_exclude_each_other_under_softmax(start_gateway, classifier):
    async with start_gateway(classifier) as gateway:
        gateway.pipeline.profile = dataclasses.replace(gateway.pipeline.profile, score_activation="softmax")
        result = await gateway.pipeline.classify(job("tea", "coffee"))
        np.testing.assert_allclose(result.scores.sum(axis=1), 1, atol=1e-6)
        np.testing.assert_array_equal(result.scores.argmax(axis=1), result.logits.argmax(axis=1))


async def test_scores_that_saturate_keep_their_order_in_the_logits(start_gateway):
    tulip = FakeTulip(task=pb.TASK_SCORE, dimensions=1)
    tulip.row = lambda ids: np.array([30 + len(ids) / 10], np.float32)
    async with start_gateway(tulip) as gateway:
        documents = ["water " * n for n in (5, 1, 9, 3)]
        deadline = asyncio.get_running_loop().time() + 20
        pairs = tuple(("boiling point", document) for document in documents)
        result = await gateway.pipeline.score(ScoreJob(pairs, (), ("query", "documents"), deadline))
        assert set(result.scores) == {np.float32(1)}
        assert np.argsort(result.logits).tolist() == [1, 3, 0, 2]
        assert result.logits.dtype == np.float32


async def test_a_model_that_embeds_classifies_nothing(start_gateway):
    async with start_gateway() as gateway:
        with pytest.raises(UnsupportedTask, match="not a classifier"):
            await gateway.pipeline.classify(job("tea"))


async def test_several_labels_are_no_score(start_gateway, classifier):
    async with start_gateway(classifier) as gateway:
        reply = await gateway.post("/score", query="tea", documents=["cup"])
        assert reply.status_code == 400
        assert "3 labels" in reply.json()["error"]["message"]
