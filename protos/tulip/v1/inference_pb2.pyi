from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_INTERACTIVE: _ClassVar[Lane]
    LANE_BULK: _ClassVar[Lane]

class Output(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_OWN: _ClassVar[Output]
    OUTPUT_INT8: _ClassVar[Output]
    OUTPUT_BITS: _ClassVar[Output]
    OUTPUT_TOKENS: _ClassVar[Output]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]
DTYPE_UNSPECIFIED: DType
DTYPE_INT32: DType
DTYPE_FLOAT32: DType
DTYPE_INT8: DType
DTYPE_UINT8: DType
LANE_INTERACTIVE: Lane
LANE_BULK: Lane
OUTPUT_OWN: Output
OUTPUT_INT8: Output
OUTPUT_BITS: Output
OUTPUT_TOKENS: Output
TASK_UNSPECIFIED: Task
TASK_EMBED: Task
TASK_SCORE: Task

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class InferRequest(_message.Message):
    __slots__ = ("token_ids", "lengths", "segment_ids", "timeout_us", "output", "spans", "span_counts", "lane", "request_id", "traceparent")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    token_ids: Tensor
    lengths: Tensor
    segment_ids: Tensor
    timeout_us: int
    output: Output
    spans: Tensor
    span_counts: Tensor
    lane: Lane
    request_id: str
    traceparent: str
    def __init__(self, token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., lengths: _Optional[_Union[Tensor, _Mapping]] = ..., segment_ids: _Optional[_Union[Tensor, _Mapping]] = ..., timeout_us: _Optional[int] = ..., output: _Optional[_Union[Output, str]] = ..., spans: _Optional[_Union[Tensor, _Mapping]] = ..., span_counts: _Optional[_Union[Tensor, _Mapping]] = ..., lane: _Optional[_Union[Lane, str]] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class InferReply(_message.Message):
    __slots__ = ("rows", "timings")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    rows: Tensor
    timings: Timings
    def __init__(self, rows: _Optional[_Union[Tensor, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_us", "compute_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...

class RequestFrame(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[StreamRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[StreamRequest, _Mapping]]] = ...) -> None: ...

class ReplyFrame(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[StreamReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[StreamReply, _Mapping]]] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("correlation_id", "infer", "cancel")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    INFER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    infer: InferRequest
    cancel: Cancel
    def __init__(self, correlation_id: _Optional[int] = ..., infer: _Optional[_Union[InferRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamReply(_message.Message):
    __slots__ = ("correlation_id", "reply", "failure", "heartbeat")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    reply: InferReply
    failure: Failure
    heartbeat: Heartbeat
    def __init__(self, correlation_id: _Optional[int] = ..., reply: _Optional[_Union[InferReply, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("waiting_tokens", "oldest_step_us", "wedged", "draining")
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_US_FIELD_NUMBER: _ClassVar[int]
    WEDGED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    waiting_tokens: int
    oldest_step_us: int
    wedged: bool
    draining: bool
    def __init__(self, waiting_tokens: _Optional[int] = ..., oldest_step_us: _Optional[int] = ..., wedged: _Optional[bool] = ..., draining: _Optional[bool] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "sequence_index")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    sequence_index: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., sequence_index: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("model_id", "server_version", "task", "dimensions", "row_dtype", "pooling", "normalized", "max_length", "vocabulary_size", "num_segments", "max_batch_tokens", "max_batch_sequences", "max_waiting_tokens", "reserved_tokens", "dtype", "device", "attention_backend", "tokenizer_hash", "weights_hash", "outputs", "reference_cosine", "hidden_size")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COSINE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    server_version: str
    task: Task
    dimensions: int
    row_dtype: DType
    pooling: str
    normalized: bool
    max_length: int
    vocabulary_size: int
    num_segments: int
    max_batch_tokens: int
    max_batch_sequences: int
    max_waiting_tokens: int
    reserved_tokens: int
    dtype: str
    device: str
    attention_backend: str
    tokenizer_hash: str
    weights_hash: str
    outputs: _containers.RepeatedScalarFieldContainer[Output]
    reference_cosine: float
    hidden_size: int
    def __init__(self, model_id: _Optional[str] = ..., server_version: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., dimensions: _Optional[int] = ..., row_dtype: _Optional[_Union[DType, str]] = ..., pooling: _Optional[str] = ..., normalized: _Optional[bool] = ..., max_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., num_segments: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_batch_sequences: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., attention_backend: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., weights_hash: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[Output, str]]] = ..., reference_cosine: _Optional[float] = ..., hidden_size: _Optional[int] = ...) -> None: ...
