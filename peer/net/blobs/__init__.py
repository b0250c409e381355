"""Content-addressed blobs (protocol/codec/blob_hash.py): kept on disk, served to anyone, fetched from anyone who holds them."""

from peer.net.blobs.fetching import Fetcher
from peer.net.blobs.named import fetch_named
from peer.net.blobs.serving import NODE_COPIES, BlobServer
from peer.net.blobs.store import NO_ROUND, Blob, BlobStore

__all__ = [
    "NODE_COPIES",
    "NO_ROUND",
    "Blob",
    "BlobServer",
    "BlobStore",
    "Fetcher",
    "fetch_named",
]
