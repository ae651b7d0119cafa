"""What every route needs of its request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from services.gateway.peers import Peers
from services.gateway.streams import Streams


def _peers(request: Request) -> Peers:
    found: Peers = request.app.state.peers
    return found


def _streams(request: Request) -> Streams:
    found: Streams = request.app.state.streams
    return found


ThePeers = Annotated[Peers, Depends(_peers)]
TheStreams = Annotated[Streams, Depends(_streams)]
RunId = Annotated[str, Path(max_length=200, description="A run id.")]
Book = Annotated[str, Query(max_length=200, description='"train", or "validation/STEP".')]
