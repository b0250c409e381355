"""Content-addressed blobs (protocol/codec/blob_hash.py): kept on disk, served, and fetched from any holder."""

from peer.net.blobs.fetching import Coming, Fetcher, fetch_named
from peer.net.blobs.serving import NODE_COPIES, BlobServer, Text
from peer.net.blobs.store import NO_ROUND, Blob, BlobStore, Place

__all__ = [
    "NODE_COPIES",
    "NO_ROUND",
    "Blob",
    "BlobServer",
    "BlobStore",
    "Coming",
    "Fetcher",
    "Place",
    "Text",
    "fetch_named",
]
