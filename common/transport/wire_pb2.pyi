from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "name", "layout_digest", "session", "image_id", "task", "tasks", "bundle", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    name: str
    layout_digest: str
    session: bytes
    image_id: str
    task: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    bundle: str
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., layout_digest: _Optional[str] = ..., session: _Optional[bytes] = ..., image_id: _Optional[str] = ..., task: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., bundle: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("message_id", "head_json", "num_bytes", "sha256")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    head_json: str
    num_bytes: int
    sha256: bytes
    def __init__(self, message_id: _Optional[str] = ..., head_json: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("transfer_id", "offset", "data")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    offset: int
    data: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("message_id", "code", "text", "layout", "remedy")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    code: str
    text: str
    layout: str
    remedy: str
    def __init__(self, message_id: _Optional[str] = ..., code: _Optional[str] = ..., text: _Optional[str] = ..., layout: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("signing_request",)
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    signing_request: bytes
    def __init__(self, signing_request: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("message_id", "num_steps")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    num_steps: int
    def __init__(self, message_id: _Optional[str] = ..., num_steps: _Optional[int] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("hello", "reply", "chunk", "fault", "leave", "renewal", "progress")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reply: Reply
    chunk: Chunk
    fault: Fault
    leave: Leave
    renewal: Renewal
    progress: Progress
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., renewal: _Optional[_Union[Renewal, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "session", "run_id", "has_displaced", "term", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_DISPLACED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    session: bytes
    run_id: int
    has_displaced: bool
    term: int
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., session: _Optional[bytes] = ..., run_id: _Optional[int] = ..., has_displaced: _Optional[bool] = ..., term: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Instruction(_message.Message):
    __slots__ = ("message_id", "message_type", "head_json", "image_id", "frozen_id", "beside")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    HEAD_JSON_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FROZEN_ID_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    message_type: str
    head_json: str
    image_id: str
    frozen_id: str
    beside: bytes
    def __init__(self, message_id: _Optional[str] = ..., message_type: _Optional[str] = ..., head_json: _Optional[str] = ..., image_id: _Optional[str] = ..., frozen_id: _Optional[str] = ..., beside: _Optional[bytes] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("image_id", "num_bytes", "sha256", "is_frozen", "difference", "base_id")
    IMAGE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    IS_FROZEN_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    image_id: str
    num_bytes: int
    sha256: bytes
    is_frozen: bool
    difference: str
    base_id: str
    def __init__(self, image_id: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., is_frozen: _Optional[bool] = ..., difference: _Optional[str] = ..., base_id: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("message_id", "next_offset", "is_done")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    next_offset: int
    is_done: bool
    def __init__(self, message_id: _Optional[str] = ..., next_offset: _Optional[int] = ..., is_done: _Optional[bool] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("pem", "refusal")
    PEM_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    pem: bytes
    refusal: str
    def __init__(self, pem: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OtherTask(_message.Message):
    __slots__ = ("name", "bundle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bundle: bytes
    def __init__(self, name: _Optional[str] = ..., bundle: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("is_paused", "is_watched")
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_WATCHED_FIELD_NUMBER: _ClassVar[int]
    is_paused: bool
    is_watched: bool
    def __init__(self, is_paused: _Optional[bool] = ..., is_watched: _Optional[bool] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("welcome", "instruction", "image", "chunk", "receipt", "fault", "goodbye", "certificate", "other_task", "notice", "small_image")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    OTHER_TASK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    SMALL_IMAGE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    instruction: Instruction
    image: Image
    chunk: Chunk
    receipt: Receipt
    fault: Fault
    goodbye: Goodbye
    certificate: Certificate
    other_task: OtherTask
    notice: Notice
    small_image: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., instruction: _Optional[_Union[Instruction, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., other_task: _Optional[_Union[OtherTask, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., small_image: _Optional[bytes] = ...) -> None: ...
