"""The servicer that answers from the first moment on: a word that the engine still loads, later the service.

gRPC takes servicers only before a server starts, and the server starts before there is anything to serve.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceServicer
from tulip_server.service import InferenceService

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class Gate(InferenceServicer):
    """`tulip.v1.Inference`: UNAVAILABLE until `open`, then whatever the service says."""

    def __init__(self) -> None:
        self._service: InferenceService | None = None

    def open(self, service: InferenceService) -> None:
        """Let calls through from now on."""
        self._service = service

    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferReply:
        """One chunk."""
        return await (await self._opened(context)).Infer(request, context)

    async def InferStream(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RequestFrame], context: Context
    ) -> None:
        """Chunks by correlation id."""
        await (await self._opened(context)).InferStream(request_iterator, context)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        """The model and the limits of this replica."""
        return await (await self._opened(context)).Describe(request, context)

    async def _opened(self, context: Context) -> InferenceService:
        if self._service is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading: the engine is not ready yet")
        assert self._service is not None
        return self._service
