"""Secure aggregation's arithmetic: keystream, a client's masking, and the server's unmasking.

``keystream`` is what ``mask_in_place`` reaches with 20 streams of ChaCha20, as a share of the bare
cipher that fills one buffer of 256 KiB again and again.

``client`` is all that a client does between its trained vector and the bytes of its upload, for k
neighbours: open their k sealed shares, agree on k keys, encode, and add k + 1 masks. Flower's side
is the real code of its secaggplus client mod, ``_collect_masked_vectors`` with the workflow's
defaults, fed by k real neighbours; it starts from its serialised parameters. Both hold the keys of
the shares already. Ours is timed with a copy of the vector before it, as it works in place: with
ChaCha20 (``chacha20``), and with AES-256 (``aes256-ctr``), which a cohort takes if all its devices
have instructions for it. Flower's masks come from the Mersenne Twister with a seed of 32 bits.
Ratios are Flower's seconds over ours. Memory is the peak beyond what is held before the call (the
vector among it), in a process of its own.

``server`` opens the sum of n = 100 devices of which 10 dropped out, with all cores: the secrets
from their shares, the keys, the masks, and the mean.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher as OpenCipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.app import ConfigRecord
from flwr.client.mod.secure_aggregation.secaggplus_mod import (
    SecAggPlusState,
    _collect_masked_vectors,
    _setup,
    _share_keys,
)
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key

from benchmarks.measure import (
    Figures,
    arguments,
    child,
    memory_of,
    ratio,
    report,
    reset_peak,
    spread,
    take_turns,
)
from headwater.common.secagg.fixed_point import (
    RingVector,
    decode_mean,
    encode_in_place,
    plan_encoding,
)
from headwater.common.secagg.graph import graph_size, neighbours
from headwater.common.secagg.keys import (
    agree,
    new_key_pair,
    pairwise_sign,
    public_key_of,
    seal,
    self_mask_key,
    unseal,
)
from headwater.common.secagg.masking import (
    CHUNK_BYTES,
    Cipher,
    Stream,
    mask_in_place,
)
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.shamir import combine, split

SESSION = bytes(32)
WEIGHT = 100
CASES = ((1_000_000, 20), (1_000_000, 50), (10_000_000, 20), (10_000_000, 50))
QUICK_CASES = ((10_000, 3),)
CLIP = 8.0  # Flower's default, and ours here
CIPHERS: tuple[Cipher, ...] = ("chacha20", "aes256-ctr")


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """What a client has of one neighbour when it masks."""

    name: str
    public: bytes
    share_key: Secret
    sealed: bytes


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client between training and upload."""

    values_P: torch.Tensor
    private: Secret
    neighbours: Sequence[Neighbour]

    def upload(self, cipher: Cipher, num_threads: int) -> RingVector:
        """Do everything from the vector to the upload; the vector is overwritten."""
        streams = [Stream(key=Secret(os.urandom(32)), sign=1)]
        for peer in self.neighbours:
            pair = ("me", peer.name)
            unseal(peer.share_key, peer.sealed, session=SESSION, ends=pair[::-1])
            key = agree(
                self.private, peer.public, session=SESSION, purpose="pairwise mask", ends=pair
            )
            streams.append(Stream(key=key, sign=pairwise_sign(*pair)))
        encoding = plan_encoding(max_weight=WEIGHT * len(streams), clip=CLIP)
        ring, _ = encode_in_place(self.values_P, weight=WEIGHT, encoding=encoding)
        mask_in_place(ring, streams, cipher=cipher, num_threads=num_threads)
        return ring


def trained(num_parameters: int) -> torch.Tensor:
    return torch.randn(num_parameters, generator=torch.Generator().manual_seed(0))


def our_client(num_parameters: int, k: int) -> Client:
    """Make a client and its k neighbours' messages."""
    own = new_key_pair()
    peers = []
    for i in range(k):
        name, pair = f"peer-{i:03}", new_key_pair()
        ends = (name, "me")
        key = agree(pair.private, own.public, session=SESSION, purpose="share", ends=ends)
        sealed = seal(key, bytes(64), session=SESSION, ends=ends)
        peers.append(Neighbour(name=name, public=pair.public, share_key=key, sealed=sealed))
    return Client(values_P=trained(num_parameters), private=own.private, neighbours=peers)


