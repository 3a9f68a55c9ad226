"""Mooncake's return codes as exceptions. Its Python client raises nothing: every call returns a code below 0 for failure."""

from collections.abc import Mapping

from dspark_lab.store.mooncake_admin import MasterUnreachableError
from dspark_lab.store.protocol import CorruptSampleError, MissingSampleError, NoRoomError


class MooncakeError(RuntimeError):
    """A failure of Mooncake that has no narrower class."""


class NotPublishedError(MissingSampleError):
    """The object is being written."""


class LeaseExpiredError(MooncakeError):
    """The transfer took longer than the reader's lease, so the bytes may be another object's."""


class LeasedError(MooncakeError):
    """The object is being read."""


class TransferError(MooncakeError):
    """The bytes could not be moved between this process and the segment that holds them."""


class WrongUseError(MooncakeError):
    """A call that Mooncake refuses."""


OBJECT_NOT_FOUND = -704

CODES: Mapping[int, tuple[str, type[Exception], str]] = {
    -10: ("BUFFER_OVERFLOW", WrongUseError, "The buffer is smaller than the object: report this."),
    -101: ("SEGMENT_NOT_FOUND", NoRoomError, "No process contributes memory: start a segment (mooncake_client)."),
    -102: ("SEGMENT_ALREADY_EXISTS", WrongUseError, "Give each process its own store.local_hostname and port."),
    -103: ("CLIENT_NOT_FOUND", MasterUnreachableError, "The master was restarted and has lost what it knew: run again."),
    -200: ("NO_AVAILABLE_HANDLE", NoRoomError,
           "The segments are full of samples in use: delete what was used, or give the segments more memory."),
    -400: ("INVALID_KEY", WrongUseError, "Mooncake refuses this key."),
    -500: ("WRITE_FAIL", TransferError, "The process that holds the segment may have died: put it again."),
    -600: ("INVALID_PARAMS", WrongUseError, "A buffer is not registered or too small: report this."),
    -601: ("ILLEGAL_CLIENT", WrongUseError, "Another process is writing this object: one writer for each key."),
    -700: ("INVALID_WRITE", WrongUseError, "The object was removed while it was written: one owner for each key."),
    -701: ("INVALID_READ", TransferError, "Read it again."),
    -702: ("INVALID_REPLICA", TransferError, "The memory that held it is gone: capture the sample again."),
    -703: ("REPLICA_IS_NOT_READY", NotPublishedError, "It is being written: wait, then read it again."),
    OBJECT_NOT_FOUND: ("OBJECT_NOT_FOUND", MissingSampleError, "Capture it first."),
    -705: ("OBJECT_ALREADY_EXISTS", WrongUseError, "Equal keys mean equal content: put it once."),
    -706: ("OBJECT_HAS_LEASE", LeasedError, "A reader holds it: wait for its lease to end."),
    -707: ("LEASE_EXPIRED", LeaseExpiredError,
           "Give the master a longer -default_kv_lease_ttl, or lower store.part_bytes so that one object takes less time."),
    -708: ("OBJECT_HAS_REPLICATION_TASK", LeasedError, "It is being copied: wait."),
    -710: ("REPLICA_NOT_FOUND", MissingSampleError, "The memory that held it is gone: capture the sample again."),
    -712: ("REPLICA_IS_GONE", MissingSampleError, "The memory that held it is gone: capture the sample again."),
    -714: ("OBJECT_REPLICA_BUSY", LeasedError, "It is being read or copied: wait."),
    -800: ("TRANSFER_FAIL", TransferError,
           "The process that holds the segment may have died, or its port is not reachable from here "
           "(store.local_hostname, firewall, memlock limit with rdma)."),
    -801: ("CHECKSUM_MISMATCH", CorruptSampleError, "delete(key), then capture it again."),
    -900: ("RPC_FAIL", MasterUnreachableError, "Does mooncake_master run at store.master_address? Its log tells more."),
    -901: ("RPC_TIMEOUT", MasterUnreachableError, "The master is overloaded or cut off: see its log."),
    -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", MasterUnreachableError, "The master is not serving yet: wait."),
    -1011: ("UNAVAILABLE_IN_CURRENT_MODE", WrongUseError, "Start the master without high availability."),
    -1700: ("TENANT_QUOTA_EXCEEDED", NoRoomError, "Raise the tenant's quota at the master."),
}  # fmt: skip
UNKNOWN = ("unknown code", MooncakeError, "See the codes of the installed Mooncake (ErrorCode in types.h).")


def error_of(code: int, what: str) -> Exception:
    """The exception for a negative ``code`` of the action ``what``, e.g. "get of sample 'k'"."""
    name, kind, mend = CODES.get(code, UNKNOWN)
    return kind(f"{what} failed: Mooncake returned {code} ({name}). {mend}")
