"""Golden bytes: what an older peer wrote is read for ever, and the same values are written as the same bytes.

`python tests/wire/test_golden.py` writes the files that are missing. A file that is there never changes: a new field
gets a new sample, and a change of these bytes is a new version of the protocol.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.layout import update_layout
from atoll.wire import (
    admin_pb2,
    control_pb2,
    enrolment_pb2,
    errors_pb2,
    gossip_pb2,
    members_pb2,
    runs_pb2,
    secure_pb2,
    transfer_pb2,
)
from atoll.wire.frames import decode_frame, encode_frame
from atoll.wire.frozen import FrozenTensor
from atoll.wire.job import decode_job
from atoll.wire.manifest import DTYPE_BYTES, Entry, Manifest
from atoll.wire.model_file import create, open_model
from atoll.wire.payload_list import MAGIC, payloads_in, prefix_of

FOLDER = Path(__file__).parents[1] / "golden"
RUN = "01JDQ3T4V8Z6K1M2N3P4Q5R6S7"
KEY = control_pb2.TaskKey(run=RUN, task="train-12-site-3", attempt=2)
GRANT = control_pb2.Grant(
    grant="b3BhcXVl", direction=control_pb2.UP, key=KEY, payload="update", offset=4096, num_bytes=1 << 20,
    crc32=0xDEADBEEF, min_bytes_per_s=65536,
)  # fmt: skip
ERROR = errors_pb2.ErrorDetail(
    kind="BadUpdate", message='tensor "conv1.weight" is 2048, bound 1024', site="site-3", run=RUN, round=12,
    field="conv1.weight", value="2048", bound="1024",
)  # fmt: skip
METRICS = {"loss": control_pb2.MetricSum(sum=1.5, count=4.0)}
MEMBERS = members_pb2.MemberList(
    federation="reef", version=3, signed_at_unix_s=1_764_460_800,
    members=[
        members_pb2.Member(site="site-1", organisation="Org A", signing_key=bytes(range(32)), status=members_pb2.ACTIVE),
        members_pb2.Member(site="site-2", organisation="Org B", signing_key=bytes(32), status=members_pb2.REVOKED),
    ],
)  # fmt: skip
SIGNED = members_pb2.SignedMemberList(member_list=MEMBERS.SerializeToString(), signature=bytes(64))
JOB = (
    b'{"app":{"lr":0.05},"evaluation":{"every":1,"server":false,"sites":true},"job":{"app":"fashion","name":"fashion",'
    b'"rounds":20,"seed":0,"sites":[],"wait_for_sites":600.0},"strategy":{"buffers":"mean","kind":"fedavg","sum":'
    b'{"bound":1024.0},"work":{"batch_size":32,"full_batch":false}},"training":{"deterministic":true,"device":"auto"}}'
)
JOB_SECURE = (
    b'{"app":{},"evaluation":{"every":1,"server":false,"sites":true},"job":{"app":"ward","name":"masked","rounds":1,'
    b'"seed":0,"sites":[],"wait_for_sites":600.0},"privacy":{"secure_aggregation":{"attempts":3,"bits":32,"bound":8.0,'
    b'"clipped":0.0,"corrupt":0.1,"deadline":120.0,"fewest_survivors":5,"metrics":["loss"],"threat":"active"}},'
    b'"strategy":{"buffers":"mean","kind":"fedavg","sum":{"bound":1024.0},"work":{"batch_size":32,"full_batch":false}},'
    b'"training":{"deterministic":true,"device":"auto"}}'
)
JOB_STATISTICS = (
    b'{"app":{},"evaluation":{"every":1,"server":false,"sites":true},"job":{"app":"ward","name":"ages","rounds":1,'
    b'"seed":0,"sites":[],"wait_for_sites":600.0},"statistics":{"by_site":false,"features":["age"],"histograms":{"age":'
    b'{"bins":64,"edges":[0.0,50.0,100.0]}},"min_cell_count":20,"quantiles":[0.5]},"strategy":{"buffers":"mean","kind":'
    b'"fedavg","sum":{"bound":1024.0},"work":{"batch_size":32,"full_batch":false}},"training":{"deterministic":true,'
    b'"device":"auto"}}'
)
NOTES = [b"one", b"", b"three"]
PARAMETERS: list[Entry] = [(f"layer.{name}", name, (2, 3), "parameter") for name in DTYPE_BYTES]
BUFFERS: list[Entry] = [("bn.num_batches_tracked", "int64", (), "buffer"), ("empty", "float32", (0, 4), "buffer")]
MANIFEST = Manifest.build(PARAMETERS + BUFFERS)
CONTROLLED = Manifest.build([*PARAMETERS[:2], ("lane/layer.float32", "float32", (2, 3), "control")])
FROZEN = Manifest.build(BUFFERS, [FrozenTensor(name=f"base.{n}", sha256=bytes(range(n, n + 32))) for n in (1, 2)])
SCHEMA_HASH = "bd4515ce7d09876c8df7df59ac7d2bbfb7533bccccc4e4dbbba9c653ce63d54a"

CARD = gossip_pb2.Card(
    federation="reef", site="site-2", zone="reef", address="node-2.example.org:7445", certificate=b"DER",
    client_key=bytes(range(32)),
)  # fmt: skip
SIGNED_CARD = gossip_pb2.PeerCard(card=CARD.SerializeToString(), signature=bytes(64))

# What a site of version 1 says and sends in one round: tests/integration/test_older_peer.py plays it to a real server.
PEER_MODEL = Manifest.build(
    [(name, "float32", shape, "parameter") for name, shape in (("0.weight", (1, 30)), ("0.bias", (1,)), ("2.weight", (2, 1)), ("2.bias", (2,)))]
)  # fmt: skip
PEER_TRAIN = control_pb2.TaskKey(run=RUN, task="r1.site-1", attempt=1)
PEER_EVALUATE = control_pb2.TaskKey(run=RUN, task="e1.site-1", attempt=1)
PEER_UPDATE = (
    update_layout(PEER_MODEL, Native(Native.Options()), "mean").header + (np.arange(35, dtype="<f4") / 64).tobytes()
)
PEER_SPLIT = 100  # bytes of its first frame
SUMMARY = runs_pb2.FeatureSummary(
    name="age", num_sites=3, num_withheld=1, count=600, mean=51.5, variance=2.25, edges=[0.0, 50.0, 100.0],
    least=[0, 100, 300, 0], most=[200, 300, 500, 200],
    quantiles=[runs_pb2.QuantileSummary(q=0.5, value=51.0, lower=50.0)],
)  # fmt: skip

SECURE: dict[str, Any] = {"key": control_pb2.TaskKey(run=RUN, task="r12.site-1", attempt=1), "session": 2}
SECURE_STEPS = [
    control_pb2.SecureStep(**SECURE, plan=secure_pb2.SecurePlan(opening=b"{}", hash=bytes(range(32)))),
    control_pb2.SecureStep(**SECURE, keys=secure_pb2.SecureKeys(advertised=[bytes(220), bytes(range(220))])),
    control_pb2.SecureStep(
        **SECURE, ring=secure_pb2.SecureRing(nonces=[secure_pb2.SecureNonce(site=1, nonce=bytes(range(32)))])
    ),
    control_pb2.SecureStep(**SECURE, shares=secure_pb2.SecureShares(sharing=b"\x1f", items=[b"1", b"2"])),
    control_pb2.SecureStep(**SECURE, survivors=b"\x1f\x0f" + bytes(128)),
    control_pb2.SecureStep(**SECURE, confirmations=secure_pb2.SecureConfirmations(confirmed=[b"1", b"2", b"3"])),
    control_pb2.SecureStep(**SECURE, end=secure_pb2.SecureEnd(version=0, reason="too few sites")),
]
SECURE_ANSWERS = [
    control_pb2.SecureAnswer(**SECURE, advertised=bytes(220)),
    control_pb2.SecureAnswer(**SECURE, ring_nonce=bytes(range(32))),
    control_pb2.SecureAnswer(**SECURE, shared=secure_pb2.SecureShared(items=[b"1", b"2"])),
    control_pb2.SecureAnswer(**SECURE, input=secure_pb2.SecureInput(declared=bytes(156), crc32=0xDEADBEEF)),
    control_pb2.SecureAnswer(**SECURE, confirmation=bytes(156)),
    control_pb2.SecureAnswer(**SECURE, unmasked=bytes(268)),
    control_pb2.SecureAnswer(**SECURE, refused=ERROR),
]

site, server = control_pb2.SiteMessage, control_pb2.ServerMessage
MESSAGES: dict[str, Message] = {
    "error_detail": ERROR,
    "member_list": MEMBERS,
    "signed_member_list": SIGNED,
    "enrolment_token": enrolment_pb2.EnrolmentToken(
        federation="reef", name="site-3", role="site", address="localhost:9400", enrolment_address="localhost:9401",
        secret=bytes(32), federation_fingerprint=bytes(range(32)), ca_certificate=b"DER", expires_at_unix_s=1_764_547_200,
    ),
    "enrol_request": enrolment_pb2.EnrolRequest(
        name="site-3", secret=bytes(32), csr=b"DER", signing_key=bytes(range(32)), signing_key_proof=bytes(64)
    ),
    "enrol_reply": enrolment_pb2.EnrolReply(
        certificate=b"DER", ca_certificate=b"DER", federation_public_key=bytes(range(32)), organisation="Org A"
    ),
    "hello": site(
        hello=control_pb2.Hello(
            protocol_min=1, protocol_max=1, features=["secagg/1"], software="atoll 0.1.0",
            capacity=control_pb2.Capacity(
                runs_at_once=1, num_devices=2, memory_bytes=80 << 30, labels={"zone": "eu-1"}
            ),
            held_updates=[KEY], open_tasks=[KEY], joined_runs=[RUN], member_list_version=3,
        )
    ),
    "welcome": server(
        welcome=control_pb2.Welcome(
            protocol=1, features=["secagg/1"], federation="reef", server_software="atoll 0.1.0", heartbeat_s=15,
            lease_s=45, max_frame_bytes=4 << 20,
        )
    ),
    "heartbeat": site(heartbeat=control_pb2.Heartbeat(member_list_version=3)),
    "run_offer": server(
        run_offer=control_pb2.RunOffer(
            run=RUN, job=JOB, manifest=b"\x08\x01", app_hash="ab" * 32, submitted_by="ada", fewest_sites=3
        )
    ),
    "accept": site(offer_reply=control_pb2.OfferReply(run=RUN, accept=control_pb2.Accept(max_weight=600))),
    "accept_region": site(
        offer_reply=control_pb2.OfferReply(
            run=RUN,
            accept=control_pb2.Accept(max_weight=600, region=control_pb2.Region(num_sites=3, sum_weights=1500)),
        )
    ),
    "decline": site(offer_reply=control_pb2.OfferReply(run=RUN, decline=ERROR)),
    "task": server(
        task=control_pb2.Task(
            key=KEY, kind=control_pb2.TRAIN, round=12, base_version=11, config=b"{}", deadline_s=600
        )
    ),
    "task_sum": server(
        task=control_pb2.Task(
            key=KEY, kind=control_pb2.TRAIN, round=12, base_version=11,
            sum=control_pb2.SumTerms(num_sites=5, max_weight=600),
        )
    ),
    "task_counted": server(
        task=control_pb2.Task(
            key=KEY, kind=control_pb2.TRAIN, round=12, base_version=11,
            sum=control_pb2.SumTerms(num_sites=5, max_weight=600), counted_round=9,
        )
    ),
    "task_statistics": server(task=control_pb2.Task(key=KEY, kind=control_pb2.STATISTICS, round=1)),
    "result_statistics": site(
        result=control_pb2.Result(
            key=KEY, round=1,
            statistics=[
                control_pb2.FeatureStatistics(
                    name="age", count=600, sum=31000.5, sum_low=-0.25, squares=1200.75, stops=[3, 7, 10],
                    counts=[100, 300, 200],
                )
            ],
        )
    ),
    "progress": site(progress=control_pb2.Progress(key=KEY, done=3, total=10)),
    "result": site(
        result=control_pb2.Result(
            key=KEY, round=12, weight=600, metrics=METRICS,
            payloads=[control_pb2.Payload(name="update", num_bytes=1 << 20, crc32=0xDEADBEEF)],
        )
    ),
    "task_failed": site(task_failed=control_pb2.TaskFailed(key=KEY, error=ERROR)),
    "fetch": site(fetch=control_pb2.Fetch(run=RUN, version=11, offset=4096)),
    "leave_run": site(leave_run=control_pb2.LeaveRun(run=RUN, reason=ERROR)),
    "fetch_part": site(
        fetch=control_pb2.Fetch(run=RUN, version=11, offset=4096, first_byte=1 << 20, part_bytes=3 << 20)
    ),
    "grant": server(grant=GRANT),
    "grant_part": server(
        grant=control_pb2.Grant(
            grant="b3BhcXVl", direction=control_pb2.DOWN, key=control_pb2.TaskKey(run=RUN), version=11,
            first_byte=1 << 20, num_bytes=3 << 20, crc32=7, min_bytes_per_s=65536,
        )
    ),
    "grant_withdrawn": server(grant_withdrawn=control_pb2.GrantWithdrawn(grant="b3BhcXVl", reason=ERROR)),
    "verdict_accepted": server(verdict=control_pb2.Verdict(key=KEY, accepted=True)),
    "verdict_refused": server(verdict=control_pb2.Verdict(key=KEY, refused=ERROR)),
    "verdict_released": server(verdict=control_pb2.Verdict(key=KEY, released=True)),
    "committed": server(committed=control_pb2.Committed(run=RUN, round=12, version=12)),
    "cancel_task": server(cancel_task=control_pb2.CancelTask(key=KEY, reason=ERROR)),
    "run_ended": server(run_ended=control_pb2.RunEnded(run=RUN, status="failed", reason=ERROR)),
    "pushed_member_list": server(member_list=SIGNED),
    "drain": server(drain=control_pb2.Drain(reconnect_after_s=5)),
    "submit_request": runs_pb2.SubmitRequest(
        job=JOB, manifest=b"\x08\x01", app_hash="ab" * 32, crc32=0xDEADBEEF, request="01JDQ"
    ),
    "submit_reply": runs_pb2.SubmitReply(run=RUN, upload=GRANT),
    "run_snapshot_continued": runs_pb2.RunSnapshot(
        run=RUN, name="fashion", status="finished", round=12, num_rounds=20, version=12, best_version=11, continues=RUN,
        reason=errors_pb2.ErrorDetail(message="early stop after round 12", run=RUN),
        rounds=[runs_pb2.RoundRecord(round=11, version=11, best=True), runs_pb2.RoundRecord(round=12, version=12)],
    ),
    "model_request_best": runs_pb2.ModelRequest(run=RUN, best=True),
    "model_reply_best": runs_pb2.ModelReply(download=GRANT, manifest=MANIFEST.encode(), version=11, best=True),
    "run_snapshot": runs_pb2.RunSnapshot(
        run=RUN, name="fashion", status="running", reason=ERROR, round=12, num_rounds=20, version=11,
        sites=[runs_pb2.SiteProgress(site="site-3", state="training", done=3, total=10, detail="")],
        rounds=[
            runs_pb2.RoundRecord(
                round=11, version=11, num_sites=3, weight=1800, seconds=2.5, train_metrics=METRICS,
                evaluate_metrics=METRICS, server_metrics=METRICS, missing=["site-9"], bytes_up=3 << 20,
                bytes_down=3 << 20,
            )
        ],
        submitted_by="ada", submitted_at_unix_s=1_764_460_800.5,
    ),
    "round_record_statistics": runs_pb2.RoundRecord(
        round=1, num_sites=3, seconds=1.5, features=[SUMMARY],
        by_site=[runs_pb2.SiteAnswer(site="site-3", features=[SUMMARY], metrics=METRICS)],
    ),
    "add_request": admin_pb2.AddRequest(name="site-3", organisation="Org A", role="site", valid_s=3600),
    "download_request": transfer_pb2.DownloadRequest(grant="b3BhcXVl", offset=4096),
    "version_1/hello": site(
        hello=control_pb2.Hello(
            protocol_min=1, protocol_max=1, software="atoll 0.1.0",
            capacity=control_pb2.Capacity(runs_at_once=1, memory_bytes=16 << 30),
        )
    ),
    "version_1/heartbeat": site(heartbeat=control_pb2.Heartbeat()),
    "version_1/accept": site(offer_reply=control_pb2.OfferReply(run=RUN, accept=control_pb2.Accept(max_weight=600))),
    "version_1/fetch": site(fetch=control_pb2.Fetch(run=RUN)),
    "version_1/download_request": transfer_pb2.DownloadRequest(grant="A" * 24),
    "version_1/progress": site(progress=control_pb2.Progress(key=PEER_TRAIN, done=1, total=2)),
    "version_1/result": site(
        result=control_pb2.Result(
            key=PEER_TRAIN, round=1, weight=339, metrics={"margin": control_pb2.MetricSum(sum=5.0, count=4.0)},
            payloads=[
                control_pb2.Payload(name="update", num_bytes=len(PEER_UPDATE), crc32=zlib.crc32(PEER_UPDATE))
            ],
        )
    ),
    "version_1/evaluated": site(
        result=control_pb2.Result(
            key=PEER_EVALUATE, round=1, metrics={"recall": control_pb2.MetricSum(sum=9.0, count=12.0)}
        )
    ),
    "hello_card": site(
        hello=control_pb2.Hello(
            protocol_min=1, protocol_max=1, capacity=control_pb2.Capacity(runs_at_once=1, labels={"zone": "reef"}),
            card=SIGNED_CARD,
        )
    ),
    "task_mixing": server(
        task=control_pb2.Task(
            key=control_pb2.TaskKey(run=RUN, task="g13.site-1", attempt=1), kind=control_pb2.EXCHANGE, round=13,
            base_version=1,
            mixing=gossip_pb2.Mixing(
                round=12, attempt=1,
                shares=[gossip_pb2.Share(site="site-1", weight=0.75), gossip_pb2.Share(site="site-2", weight=0.25)],
            ),
        )
    ),
    "introduction": server(
        introduction=gossip_pb2.Introduction(
            run=RUN, round=12, peer="site-2", card=SIGNED_CARD, meeting="A" * 24, calls=True, attempt=1, peer_attempt=2,
            num_bytes=1 << 20, crc32=0xDEADBEEF,
        )
    ),
    "introduction_relayed": server(
        introduction=gossip_pb2.Introduction(
            run=RUN, round=12, peer="site-2", card=SIGNED_CARD, meeting="A" * 24, relayed=True, attempt=1,
            peer_attempt=2, num_bytes=1 << 20, crc32=0xDEADBEEF, tried=2,
        )
    ),
    "met_peer": site(met_peer=gossip_pb2.MetPeer(run=RUN, round=12, peer="site-2", received=True)),
    "met_peer_unreachable": site(met_peer=gossip_pb2.MetPeer(run=RUN, round=12, peer="site-2", unreachable=ERROR, tried=1)),
    "fetch_peer": site(
        fetch=control_pb2.Fetch(
            run=RUN, offset=4096, key=control_pb2.TaskKey(run=RUN, task="g12.site-2", attempt=1)
        )
    ),
    "meet_request": gossip_pb2.MeetRequest(meeting="A" * 24),
    "meet_reply": gossip_pb2.MeetReply(received_bytes=4096),
    "exchange_record": runs_pb2.RunSnapshot(
        run=RUN,
        exchange=gossip_pb2.ExchangeRecord(
            round=12, num_pairs=4, num_direct=3, relayed=["site-1, site-2 (site-1 to site-2: no answer)"]
        ),
    ),
    "round_record_exchange": runs_pb2.RoundRecord(
        round=12, version=1, num_sites=4, exchange=gossip_pb2.ExchangeRecord(round=12, num_pairs=4, num_direct=4)
    ),
    **{
        f"secure_step_{step.WhichOneof('step')}": server(secure_step=step) for step in SECURE_STEPS
    },
    **{
        f"secure_answer_{answer.WhichOneof('answer')}": site(secure_answer=answer) for answer in SECURE_ANSWERS
    },
    "round_record_secure": runs_pb2.RoundRecord(
        round=12, version=1, num_sites=4, secure=secure_pb2.SecureRecord(
            threat="active", num_sites=5, threshold=3, num_corrupt=0, fewest_survivors=3, sessions=2, dropped=["site-2"],
            liars={"site-3": "revealed another share than it was given"},
        ),
    ),
    "round_record_parts": runs_pb2.RoundRecord(
        round=12, version=1, num_sites=9, secure=secure_pb2.SecureRecord(
            threat="active", num_sites=9, threshold=3, num_corrupt=0, fewest_survivors=3, sessions=1, parts=3,
        ),
    ),
    "transfer_status": transfer_pb2.TransferStatus(received_bytes=8192, complete=True),
}  # fmt: skip


def model_file_bytes() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        with create(path, MANIFEST, {"atoll.version": "11"}) as data:
            data[:] = b"\x01" * MANIFEST.num_bytes
        return path.read_bytes()


def written() -> dict[str, bytes]:
    """What this version writes, by file name."""
    files = {f"{name}.bin": message.SerializeToString(deterministic=True) for name, message in MESSAGES.items()}
    files["manifest.bin"] = MANIFEST.encode()
    files["manifest_controls.bin"] = CONTROLLED.encode()
    files["manifest_frozen.bin"] = FROZEN.encode()
    files["frame.bin"] = encode_frame(4096, memoryview(bytes(range(48))))
    files["version_1/frame_1.bin"] = encode_frame(0, memoryview(PEER_UPDATE[:PEER_SPLIT]))
    files["version_1/frame_2.bin"] = encode_frame(PEER_SPLIT, memoryview(PEER_UPDATE[PEER_SPLIT:]))
    files["job.json"] = decode_job(JOB).canonical()
    files["job_secure.json"] = decode_job(JOB_SECURE).canonical()
    files["job_statistics.json"] = decode_job(JOB_STATISTICS).canonical()
    files["payload_list.bin"] = MAGIC + b"".join(prefix_of(len(note)) + note for note in NOTES)
    files["model.safetensors"] = model_file_bytes()
    return files


@pytest.mark.parametrize("name", sorted(written()))
def test_the_same_values_are_the_same_bytes(name: str) -> None:
    assert written()[name] == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_read(name: str) -> None:
    assert type(MESSAGES[name]).FromString((FOLDER / f"{name}.bin").read_bytes()) == MESSAGES[name]


def test_the_manifest_is_read() -> None:
    manifest = Manifest.decode((FOLDER / "manifest.bin").read_bytes())
    assert manifest == MANIFEST
    assert Manifest.decode((FOLDER / "manifest_controls.bin").read_bytes()) == CONTROLLED
    assert manifest.schema_hash == SCHEMA_HASH
    assert Manifest.decode((FOLDER / "manifest_frozen.bin").read_bytes()) == FROZEN


def test_the_list_of_payloads_is_read() -> None:
    assert payloads_in((FOLDER / "payload_list.bin").read_bytes()) == NOTES


def test_the_frame_is_read() -> None:
    offset, payload = decode_frame((FOLDER / "frame.bin").read_bytes())
    assert (offset, bytes(payload)) == (4096, bytes(range(48)))


def test_the_model_file_is_read() -> None:
    with open_model(FOLDER / "model.safetensors") as model:
        assert model.manifest == MANIFEST
        assert bytes(model.map) == b"\x01" * MANIFEST.num_bytes


@pytest.mark.parametrize("envelope", [site, server])
def test_every_control_message_has_a_sample(envelope: type[Message]) -> None:
    sampled = {message.WhichOneof("body") for message in MESSAGES.values() if isinstance(message, envelope)}
    assert sampled == {field.name for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in written().items():
        if not (FOLDER / name).exists():
            (FOLDER / name).parent.mkdir(exist_ok=True)
            (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
