"""All that crosses between organisations: protos, errors, manifest, frames, the job file.

Nothing here loads torch, except `atoll.wire.tensors`, which a process without tensors never imports.
"""