def flower_client(num_parameters: int, k: int) -> Callable[[], Any]:
    """Bring Flower's client mod to where it masks, with k neighbours that did the same."""
    configs: dict[str, Any] = {
        Key.SAMPLE_NUMBER: k + 1,
        Key.SHARE_NUMBER: k + 1,
        Key.THRESHOLD: (k + 1) // 2 + 1,
        Key.CLIPPING_RANGE: CLIP,
        Key.TARGET_RANGE: 4194304,
        Key.MOD_RANGE: 4294967296,
        Key.MAX_WEIGHT: 1000.0,
    }
    states = [SecAggPlusState() for _ in range(k + 1)]
    keys: dict[str, Any] = {}
    for node, state in enumerate(states, start=1):
        state.nid = node
        told = _setup(state, ConfigRecord(configs))
        keys[str(node)] = [told[Key.PUBLIC_KEY_1], told[Key.PUBLIC_KEY_2]]
    received: dict[str, Any] = {Key.CIPHERTEXT_LIST: [], Key.SOURCE_LIST: []}
    for state in states:
        dealt: dict[str, Any] = _share_keys(state, ConfigRecord(keys))
        if state.nid != 1:
            to_us = dealt[Key.DESTINATION_LIST].index(1)
            received[Key.SOURCE_LIST].append(state.nid)
            received[Key.CIPHERTEXT_LIST].append(dealt[Key.CIPHERTEXT_LIST][to_us])
    parameters = ndarrays_to_parameters([trained(num_parameters).numpy()])
    return functools.partial(
        _collect_masked_vectors, states[0], ConfigRecord(received), WEIGHT, parameters
    )


def keystream(num_parameters: int, k: int, *, turns: int, seconds_each: float) -> Figures:
    """Compare the masking of a vector with the bare cipher."""
    vector = np.zeros(num_parameters, dtype=np.uint32)
    streams = [Stream(key=Secret(os.urandom(32)), sign=1) for _ in range(k)]
    zeros, buffer = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    num_chunks = k * vector.nbytes // CHUNK_BYTES

    def bare() -> None:
        context = OpenCipher(ChaCha20(bytes(32), bytes(16)), mode=None).encryptor()
        for _ in range(num_chunks):
            context.update_into(zeros, buffer)

    loops = {
        "bare": bare,
        "one": lambda: mask_in_place(vector, streams),
        "two": lambda: mask_in_place(vector, streams, num_threads=2),
    }
    wall, cpu = take_turns(loops, turns=turns, seconds_each=seconds_each)
    done = k * vector.nbytes / (num_chunks * CHUNK_BYTES)  # the bare one leaves a remainder out
    return {
        "bare_gigabytes_per_second": num_chunks
        * CHUNK_BYTES
        / statistics.median(wall["bare"])
        / 1e9,
        "share_of_bare": ratio(cpu["bare"], to=cpu["one"]) * done,
        "share_of_bare_quartiles": [share * done for share in spread(cpu["bare"], to=cpu["one"])],
        "two_threads_wall_speedup": ratio(wall["one"], to=wall["two"]),
        "two_threads_cpu_ratio": ratio(cpu["two"], to=cpu["one"]),
    }


def client(num_parameters: int, k: int, *, turns: int, seconds_each: float) -> Figures:
    """Compare a client's masking with Flower's, in time, memory and bytes."""
    ours, flower = our_client(num_parameters, k), flower_client(num_parameters, k)
    plain = ours.values_P.clone()

    def masked(cipher: Cipher, num_threads: int) -> None:
        ours.values_P.copy_(plain)
        ours.upload(cipher, num_threads)

    loops: dict[str, Callable[[], Any]] = {"flower": flower}
    for cipher in CIPHERS:
        for num_threads in (1, 2):
            loops[f"{cipher}_{num_threads}_threads"] = functools.partial(
                masked, cipher, num_threads
            )
    wall, cpu = take_turns(loops, turns=turns, seconds_each=seconds_each)
    figures: Figures = {}
    for name in loops:
        figures[name] = {
            "cpu_seconds": statistics.median(cpu[name]),
            "wall_seconds": statistics.median(wall[name]),
            "cpu_ratio": ratio(cpu["flower"], to=cpu[name]),
            "cpu_ratio_quartiles": spread(cpu["flower"], to=cpu[name]),
            "wall_ratio": ratio(wall["flower"], to=wall[name]),
        }
    for who in ("headwater", "flower"):
        told = child("benchmarks.masking", "--who", who, "--size", f"{num_parameters}x{k}")
        figures[f"{who}_memory_bytes"] = told["beyond_bytes"]
        figures[f"{who}_upload_ratio"] = told["upload_bytes"] / (4 * num_parameters)
    return figures


