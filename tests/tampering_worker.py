"""The worker of a site that is broken or lies: each round's reply is wrong in another way. Run with the site's folder."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from bad_replies import BAD_REPLIES, claim_samples

from gpfl.deploy import keys
from gpfl.deploy.messages import RoundReply, RoundRequest
from gpfl.deploy.worker import SiteFolder, Worker, serve
from gpfl.io.tensors import unpack_tensors

TAMPERED = dict(enumerate(BAD_REPLIES, 1))
"""By round, what is wrong with the reply. Round 0 is honest, and so are those after the last one of `CLAIMED`."""
CLAIMED = len(TAMPERED) + 1
"""The round in whose reply the site claims scores on 1e9 samples; the first time, it describes that many, too."""


class TamperingWorker(Worker):
    """A worker whose replies are wrong."""

    def answer(self, signed: bytes) -> bytes:
        flat, header = unpack_tensors(signed[keys.SIGNATURE_BYTES :], "the request")
        reply = super().answer(signed)
        if header["kind"] == "describe":
            honest, self._description = self._description, dataclasses.replace(self._description, sizes=(10**9, 0, 10))
            try:
                return reply if hasattr(self, "_described") else super().answer(signed)
            finally:
                self._described, self._description = True, honest
        number = RoundRequest.parse(header, flat).round
        if number in TAMPERED:
            return BAD_REPLIES[TAMPERED[number]][0](RoundReply.unpack(reply))
        return claim_samples(RoundReply.unpack(reply)) if number == CLAIMED else reply


if __name__ == "__main__":
    serve(TamperingWorker(SiteFolder(Path(sys.argv[1])), lambda line: print(line, flush=True)))
