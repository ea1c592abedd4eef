"""What Ray runs beside a keeper, without Ray."""

from __future__ import annotations

import pickle

import msgspec

from jettison.live.host.keeper_actor import KeeperActor
from jettison.live.host.placer import KeeperActor as WhatTheDriverSends
from jettison.live.wire.host_orders import KeeperPost
from jettison.transport.authority import Authority


def test_no_code_of_it_travels():
    assert WhatTheDriverSends is KeeperActor
    assert b"jettison.live.host.keeper_actor" in pickle.dumps(KeeperActor) and KeeperActor.__module__ != "__main__"


def test_it_starts_a_keeper_that_asks_for_a_certificate_and_sees_its_end():
    authority, actor = Authority(), KeeperActor()
    post = KeeperPost(
        number=0, life=0, address="tcp:127.0.0.1:1", token_hex="00", lease_s=2.0,
        authority_pem=authority.certificate.decode(),
    )  # fmt: skip
    request = bytes.fromhex(actor.start(msgspec.json.encode(post)).decode())
    assert authority.sign(request, post.identity).startswith(b"-----BEGIN CERTIFICATE")
    actor._process.stdin.close()  # it is given up
    actor.run()
    actor._process.stdout.close()
