from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolmentToken(_message.Message):
    __slots__ = ("federation", "name", "role", "address", "enrolment_address", "secret", "federation_fingerprint", "ca_certificate", "expires_at_unix_s")
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CA_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    federation: str
    name: str
    role: str
    address: str
    enrolment_address: str
    secret: bytes
    federation_fingerprint: bytes
    ca_certificate: bytes
    expires_at_unix_s: int
    def __init__(self, federation: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., enrolment_address: _Optional[str] = ..., secret: _Optional[bytes] = ..., federation_fingerprint: _Optional[bytes] = ..., ca_certificate: _Optional[bytes] = ..., expires_at_unix_s: _Optional[int] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("name", "secret", "csr", "signing_key", "signing_key_proof")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CSR_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_PROOF_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: bytes
    csr: bytes
    signing_key: bytes
    signing_key_proof: bytes
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[bytes] = ..., csr: _Optional[bytes] = ..., signing_key: _Optional[bytes] = ..., signing_key_proof: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate", "ca_certificate", "federation_public_key", "organisation")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CA_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ORGANISATION_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    ca_certificate: bytes
    federation_public_key: bytes
    organisation: str
    def __init__(self, certificate: _Optional[bytes] = ..., ca_certificate: _Optional[bytes] = ..., federation_public_key: _Optional[bytes] = ..., organisation: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr",)
    CSR_FIELD_NUMBER: _ClassVar[int]
    csr: bytes
    def __init__(self, csr: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate", "ca_certificate")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CA_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    ca_certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., ca_certificate: _Optional[bytes] = ...) -> None: ...
