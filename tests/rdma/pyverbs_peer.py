"""A peer that is not of this project: reads through Debian's pyverbs, and tries what it may not. Run with the system's Python.

Reads lines of JSON from stdin, and writes lines: first its request for queue pairs, then, once it has heard `{"answer", "region"}`, what it got.
"""

import hashlib
import json
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE, GID_INDEX, FIRST = "rxe0", 1, 1234


def say(value):
    print(json.dumps(value), flush=True)


def attempt(queue, completions, memory, opcode, address, key, nbytes):
    """The status of one request."""
    request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(memory.buf, nbytes, memory.lkey)], send_flags=e.IBV_SEND_SIGNALED)
    request.set_wr_rdma(key, address)
    queue.post_send(request)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        count, done = completions.poll(1)
        if count:
            return done[0].status
    raise TimeoutError("no completion within 60 s")


def main():
    context = Context(name=DEVICE)
    domain = PD(context)
    completions = CQ(context, 64)
    queues = [
        QP(domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=completions, rcq=completions, cap=QPCap(max_send_wr=16, max_recv_wr=1)))
        for _ in "12"
    ]
    gid = str(context.query_gid(1, GID_INDEX))
    address = bytes.fromhex(gid.replace(":", ""))
    rail = {"ethernet": True, "lid": 0, "gid": address.hex(), "mtu": 5, "reads_out": 4, "reads_in": 4}
    say({"by": "pyverbs", "connect": 1, "alive": [], "rails": [rail], "queues": [[0, 0, q.qp_num, FIRST] for q in queues]})

    heard = json.loads(sys.stdin.readline())
    for queue, (number, first) in zip(queues, heard["answer"]["ends"], strict=True):
        attributes = QPAttr(port_num=1)
        attributes.dest_qp_num, attributes.path_mtu = number, e.IBV_MTU_4096
        attributes.rq_psn, attributes.sq_psn = first, FIRST
        attributes.max_rd_atomic, attributes.max_dest_rd_atomic = 4, 4
        attributes.min_rnr_timer, attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 12, 16, 6, 6
        route = GlobalRoute(dgid=GID(heard["gid"]), sgid_index=GID_INDEX, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        queue.to_rts(attributes)

    _, start, nbytes, pieces, _ = heard["region"]
    memory = MR(domain, nbytes, e.IBV_ACCESS_LOCAL_WRITE)
    key = pieces[0][2][0]
    read = attempt(queues[0], completions, memory, e.IBV_WR_RDMA_READ, start, key, nbytes)
    digest = hashlib.sha256(memory.read(nbytes, 0)).hexdigest()
    memory.write(b"\0" * 4096, 4096, 0)
    write = attempt(queues[0], completions, memory, e.IBV_WR_RDMA_WRITE, start, key, 4096)
    beyond = attempt(queues[1], completions, memory, e.IBV_WR_RDMA_READ, start + nbytes - 8, key, 16)
    names = {
        e.IBV_WC_SUCCESS: "ok",
        e.IBV_WC_REM_ACCESS_ERR: "remote access error",
        e.IBV_WC_REM_INV_REQ_ERR: "remote invalid request error",
    }
    say({"read": names.get(read, read), "digest": digest, "write": names.get(write, write), "beyond": names.get(beyond, beyond)})


main()