def memory(who: str, size: str) -> Figures:
    """Return the peak beyond what was held before, of one client's masking in this process."""
    num_parameters, k = (int(part) for part in size.split("x"))
    if who == "flower":
        flower_client(1000, 2)()  # what the first call imports and caches
        flower = flower_client(num_parameters, k)
        gc.collect()
        reset_peak()
        before = memory_of()["VmRSS"]
        masked = flower()[Key.MASKED_PARAMETERS]
        upload_bytes = sum(len(part) for part in masked)
    else:
        our_client(1000, 2).upload("chacha20", 2)
        ours = our_client(num_parameters, k)
        gc.collect()
        reset_peak()
        before = memory_of()["VmRSS"]
        upload_bytes = ours.upload("chacha20", 2).nbytes
    beyond_bytes = memory_of()["VmHWM"] - before
    return {"beyond_bytes": beyond_bytes, "upload_bytes": upload_bytes}


def server(
    num_parameters: int, *, num_neighbours: int, threshold: int, turns: int, seconds_each: float
) -> Figures:
    """Time the opening of a masked sum of 100 devices, 10 of which dropped out after sharing."""
    names = [f"device-{i:03}" for i in range(100)]
    near = neighbours(names, num_neighbours=num_neighbours, seed=SESSION)
    dropped, survivors = names[::10], [n for i, n in enumerate(names) if i % 10]
    pairs = {name: new_key_pair() for name in names}
    public = {name: pair.public for name, pair in pairs.items()}
    shares: dict[str, dict[int, bytes]] = {}
    for name in names:
        secret = pairs[name].private.reveal() if name in dropped else os.urandom(32)
        rows = split([secret], threshold=threshold, num_holders=len(near[name]))
        holders = [h for h, peer in enumerate(near[name]) if peer in survivors][:threshold]
        shares[name] = {h + 1: rows[h, 0].tobytes() for h in holders}
    total = np.random.default_rng(0).integers(0, 2**32, num_parameters, dtype=np.uint32)
    encoding = plan_encoding(max_weight=WEIGHT * len(names), clip=CLIP)
    out = np.empty(num_parameters, dtype=np.float32)
    num_masks = 0

    def opened() -> None:
        nonlocal num_masks
        streams = []
        for name in survivors:
            seed = Secret(combine(shares[name]))
            key = self_mask_key(seed, session=SESSION, name=name)
            streams.append(Stream(key=key, sign=1))
        for gone in dropped:
            private = Secret(combine(shares[gone]))
            assert public_key_of(private) == public[gone]
            for peer in near[gone]:
                if peer in survivors:
                    ends = (gone, peer)
                    key = agree(
                        private,
                        public[peer],
                        session=SESSION,
                        purpose="pairwise mask",
                        ends=ends,
                    )
                    streams.append(Stream(key=key, sign=pairwise_sign(peer, gone)))
        mask_in_place(total, streams, remove=True, num_threads=len(os.sched_getaffinity(0)))
        decode_mean(total, encoding=encoding, weight=WEIGHT * len(survivors), out=out)
        num_masks = len(streams)

    wall, cpu = take_turns({"opened": opened}, turns=turns, seconds_each=seconds_each)
    return {
        "seconds": statistics.median(wall["opened"]),
        "cpu_seconds": statistics.median(cpu["opened"]),
        "num_masks": num_masks,
    }


def main() -> None:
    flags = arguments(__doc__, who=("headwater", "flower"), size=())
    torch.set_num_threads(1)
    if flags.who:
        report(memory(flags.who, flags.size), as_json=True, doc=__doc__)
        return
    cases = QUICK_CASES if flags.quick else CASES
    largest = 10_000 if flags.quick else 1_000_000
    turns, seconds_each = (2, 0.01) if flags.quick else (15, 0.2)
    graphs = {"complete": (99, 51)}
    for mode in ("semi-honest", "active"):
        sparse = graph_size(100, corrupted=0.1, dropout=0.1, mode=mode)
        graphs[f"k_{sparse.num_neighbours}"] = (sparse.num_neighbours, sparse.threshold)
    report(
        {
            "keystream": {
                f"P_{size}": keystream(size, 20, turns=turns, seconds_each=seconds_each)
                for size in (largest, 10 * largest)
            },
            "client": {
                f"P_{size}_k_{k}": client(
                    size, k, turns=turns if size < 10**7 else 5, seconds_each=seconds_each
                )
                for size, k in cases
            },
            "server": {
                name: server(
                    largest, num_neighbours=k, threshold=t, turns=turns, seconds_each=seconds_each
                )
                for name, (k, t) in graphs.items()
            },
            "targets": "share_of_bare >= 0.8; cpu_ratio on 1 thread >= 8, wall_ratio on 2 >= 14; "
            "headwater_memory_bytes <= 8 MB; headwater_upload_ratio <= 1.001; server seconds < 0.5",
        },
        as_json=flags.json,
        doc=__doc__,
    )


if __name__ == "__main__":
    main()
